// What host.metal and host_test.cc share.
#pragma once

#define CONSTANT_FACTOR 3

enum Argument { ARGUMENT_DATA, ARGUMENT_PARAMS };

struct ScaleParams {
  int count;
  int bias;
};
