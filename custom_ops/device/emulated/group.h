// What a running GPU thread asks of its threadgroup: barriers, simd operations, threadgroup memory, constants.
// Compiled without sanitizers, so that TSan sees the kernels' accesses to memory and none of the emulator's own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvfuse::emulated {

struct Site {
  const char* what;  // the function that was called, and where
  const char* file;
  int line;
};

// A value of up to 16 bytes on its way between lanes.
struct Bits {
  uint64_t low, high;
};
struct Lanes {
  Bits values[32];
  uint32_t active;  // bit i: lane i takes part
  bool descending;  // the order of sums, which Metal leaves open
};

// All threads of the threadgroup meet; what they wrote before is seen by all after, when `orders_memory`.
void ThreadgroupBarrier(bool orders_memory, Site site);
void SimdgroupBarrier(bool orders_memory, Site site);
// All lanes of the simdgroup that have not ended meet: each gets the value that lane `from` brought, or what
// `combine` makes of all, or the set of lanes that take part.
Bits FromLane(Bits mine, uint32_t from, Site site);
Bits Combine(Bits mine, Bits (*combine)(const Lanes& lanes), Site site);
uint32_t ActiveLanes(Site site);
// The number of the calling thread in its simdgroup.
uint32_t LaneIndex();
// The threadgroup's variable of that name, filled with ones (NaN, for floats) before its first use.
void* SharedMemory(size_t bytes, size_t alignment, Site site);
int32_t ConstantValue(int index, const char* name);

}  // namespace kvfuse::emulated
