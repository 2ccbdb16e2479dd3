#include "device/emulated/group.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "device/emulated/fiber.h"
#include "device/emulated/grid.h"
#include "device/emulated/problem.h"
#include "kvfuse/error.h"

namespace kvfuse::emulated {
namespace {

constexpr size_t kRedZone =
    64;  // between the variables of threadgroup memory, so that AddressSanitizer sees an overrun
constexpr size_t kArenaBytes = kMaxSharedBytes + (kMaxSharedVariables + 1) * kRedZone;

class Group;

struct Thread {
  Fiber fiber;
  Group* group = nullptr;
  uint32_t number = 0;
  enum State { kRunning, kInSimd, kAtBarrier, kDone } state = kRunning;
  Site site{};
};

// Threads of a simdgroup that meet. `lanes` and `result` alternate: a fast lane may be at the next meeting while a slow
// one still reads what it got from this.
struct Simdgroup {
  uint32_t alive = 0, arrived = 0;
  int phase = 0;
  Lanes lanes[2];
  Bits result[2];
  Bits (*combine)(const Lanes&) = nullptr;
  char order[2];  // what ThreadSanitizer orders barriers by
};

// A random number generator of one line (xorshift64*).
struct Random {
  uint64_t state;
  uint32_t Below(uint32_t n) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return static_cast<uint32_t>(((state * 0x2545f4914f6cdd1dull) >> 32) * n >> 32);
  }
};

// One threadgroup at a time on the calling thread of the host; kept for the next dispatch, as it owns the stacks.
class Group {
 public:
  void RunGrid(const Grid& grid, const Schedule& schedule);

  void Barrier(bool orders_memory, Site site);
  void SimdBarrier(bool orders_memory, Site site);
  Bits Meet(Bits mine, Bits (*combine)(const Lanes&), Site site, const Lanes** lanes);
  void* Shared(size_t bytes, size_t alignment, Site site);
  int32_t Constant(int index, const char* name);
  [[noreturn]] void Abandon(const Problem& problem);
  Thread& current() { return *current_; }

 private:
  static void Enter(void* thread);
  void RunGroup(uint32_t number, char* arena);
  void Finish();
  void CompleteSimd(Simdgroup& simdgroup, uint32_t first_thread, const Thread* last);
  void CompleteBarrier(const Thread* last);
  void MakeReady(Thread& thread) { ready_[(ready_head_ + ready_count_++) % kMaxThreads] = &thread; }
  // Calls f for lanes or threads in the order of the schedule.
  template <typename F>
  void InOrder(uint32_t count, F f) const;
  Thread* NextReady();
  void Block();
  Problem WhyStuck() const;

