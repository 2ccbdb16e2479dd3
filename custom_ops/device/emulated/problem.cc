#include "device/emulated/problem.h"

#include <cstring>
#include <sstream>

#include "device/emulated/grid.h"

namespace kvfuse::emulated {
namespace {

std::string At(const Site& site) {
  if (site.what == nullptr) return "at its end";
  const char* slash = std::strrchr(site.file, '/');
  return std::string(site.what) + " (" + (slash ? slash + 1 : site.file) + ":" + std::to_string(site.line) + ")";
}

}  // namespace

std::string Describe(const Problem& problem, const std::string& kernel) {
  std::ostringstream text;
  text << "[emulated] expected ";
  const std::string expected = At(problem.expected), of = " of kernel " + kernel + "; found ";
  switch (problem.kind) {
    case Problem::kNone:
      break;
    case Problem::kBarrierNotReached:
    case Problem::kAnotherBarrier:
      text << "all threads of the group in " << expected << of << "thread " << problem.thread << " "
           << (problem.found.what ? "in " : "") << At(problem.found);
      break;
    case Problem::kAnotherSimdSite:
      text << "all lanes of simdgroup " << problem.thread / kSimdWidth << " in " << expected << of << "lane "
           << problem.thread % kSimdWidth << " in " << At(problem.found);
      break;
    case Problem::kLaneWithoutPart:
      text << "a lane that takes part in " << expected << of << "lane " << problem.number << ", asked for by thread "
           << problem.thread;
      break;
    case Problem::kSharedMemory:
      text << "at most " << kMaxSharedBytes << " bytes of threadgroup memory in " << kMaxSharedVariables << " variables"
           << of << problem.number << " with " << expected;
      break;
    case Problem::kConstant:
      text << "the dispatch to set function constant " << problem.expected.what << of << "none of index "
           << problem.number;
      break;
  }
  return text.str();
}

}  // namespace kvfuse::emulated
