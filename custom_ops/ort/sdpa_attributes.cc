#include "sdpa_attributes.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kvfuse/error.h"

namespace kvfuse {
namespace {

int64_t OneOf(const OrtKernelInfo* info, const std::string& where, const char* name, int64_t absent,
              const std::vector<int64_t>& allowed) {
  const int64_t value = IntAttribute(info, where, name, absent);
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end())
    Fail(where, " expected ", name, " to be one of ", ShapeText(allowed), "; found ", value);
  return value;
}

int64_t AtLeast(const OrtKernelInfo* info, const std::string& where, const char* name, int64_t absent, int64_t least) {
  constexpr int64_t kMost = int64_t{1} << 40;  // leaves room for position arithmetic
  const int64_t value = IntAttribute(info, where, name, absent);
  if (value < least || value > kMost) Fail(where, " expected ", name, " of at least ", least, "; found ", value);
  return value;
}

// True for the second word.
bool SecondWord(const OrtKernelInfo* info, const std::string& where, const char* name, const char* first,
                const char* second) {
  const std::string value = StringAttribute(info, where, name, first);
  if (value != first && value != second)
    Fail(where, " expected ", name, " to be '", first, "' or '", second, "'; found '", value, "'");
  return value == second;
}

}  // namespace

SdpaAttributes ReadSdpaAttributes(const OrtKernelInfo* info) {
  SdpaAttributes a;
  a.layer = StringAttribute(info, "[QuantizedKvSdpa]", "layer", "");
  a.where = a.layer.empty() ? "[QuantizedKvSdpa '" + NodeName(info) + "']" : "[layer '" + a.layer + "']";
  if (a.layer.find('\n') != std::string::npos) Fail(a.where, " expected a layer key of one line; found a line break");
  a.axis = static_cast<int>(OneOf(info, a.where, "axis", 2, {1, 2}));
  a.scale = FloatAttribute(info, a.where, "scale");
  if (a.scale && !std::isfinite(*a.scale)) Fail(a.where, " expected a finite scale; found ", *a.scale);
  a.causal = OneOf(info, a.where, "causal", 0, {0, 1}) == 1;
  a.softcap = FloatAttribute(info, a.where, "softcap").value_or(0.0f);
  if (!(a.softcap >= 0.0f) || std::isinf(a.softcap))
    Fail(a.where, " expected softcap of 0 (off) or a positive number; found ", a.softcap);

  a.guard = !SecondWord(info, a.where, "guard", "warn", "off");

  CacheFormat& f = a.format;
  f.n_recent = AtLeast(info, a.where, "n_recent", 0, 0);
  f.block = AtLeast(info, a.where, "block", 1, 1);
  f.n_sink = AtLeast(info, a.where, "n_sink", 0, 0);
  f.window_left = AtLeast(info, a.where, "window_left", -1, -1);
  f.center_keys = SecondWord(info, a.where, "key_center", "none", "block");
  if (f.center_keys && f.block == 1)
    Fail(a.where, " expected a block of more than 1 token with key_center 'block'; found block 1");
  const int group_size = static_cast<int>(OneOf(info, a.where, "group_size", 0, {0, 32, 64}));
  const bool full = SecondWord(info, a.where, "codes", "symmetric", "full");
  const bool plain = SecondWord(info, a.where, "rotation", "hadamard", "none");
  f.key.bits = static_cast<int>(OneOf(info, a.where, "key_bits", 4, {4, 8, 16}));
  f.value.bits = static_cast<int>(OneOf(info, a.where, "value_bits", 4, {4, 8, 16}));
  for (SideFormat* side : {&f.key, &f.value}) {
    side->group_size = group_size;
    side->full = full;
    side->rotate = !plain;
  }
  return a;
}

}  // namespace kvfuse
