// Small kernels that ask a device whether it computes as the other kernels assume: used by tests and the self-test.
#include <metal_stdlib>
using namespace metal;

// cuda: kSelect 1
constant int kSelect [[function_constant(0)]];  // values: 0, 1
constant float kTable[4] = {0.5, 1.5, 2.5, -0.5};

struct ProbeArgs {
  int count;
  float factor;
};

static inline float times(device const float* values, uint index, float factor) { return values[index] * factor; }

// out[i] = values[i] * factor, or rint(values[i]) when kSelect is 1.
kernel void probe_scale(device const float* values [[buffer(0)]], device float* out [[buffer(1)]],
                        constant ProbeArgs& args [[buffer(2)]], uint index [[thread_position_in_grid]]) {
  if (int(index) >= args.count) return;
  out[index] = kSelect == 1 ? rint(values[index]) + 0.0 * kTable[index & 3] : times(values, index, args.factor);
}

// Sums of a threadgroup's values by an xor tree inside simdgroups and through threadgroup memory between them.
kernel void probe_sum(device const int* values [[buffer(0)]], device int* out [[buffer(1)]],
                      uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                      uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup int partial[32];
  int sum = values[group * threads + thread_index];
  for (ushort step = 16; step > 0; step >>= 1) sum += simd_shuffle_xor(sum, step);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0) {
    int mine = lane < simdgroups ? partial[lane] : 0;
    mine = simd_sum(mine);
    if (lane == 0) out[group] = mine;
  }
}
