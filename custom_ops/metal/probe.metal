// Small kernels that ask a device whether it computes as the other kernels assume: used by tests and the self-test.
// Every one writes `out` as rows of one result each, [results][count].
#include <metal_stdlib>
using namespace metal;

// cuda: kSelect 1
constant int kSelect [[function_constant(0)]];  // values: 0, 1, 2
constant float kTable[4] = {0.5, 1.5, 2.5, -0.5};

struct ProbeArgs {
  int count;
  float factor;
};

static inline float times(device const float* values, uint index, float factor) { return values[index] * factor; }

// One result: values[i] * factor; values[i] to the nearest integer, ties to even; or kTable[i mod 4].
kernel void probe_scale(device const float* values [[buffer(0)]], device float* out [[buffer(1)]],
                        constant ProbeArgs& args [[buffer(2)]], uint index [[thread_position_in_grid]]) {
  if (int(index) >= args.count) return;
  if (kSelect == 0) out[index] = times(values, index, args.factor);
  if (kSelect == 1) out[index] = rint(values[index]);
  if (kSelect == 2) out[index] = kTable[index & 3];
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

// f32 a, b, c: a * b + c with two roundings, fma(a, b, c), a / b, sqrt(a), rint(a), min(a, b), max(a, b),
// (a, b) · (c, a) with three roundings.
kernel void probe_floats(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                         device const float* c [[buffer(2)]], device float* out [[buffer(3)]],
                         constant ProbeArgs& args [[buffer(4)]], uint i [[thread_position_in_grid]]) {
  const int n = args.count;
  if (int(i) >= n) return;
  const float product = a[i] * b[i];
  out[i] = product + c[i];
  out[n + i] = fma(a[i], b[i], c[i]);
  out[2 * n + i] = a[i] / b[i];
  out[3 * n + i] = sqrt(a[i]);
  out[4 * n + i] = rint(a[i]);
  out[5 * n + i] = min(a[i], b[i]);
  out[6 * n + i] = max(a[i], b[i]);
  const float2 products = float2(a[i], b[i]) * float2(c[i], a[i]);
  out[7 * n + i] = products.x + products.y;
}

// f16 as bits: a + b, a - b, a * b, a / b, a * b + a with two roundings, then f32 c as f16, and f16 a as f32 and back.
kernel void probe_halves(device const half* a [[buffer(0)]], device const half* b [[buffer(1)]],
                         device const float* c [[buffer(2)]], device half* out [[buffer(3)]],
                         constant ProbeArgs& args [[buffer(4)]], uint i [[thread_position_in_grid]]) {
  const int n = args.count;
  if (int(i) >= n) return;
  out[i] = a[i] + b[i];
  out[n + i] = a[i] - b[i];
  out[2 * n + i] = a[i] * b[i];
  out[3 * n + i] = a[i] / b[i];
  const half product = a[i] * b[i];
  out[4 * n + i] = product + a[i];
  out[5 * n + i] = half(c[i]);
  out[6 * n + i] = half(float(a[i]));
}

// i32 a, b: the results are listed in tests/device/test_probe.py.
kernel void probe_integers(device const int* a [[buffer(0)]], device const int* b [[buffer(1)]],
                           device int* out [[buffer(2)]], constant ProbeArgs& args [[buffer(3)]],
                           uint i [[thread_position_in_grid]]) {
  const int n = args.count;
  if (int(i) >= n) return;
  const uint x = uint(a[i]), y = uint(b[i]);
  out[i] = int(x + y);
  out[n + i] = int(x * y);
  out[2 * n + i] = a[i] >> (y & 31u);
  out[3 * n + i] = int(x >> (y & 31u));
  out[4 * n + i] = popcount(a[i]);
  out[5 * n + i] = clz(a[i]);
  out[6 * n + i] = ctz(a[i]);
  out[7 * n + i] = extract_bits(a[i], 4u, 4u);
  out[8 * n + i] = int(extract_bits(x, 4u, 4u));
  out[9 * n + i] = int(char(a[i]));
  const char4 bytes = as_type<char4>(a[i]);
  const short4 products = short4(bytes) * short4(as_type<char4>(b[i]));
  out[10 * n + i] = int(products.x) + int(products.y) + int(products.z) + int(products.w);
  out[11 * n + i] = mulhi(a[i], b[i]);
  out[12 * n + i] = as_type<int>(as_type<float>(x));
  out[13 * n + i] = int(bytes.wz.x) + int(bytes.xy.y);
}

// Across the lanes of a simdgroup, of i32 a, threads and count a multiple of 32.
kernel void probe_lanes(device const int* a [[buffer(0)]], device int* out [[buffer(1)]],
                        constant ProbeArgs& args [[buffer(2)]], uint i [[thread_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]]) {
  const int n = args.count;
  out[i] = simd_shuffle_xor(a[i], ushort(5));
  out[n + i] = simd_shuffle_up(a[i], ushort(3));
  out[2 * n + i] = simd_shuffle_down(a[i], ushort(3));
  out[3 * n + i] = simd_shuffle(a[i], ushort((lane * 7) & 31u));
  out[4 * n + i] = simd_broadcast(a[i], ushort(9));
  out[5 * n + i] = simd_broadcast_first(a[i]);
  out[6 * n + i] = simd_sum(a[i]);
  out[7 * n + i] = simd_max(a[i]);
  out[8 * n + i] = simd_min(a[i]);
  out[9 * n + i] = simd_or(a[i]);
  out[10 * n + i] = simd_and(a[i]);
  out[11 * n + i] = simd_xor(a[i]);
  out[12 * n + i] = simd_prefix_exclusive_sum(a[i]);
  out[13 * n + i] = simd_any(a[i] > 40) ? 1 : 0;
  out[14 * n + i] = simd_all(a[i] > -40) ? 1 : 0;
  const char4 moved = simd_shuffle_xor(as_type<char4>(a[i]), ushort(31));
  out[15 * n + i] = as_type<int>(moved);
  out[16 * n + i] = simd_is_first() ? 1 : 0;
  const float4 four = simd_shuffle_xor(float4(float(lane), 1.0, 2.0, float(i)), ushort(1));
  out[17 * n + i] = int(four.x) + 1000 * int(four.w);
}

// What a thread is told of its place.
kernel void probe_positions(device int* out [[buffer(0)]], constant ProbeArgs& args [[buffer(1)]],
                            uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
                            uint index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                            ushort lane [[thread_index_in_simdgroup]],
                            ushort simdgroup [[simdgroup_index_in_threadgroup]],
                            ushort width [[threads_per_simdgroup]]) {
  const int n = args.count;
  const uint number = ((group.z * groups.y + group.y) * groups.x + group.x) * threads + index;
  out[number] = int(group.x);
  out[n + number] = int(group.y);
  out[2 * n + number] = int(group.z);
  out[3 * n + number] = int(index);
  out[4 * n + number] = int(lane);
  out[5 * n + number] = int(simdgroup);
  out[6 * n + number] = int(width);
}
