// Kernels with one mistake each, and sound ones beside them: the emulated device must tell them apart.
#include <metal_stdlib>
using namespace metal;

constant int kMode [[function_constant(3)]];  // values: 0

struct Settings {
  int count;
  int shift;
};

// -- sound -----------------------------------------------------------------------------------------------------------

// Every thread gets its right neighbour's number, through threadgroup memory.
kernel void neighbour(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                      constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                      uint group [[threadgroup_position_in_grid]], uint threads [[threads_per_threadgroup]]) {
  threadgroup int line[1024];
  for (int turn = 0; turn < settings.count; ++turn) {
    line[i] = in[group * threads + i] + turn;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[group * threads + i] = line[(i + 1) % threads];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Lanes that have ended take no part.
kernel void sum_of_the_rest(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                            constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  if (int(i) < settings.count) return;
  out[i] = simd_sum(in[i]);
}

// The dispatch does not set kMode.
kernel void constant_value(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                           constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i] + settings.shift + kMode;
}

kernel void count_atomically(device const int* in [[buffer(0)]], device atomic_int* out [[buffer(1)]],
                             constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  atomic_fetch_add_explicit(out + in[i] % settings.count, 1, memory_order_relaxed);
}

// -- races -----------------------------------------------------------------------------------------------------------

kernel void missing_barrier(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                            constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                            uint threads [[threads_per_threadgroup]]) {
  threadgroup int line[1024];
  line[i] = in[i];
  out[i] = line[(i + 1) % threads] + settings.shift;
}

// The second turn overwrites what a slow thread still has to read.
kernel void one_barrier_too_few(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                                constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                                uint threads [[threads_per_threadgroup]]) {
  threadgroup int line[1024];
  for (int turn = 0; turn < settings.count; ++turn) {
    line[i] = in[i] + turn;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] += line[(i + 1) % threads];
  }
}

kernel void barrier_that_orders_nothing(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                                        constant Settings& settings [[buffer(2)]],
                                        uint i [[thread_index_in_threadgroup]],
                                        uint threads [[threads_per_threadgroup]]) {
  threadgroup int line[1024];
  line[i] = in[i];
  threadgroup_barrier(mem_flags::mem_none);
  out[i] = line[(i + 1) % threads] + settings.shift;
}

// A simd operation is no barrier, although the lanes meet in it.
kernel void lockstep(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                     constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup int line[1024];
  line[i] = in[i];
  const int sum = simd_sum(settings.shift);
  out[i] = line[i ^ 1] + sum;
}

kernel void groups_write_one_word(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                                  constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                                  uint group [[threadgroup_position_in_grid]]) {
  if (i == group) out[0] = in[group] + settings.shift;
}

// -- bounds ----------------------------------------------------------------------------------------------------------

kernel void read_beyond(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                        constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i + settings.shift];
}

kernel void write_beyond(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                         constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  out[i + settings.shift] = in[i];
}

kernel void shared_beyond(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                          constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup int first[32];
  threadgroup int second[32];
  first[i] = second[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = first[i + settings.shift] + second[i];
}

// Known to AddressSanitizer only, through what lies between the arrays.
kernel void shared_beyond_by_pointer(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                                     constant Settings& settings [[buffer(2)]],
                                     uint i [[thread_index_in_threadgroup]]) {
  threadgroup int first[32];
  threadgroup int second[32];
  first[i] = second[i] = in[i];
  threadgroup int* p = first;
  p += i;
  out[i] = *(p + settings.shift);
}

kernel void too_much_shared(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                            constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup int first[4096];
  threadgroup int second[4097];
  first[i] = second[i] = in[i];
  out[i] = first[i] + settings.shift;
}

kernel void shared_before_it_is_written(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                                        constant Settings& settings [[buffer(2)]],
                                        uint i [[thread_index_in_threadgroup]],
                                        uint group [[threadgroup_position_in_grid]]) {
  threadgroup float line[32];
  out[32 * group + i] = isnan(line[i]) ? -1 : in[i] + settings.shift;
  line[i] = 0.0;
}

// -- divergence ------------------------------------------------------------------------------------------------------

kernel void barrier_for_some(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                             constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  if (int(i) < settings.count) threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = in[i];
}

kernel void two_barriers(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                         constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  if (int(i) < settings.count) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[i] = in[i];
}

kernel void simd_for_some(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                          constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  int sum = 0;
  if (int(i) < settings.count) sum = simd_sum(in[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = sum;
}

kernel void two_simd_operations(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                                constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  if (int(i) < settings.count) {
    out[i] = simd_sum(in[i]);
  } else {
    out[i] = simd_max(in[i]);
  }
}

kernel void lane_that_has_ended(device const int* in [[buffer(0)]], device int* out [[buffer(1)]],
                                constant Settings& settings [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  if (int(i) < settings.count) return;
  out[i] = simd_shuffle(in[i], ushort(settings.shift));
}
