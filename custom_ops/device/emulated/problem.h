// What stops a dispatch: noted by a GPU thread, which owns nothing that could leak, and told by the host's.
#pragma once

#include <cstdint>
#include <string>

#include "device/emulated/group.h"

namespace kvfuse::emulated {

struct Problem {
  enum Kind {
    kNone,
    kBarrierNotReached,  // thread is at its end or in `found`, others wait in `expected`
    kAnotherBarrier,
    kAnotherSimdSite,
    kLaneWithoutPart,  // number: the lane
    kSharedMemory,     // number: bytes
    kConstant,         // number: index
  } kind = kNone;
  uint32_t thread = 0;
  int64_t number = 0;
  Site expected{}, found{};  // found.what null: at its end
};

// One sentence, `[emulated] expected …; found …`.
std::string Describe(const Problem& problem, const std::string& kernel);

}  // namespace kvfuse::emulated
