// Stacks that a thread of the host switches between by hand; the sanitizers are told.
#pragma once

#include <cstddef>

namespace kvfuse::emulated {

class Fiber {
 public:
  Fiber() = default;  // stands for the running thread; its fields are filled by the first Switch away from it
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the fiber ready to run `entry(argument)` from the start; what it ran before is forgotten. `entry` must not
  // return: it ends with a Switch that is never answered.
  void Start(void (*entry)(void*), void* argument);
  // Leaves `from`, which is running, for `to`; `for_good` when `from` has nothing left to run.
  static void Switch(Fiber& from, Fiber& to, bool for_good = false);

 private:
  static void Enter();
  void MakeStack();
  void Arrive();

  void* stack_pointer_ = nullptr;
  char* stack_ = nullptr;    // null: the thread's own
  void* context_ = nullptr;  // ucontext_t, where there is no assembly
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  void* asan_stack_ = nullptr;
  void* tsan_fiber_ = nullptr;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
};

// Orders what came before a Release before what comes after an Acquire of the same address, for ThreadSanitizer.
void Release(void* address);
void Acquire(void* address);
bool UnderThreadSanitizer();
// AddressSanitizer: nothing may be read or written there until it is allowed again.
void Forbid(void* address, size_t bytes);
void Allow(void* address, size_t bytes);

}  // namespace kvfuse::emulated
