#include "device/emulated/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "kvfuse/error.h"

// Without assembly for this processor (or to test that), the C library switches, which asks the kernel each time.
#if (!defined(__x86_64__) && !defined(__aarch64__)) || defined(KVFUSE_UCONTEXT)
#undef KVFUSE_UCONTEXT
#define KVFUSE_UCONTEXT 1
#include <ucontext.h>
#else
#define KVFUSE_UCONTEXT 0
#endif

// The sanitizers' interface, present only in programs that are built with them. This file itself is compiled without:
// what it does is no concern of the kernels.
extern "C" {
#define KVFUSE_WEAK __attribute__((weak))
KVFUSE_WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
KVFUSE_WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
KVFUSE_WEAK void __asan_poison_memory_region(const volatile void* address, size_t size);
KVFUSE_WEAK void __asan_unpoison_memory_region(const volatile void* address, size_t size);
KVFUSE_WEAK void* __tsan_get_current_fiber();
KVFUSE_WEAK void* __tsan_create_fiber(unsigned flags);
KVFUSE_WEAK void __tsan_destroy_fiber(void* fiber);
KVFUSE_WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
KVFUSE_WEAK void __tsan_acquire(void* address);
KVFUSE_WEAK void __tsan_release(void* address);
}

namespace kvfuse::emulated {
namespace {

constexpr unsigned kTsanNoSync = 1;  // a switch orders nothing: barriers do
thread_local Fiber *leaving = nullptr, *arriving = nullptr;

size_t StackBytes() {
  // AddressSanitizer puts red zones around every local variable.
  return __asan_poison_memory_region != nullptr || __tsan_create_fiber != nullptr ? 512u << 10 : 64u << 10;
}

}  // namespace

#if KVFUSE_UCONTEXT
#elif defined(__x86_64__)
extern "C" void kvfuse_switch_stack(void** save, void* load);
asm(R"(
.text
.p2align 4
.globl kvfuse_switch_stack
.hidden kvfuse_switch_stack
.type kvfuse_switch_stack, @function
kvfuse_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kvfuse_switch_stack, . - kvfuse_switch_stack
)");
#elif defined(__aarch64__)
extern "C" void kvfuse_switch_stack(void** save, void* load);
asm(R"(
.text
.p2align 4
.globl kvfuse_switch_stack
.hidden kvfuse_switch_stack
.type kvfuse_switch_stack, %function
kvfuse_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size kvfuse_switch_stack, . - kvfuse_switch_stack
)");
#endif

Fiber::~Fiber() {
  if (stack_ != nullptr) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    munmap(stack_ - page, size_ + page);
  }
  if (stack_ != nullptr && tsan_fiber_ != nullptr) __tsan_destroy_fiber(tsan_fiber_);
#if KVFUSE_UCONTEXT
  delete static_cast<ucontext_t*>(context_);
#endif
}

void Fiber::MakeStack() {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_ = StackBytes();
  void* memory =
      mmap(nullptr, size_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) FailMemory("[emulated] expected memory for the stack of a GPU thread; found none");
  mprotect(memory, page, PROT_NONE);  // a kernel that needs more stops here
  stack_ = static_cast<char*>(memory) + page;
  bottom_ = stack_;
  if (__tsan_create_fiber != nullptr) tsan_fiber_ = __tsan_create_fiber(0);
}

void Fiber::Enter() {
  Fiber* self = arriving;
  self->Arrive();
  self->entry_(self->argument_);
  __builtin_trap();  // an entry never returns
}

// The sanitizer knows the bounds of the stack that was left: that is how those of the first one become known.
void Fiber::Arrive() {
  if (__sanitizer_finish_switch_fiber != nullptr)
    __sanitizer_finish_switch_fiber(asan_stack_, &leaving->bottom_, &leaving->size_);
}

void Fiber::Start(void (*entry)(void*), void* argument) {
  if (stack_ == nullptr) MakeStack();
  entry_ = entry;
  argument_ = argument;
  asan_stack_ = nullptr;
  Allow(stack_, size_);
#if KVFUSE_UCONTEXT
  if (context_ == nullptr) context_ = new ucontext_t;
  auto* context = static_cast<ucontext_t*>(context_);
  getcontext(context);
  context->uc_stack.ss_sp = stack_;
  context->uc_stack.ss_size = size_;
  context->uc_link = nullptr;
  makecontext(context, &Enter, 0);
#elif defined(__x86_64__)
  auto* top = reinterpret_cast<uint64_t*>(stack_ + size_);
  *--top = 0;                                   // where Enter would return to
  *--top = reinterpret_cast<uint64_t>(&Enter);  // and where the switch returns to
  for (int i = 0; i < 6; ++i) *--top = 0;       // six registers
  stack_pointer_ = top;
#elif defined(__aarch64__)
  auto* top = reinterpret_cast<uint64_t*>(stack_ + size_) - 20;
  std::memset(top, 0, 160);
  top[11] = reinterpret_cast<uint64_t>(&Enter);  // x30
  stack_pointer_ = top;
#endif
}

void Fiber::Switch(Fiber& from, Fiber& to, bool for_good) {
  if (__sanitizer_start_switch_fiber != nullptr)  // without a place to keep it, the sanitizer frees its own stack
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.asan_stack_, to.bottom_, to.size_);
  if (__tsan_switch_to_fiber != nullptr) {
    if (from.tsan_fiber_ == nullptr) from.tsan_fiber_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(to.tsan_fiber_, kTsanNoSync);
  }
  leaving = &from;
  arriving = &to;
#if !KVFUSE_UCONTEXT
  kvfuse_switch_stack(&from.stack_pointer_, to.stack_pointer_);
#else
  if (from.context_ == nullptr) from.context_ = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.context_), static_cast<ucontext_t*>(to.context_));
#endif
  from.Arrive();
}

void Release(void* address) {
  if (__tsan_release != nullptr) __tsan_release(address);
}
void Acquire(void* address) {
  if (__tsan_acquire != nullptr) __tsan_acquire(address);
}
bool UnderThreadSanitizer() { return __tsan_create_fiber != nullptr; }
void Forbid(void* address, size_t bytes) {
  if (__asan_poison_memory_region != nullptr) __asan_poison_memory_region(address, bytes);
}
void Allow(void* address, size_t bytes) {
  if (__asan_unpoison_memory_region != nullptr) __asan_unpoison_memory_region(address, bytes);
}

}  // namespace kvfuse::emulated
