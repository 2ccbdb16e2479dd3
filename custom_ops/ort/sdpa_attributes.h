// The attributes of kvfuse::QuantizedKvSdpa, read and checked once, when the kernel is made.
#pragma once

#include <optional>
#include <string>

#include "api.h"
#include "kvfuse/format.h"

namespace kvfuse {

struct SdpaAttributes {
  std::string layer;  // the state key
  std::string where;  // "[layer 'x']", or the node's name where there is no key: begins every sentence
  int axis = 2;
  std::optional<float> scale;  // absent: 1 / sqrt(head_dim)
  bool causal = false;
  float softcap = 0.0f;
  bool guard = true;
  CacheFormat format;  // without the sizes, which come with the first tensors
};

// Throws Error naming the layer, what was expected and what was found.
SdpaAttributes ReadSdpaAttributes(const OrtKernelInfo* info);

}  // namespace kvfuse
