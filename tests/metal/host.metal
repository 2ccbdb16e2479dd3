// Small kernels for the tests of the Metal back end; the same text runs on an Apple GPU and, as C++ below the fake, here.
#include <metal_stdlib>
#include "host_abi.h"
using namespace metal;

constant int kFactor [[function_constant(CONSTANT_FACTOR)]];

static int times(int value) { return value * kFactor; }

// data[i] = data[i] * factor + bias, for i < count
kernel void scale(device int* data [[buffer(ARGUMENT_DATA)]], constant ScaleParams& params [[buffer(ARGUMENT_PARAMS)]],
                  uint i [[thread_position_in_grid]]) {
  if (i < uint(params.count)) data[i] = times(data[i]) + params.bias;
}

// to[i] = from[i] + 1, for i < count
kernel void follow(device const int* from [[buffer(0)]], device int* to [[buffer(1)]], constant int& count [[buffer(2)]],
                   uint i [[thread_position_in_grid]]) {
  if (i < uint(count)) to[i] = from[i] + 1;
}
