// Reads memory as fast as this machine can: the limit of any decode kernel. Loaded by byte_limit.py.
#include <cstddef>
#include <cstdint>

// Reads `bytes` (a multiple of 512) at `data`, `passes` times, and returns the or of all words, so that nothing can be
// left out. Eight independent accumulators of one vector register each; the compiler picks the widest registers.
extern "C" uint64_t ReadAll(const uint64_t* data, size_t bytes, size_t passes) {
  uint64_t sum[64] = {};
  for (size_t pass = 0; pass < passes; ++pass) {
    for (size_t i = 0; i + 64 <= bytes / 8; i += 64)
      for (size_t j = 0; j < 64; ++j) sum[j] |= data[i + j];
    asm volatile("" ::: "memory");
  }
  uint64_t all = 0;
  for (const uint64_t word : sum) all |= word;
  return all;
}