  const Grid* grid_ = nullptr;
  Schedule schedule_;
  Random random_{1};
  metal::uint3 group_{0u};
  std::vector<std::unique_ptr<Thread>> threads_;
  Simdgroup simdgroups_[kMaxThreads / kSimdWidth];
  Fiber main_;
  Thread* current_ = nullptr;
  Thread* ready_[kMaxThreads];
  uint32_t ready_head_ = 0, ready_count_ = 0, alive_ = 0, at_barrier_ = 0;
  Site barrier_{};
  int barrier_phase_ = 0;
  char barrier_order_[2], start_order_ = 0, end_order_ = 0;
  char* arena_ = nullptr;
  size_t arena_used_ = 0, shared_bytes_ = 0, variables_ = 0;
  struct Variable {
    const char* name;
    char* address;
  } variable_[kMaxSharedVariables];
  Problem problem_;
};

thread_local Group* running = nullptr;

bool Same(const Site& a, const Site& b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

template <typename F>
void Group::InOrder(uint32_t count, F f) const {
  // The ready list of the skewed schedule is a stack: what is put last runs first.
  const bool descending = schedule_.order == Schedule::kReverse || schedule_.order == Schedule::kSkewed;
  for (uint32_t i = 0; i < count; ++i) f(descending ? count - 1 - i : i);
}

Thread* Group::NextReady() {
  if (ready_count_ == 0) return nullptr;
  const uint32_t last = (ready_head_ + ready_count_ - 1) % kMaxThreads;
  --ready_count_;
  if (schedule_.order == Schedule::kSkewed) return ready_[last];
  if (schedule_.order == Schedule::kRandom)
    std::swap(ready_[ready_head_], ready_[(ready_head_ + random_.Below(ready_count_ + 1)) % kMaxThreads]);
  Thread* next = ready_[ready_head_];
  ready_head_ = (ready_head_ + 1) % kMaxThreads;
  return next;
}

void Group::Enter(void* pointer) {
  Thread& self = *static_cast<Thread*>(pointer);
  Group& group = *self.group;
  Acquire(&group.start_order_);
  const Grid& grid = *group.grid_;
  grid.kernel->run(grid.arguments.data(),
                   Position({grid.groups[0], grid.groups[1], grid.groups[2]}, group.group_, grid.threads, self.number));
  group.Finish();
}

void Group::Finish() {
  Thread& self = *current_;
  self.state = Thread::kDone;
  --alive_;
  Simdgroup& simdgroup = simdgroups_[self.number / kSimdWidth];
  simdgroup.alive &= ~(1u << self.number % kSimdWidth);
  if (simdgroup.arrived != 0 && simdgroup.arrived == simdgroup.alive)
    CompleteSimd(simdgroup, self.number / kSimdWidth * kSimdWidth, nullptr);
  Block();
}

// Leaves the running thread for the next that can run; comes back when another thread makes it ready.
void Group::Block() {
  Thread& self = *current_;
  Thread* next = NextReady();
  if (next == &self) return;
  Release(&end_order_);  // should the thread never come back: the host goes on after all that it did
  if (next == nullptr) {
    if (alive_ != 0) problem_ = WhyStuck();
    Fiber::Switch(self.fiber, main_, self.state == Thread::kDone);
  } else {
    current_ = next;
    Fiber::Switch(self.fiber, next->fiber, self.state == Thread::kDone);
  }
}

// No thread can go on: some wait at a barrier, and another, in a simd operation or at its end, will not come.
Problem Group::WhyStuck() const {
  Problem problem{Problem::kBarrierNotReached};
  const Thread* missing = nullptr;
  for (uint32_t i = 0; i < grid_->threads; ++i) {
    const Thread& thread = *threads_[i];
    if (thread.state == Thread::kAtBarrier)
      problem.expected = thread.site;
    else if (missing == nullptr || (missing->state == Thread::kDone && thread.state == Thread::kInSimd))
      missing = &thread;
  }
  problem.thread = missing->number;
  if (missing->state == Thread::kInSimd) problem.found = missing->site;
  return problem;
}

// Leaves all threads of the group where they are, for good.
void Group::Abandon(const Problem& problem) {
  problem_ = problem;
  Release(&end_order_);
  Fiber::Switch(current_->fiber, main_, true);
  __builtin_unreachable();
}

void Group::Barrier(bool orders_memory, Site site) {
  Thread& self = *current_;
  if (at_barrier_ == 0) barrier_ = site;
  if (!Same(barrier_, site)) Abandon({Problem::kAnotherBarrier, self.number, 0, barrier_, site});
  const int phase = barrier_phase_;
  if (orders_memory) Release(&barrier_order_[phase]);
  self.site = site;
  self.state = Thread::kAtBarrier;
  if (++at_barrier_ == grid_->threads)
    CompleteBarrier(&self);
  else
    Block();
  if (orders_memory) Acquire(&barrier_order_[phase]);
}

void Group::CompleteBarrier(const Thread* last) {
  at_barrier_ = 0;
  barrier_phase_ ^= 1;
  InOrder(grid_->threads, [&](uint32_t i) {
    threads_[i]->state = Thread::kRunning;
    if (threads_[i].get() != last) MakeReady(*threads_[i]);
  });
}

// The meeting of a simdgroup. `lanes` receives what all brought; it stays valid until the thread's next meeting.
Bits Group::Meet(Bits mine, Bits (*combine)(const Lanes&), Site site, const Lanes** lanes) {
  Thread& self = *current_;
  Simdgroup& simdgroup = simdgroups_[self.number / kSimdWidth];
  const uint32_t lane = self.number % kSimdWidth, first = self.number - lane;
  if (simdgroup.arrived != 0) {
    const Thread& other = *threads_[first + static_cast<uint32_t>(__builtin_ctz(simdgroup.arrived))];
    if (!Same(other.site, site)) Abandon({Problem::kAnotherSimdSite, self.number, 0, other.site, site});
  }
  const int phase = simdgroup.phase;
  simdgroup.lanes[phase].values[lane] = mine;
  simdgroup.arrived |= 1u << lane;
  self.site = site;
  self.state = Thread::kInSimd;
  simdgroup.combine = combine;
  if (simdgroup.arrived == simdgroup.alive) {
    CompleteSimd(simdgroup, first, &self);
  } else {
    Block();
  }
  *lanes = &simdgroup.lanes[phase];
  return simdgroup.result[phase];
}

// All lanes that have not ended are there: by the arrival of the last, or by its end.
void Group::CompleteSimd(Simdgroup& simdgroup, uint32_t first_thread, const Thread* last) {
  Lanes& lanes = simdgroup.lanes[simdgroup.phase];
  lanes.active = simdgroup.arrived;
  lanes.descending = schedule_.order != Schedule::kForward;
  if (simdgroup.combine != nullptr) simdgroup.result[simdgroup.phase] = simdgroup.combine(lanes);
  InOrder(kSimdWidth, [&](uint32_t lane) {
    if ((simdgroup.arrived >> lane & 1u) == 0) return;
    Thread& thread = *threads_[first_thread + lane];
    thread.state = Thread::kRunning;
    if (&thread != last) MakeReady(thread);
  });
  simdgroup.arrived = 0;
  simdgroup.phase ^= 1;
}

void Group::SimdBarrier(bool orders_memory, Site site) {
  Simdgroup& simdgroup = simdgroups_[current_->number / kSimdWidth];
  const int phase = simdgroup.phase;
  if (orders_memory) Release(&simdgroup.order[phase]);
  const Lanes* lanes;
  Meet({}, nullptr, site, &lanes);
  if (orders_memory) Acquire(&simdgroup.order[phase]);
}

void* Group::Shared(size_t bytes, size_t alignment, Site site) {
  for (size_t i = 0; i < variables_; ++i)
    if (variable_[i].name == site.what) return variable_[i].address;
  shared_bytes_ += (bytes + 15) / 16 * 16;
  if (shared_bytes_ > kMaxSharedBytes || variables_ == kMaxSharedVariables)
    Abandon({Problem::kSharedMemory, current_->number, static_cast<int64_t>(shared_bytes_), site, {}});
  arena_used_ = (arena_used_ + kRedZone + alignment - 1) / alignment * alignment;
  char* address = arena_ + arena_used_;
  arena_used_ += bytes;
  Allow(address, bytes);
  for (size_t i = 0; i < bytes; ++i) static_cast<volatile char*>(address)[i] = static_cast<char>(0xff);
  variable_[variables_++] = {site.what, address};
  return address;
}

int32_t Group::Constant(int index, const char* name) {
  for (const auto& constant : grid_->constants)
    if (constant.first == index) return constant.second;
  Abandon({Problem::kConstant, current_->number, index, {name, "", 0}, {}});
}

void Group::RunGroup(uint32_t number, char* arena) {
  group_ = {number % grid_->groups[0], number / grid_->groups[0] % grid_->groups[1],
            number / grid_->groups[0] / grid_->groups[1]};
  random_.state = (schedule_.seed * 0x9e3779b97f4a7c15ull + number) * 2 + 1;
  for (int i = 0; i < 4; ++i) random_.Below(2);
  arena_ = arena;
  arena_used_ = shared_bytes_ = variables_ = 0;
  Forbid(arena_, kArenaBytes);
  ready_head_ = ready_count_ = at_barrier_ = 0;
  alive_ = grid_->threads;
  while (threads_.size() < grid_->threads) threads_.push_back(std::make_unique<Thread>());
  for (uint32_t i = 0; i < grid_->threads / kSimdWidth; ++i) {
    simdgroups_[i].alive = ~0u;
    simdgroups_[i].arrived = 0;
  }
  InOrder(grid_->threads, [&](uint32_t i) {
    Thread& thread = *threads_[i];
    thread.group = this;
    thread.number = i;
    thread.state = Thread::kRunning;
    thread.fiber.Start(&Group::Enter, &thread);
    MakeReady(thread);
  });
  current_ = NextReady();
  Fiber::Switch(main_, current_->fiber);
}

void Group::RunGrid(const Grid& grid, const Schedule& schedule) {
  grid_ = &grid;
  schedule_ = schedule;
  problem_ = {};
  const uint32_t count = grid.groups[0] * grid.groups[1] * grid.groups[2];
  // Groups do not wait for each other. ThreadSanitizer, which is not told of any order between them, would call it a
  // race that they use the same memory one after another; there each has its own.
  const uint32_t arenas = UnderThreadSanitizer() ? count : 1;
  const auto memory = std::make_unique<char[]>(arenas * kArenaBytes + 16);
  char* aligned = memory.get() + (16 - reinterpret_cast<uintptr_t>(memory.get()) % 16) % 16;
  Group* outer = running;
  running = this;
  Release(&start_order_);
  Random order{schedule.seed * 2 + 1};
  std::vector<uint32_t> numbers(count);
  for (uint32_t i = 0; i < count; ++i) numbers[i] = schedule.order == Schedule::kReverse ? count - 1 - i : i;
  if (schedule.order == Schedule::kRandom)
    for (uint32_t i = count; i > 1; --i) std::swap(numbers[i - 1], numbers[order.Below(i)]);
  for (uint32_t i = 0; i < count && problem_.kind == Problem::kNone; ++i)
    RunGroup(numbers[i], aligned + (i % arenas) * kArenaBytes);
  Acquire(&end_order_);
  Allow(memory.get(), arenas * kArenaBytes + 16);
  running = outer;
  if (problem_.kind != Problem::kNone) throw Error(Describe(problem_, grid.kernel->name));
}

}  // namespace

void ThreadgroupBarrier(bool orders_memory, Site site) { running->Barrier(orders_memory, site); }
void SimdgroupBarrier(bool orders_memory, Site site) { running->SimdBarrier(orders_memory, site); }

Bits FromLane(Bits mine, uint32_t from, Site site) {
  const Lanes* lanes;
  running->Meet(mine, nullptr, site, &lanes);
  if (from >= kSimdWidth || (lanes->active >> from & 1u) == 0)
    running->Abandon({Problem::kLaneWithoutPart, running->current().number, from, site, {}});
  return lanes->values[from];
}

Bits Combine(Bits mine, Bits (*combine)(const Lanes&), Site site) {
  const Lanes* lanes;
  return running->Meet(mine, combine, site, &lanes);
}

uint32_t ActiveLanes(Site site) {
  const Lanes* lanes;
  running->Meet({}, nullptr, site, &lanes);
  return lanes->active;
}

uint32_t LaneIndex() { return running->current().number % kSimdWidth; }
void* SharedMemory(size_t bytes, size_t alignment, Site site) { return running->Shared(bytes, alignment, site); }
int32_t ConstantValue(int index, const char* name) { return running->Constant(index, name); }

void Run(const Grid& grid, const Schedule& schedule) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<Group>> idle;  // groups own stacks: as many as dispatches ever ran at once
  std::unique_ptr<Group> group;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!idle.empty()) {
      group = std::move(idle.back());
      idle.pop_back();
    }
  }
  if (!group) group = std::make_unique<Group>();
  struct GiveBack {
    std::unique_ptr<Group>& group;
    ~GiveBack() {
      std::lock_guard<std::mutex> lock(mutex);
      idle.push_back(std::move(group));
    }
  } give_back{group};
  group->RunGrid(grid, schedule);
}

}  // namespace kvfuse::emulated
