// The only file that asks the CPU what it can do, and decides which kernels run.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kvfuse/error.h"
#include "kvfuse/kernels.h"

#if defined(KVFUSE_X86)
#include "avx512_vnni.h"
#endif

namespace kvfuse {
namespace {

struct Candidate {
  KernelTable table;
  std::string (*reason)();  // empty: usable here
};

std::string Always() { return ""; }

#if defined(KVFUSE_X86)
std::string NeedsAvx512Vnni() {
  __builtin_cpu_init();
  const bool usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  return usable ? "" : "this CPU lacks AVX512 F, BW, DQ, VL or VNNI";
}
#endif

// Best first.
const Candidate kCandidates[] = {
#if defined(KVFUSE_X86)
    {avx512_vnni::Table(), NeedsAvx512Vnni},
#endif
    {{"reference", reference::Rotate, reference::QuantizeRow, reference::StoreRow, reference::LoadRow,
      reference::EncodeRow, reference::Attend, false},
     Always},
};

const KernelTable& Choose() {
  const char* wanted = std::getenv("KVFUSE_KERNEL");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string names;
  for (const Candidate& candidate : kCandidates) {
    const std::string reason = candidate.reason();
    if ((any || std::strcmp(wanted, candidate.table.name) == 0) && reason.empty()) return candidate.table;
    if (!any && std::strcmp(wanted, candidate.table.name) == 0)
      Fail("[KVFUSE_KERNEL] expected a kernel that runs here; found '", wanted, "', but ", reason);
    names += (names.empty() ? "" : ", ") + std::string(candidate.table.name);
  }
  Fail("[KVFUSE_KERNEL] expected one of: ", names, "; found '", wanted, "'");
}

}  // namespace

const KernelTable& Kernels() {
  static const KernelTable& table = Choose();
  return table;
}

namespace {

std::atomic<bool>& ExactWeightsFlag() {
  static std::atomic<bool> flag = [] {
    const char* wanted = std::getenv("KVFUSE_WEIGHTS");
    const std::string text = wanted == nullptr ? "" : wanted;
    if (!text.empty() && text != "integer" && text != "exact")
      Fail("[KVFUSE_WEIGHTS] expected integer or exact; found '", text, "'");
    return text == "exact";
  }();
  return flag;
}

}  // namespace

bool ExactWeights() { return ExactWeightsFlag().load(std::memory_order_relaxed); }
void SetExactWeights(bool exact) { ExactWeightsFlag().store(exact); }

std::vector<KernelChoice> KernelChoices() {
  std::vector<KernelChoice> choices;
  for (const Candidate& candidate : kCandidates) choices.push_back({candidate.table.name, candidate.reason()});
  return choices;
}

}  // namespace kvfuse
