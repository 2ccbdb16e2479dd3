// The only file that asks the CPU what it can do, and decides which kernels run.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kvfuse/error.h"
#include "kvfuse/kernels.h"
#include "machine.h"

#if defined(KVFUSE_X86)
#include <cpuid.h>

#include "amx.h"
#include "avx2.h"
#include "avx512.h"
#include "avx_vnni.h"
#elif defined(KVFUSE_ARM64)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

#include "neon.h"
#include "neon_dotprod.h"
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

std::string NeedsAmx() {
  const std::string reason = NeedsAvx512Vnni();
  return reason.empty() ? amx::Reason() : reason;
}

std::string NeedsAvx2() {
  __builtin_cpu_init();
  const bool usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return usable ? "" : "this CPU lacks AVX2, FMA or F16C";
}

// CPUID leaf 7.1, EAX bit 4; compilers know a name for it only lately.
std::string NeedsAvxVnni() {
  const std::string reason = NeedsAvx2();
  if (!reason.empty()) return reason;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0 || (eax >> 4 & 1) == 0) return "this CPU lacks AVX-VNNI";
  return "";
}
#elif defined(KVFUSE_ARM64)
std::string NeedsDotprod() {
#if defined(__ARM_FEATURE_DOTPROD)
  const bool usable = true;  // the whole build asks for it
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof found;
  const bool usable = sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) == 0 && found != 0;
#elif defined(__linux__)
  const bool usable = (getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP_ASIMDDP
#else
  const bool usable = false;
#endif
  return usable ? "" : "this CPU lacks the dot products of Armv8.2";
}
#endif

// Best first.
const Candidate kCandidates[] = {
#if defined(KVFUSE_X86)
    {amx::Table(), NeedsAmx},
    {avx512_vnni::Table(), NeedsAvx512Vnni},
    {avx_vnni::Table(), NeedsAvxVnni},
    {avx2::Table(), NeedsAvx2},
#elif defined(KVFUSE_ARM64)
    {neon_dotprod::Table(), NeedsDotprod},
    {neon::Table(), Always},
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

const KernelTable* FindKernel(const std::string& name) {
  for (const Candidate& candidate : kCandidates)
    if (name == candidate.table.name) return candidate.reason().empty() ? &candidate.table : nullptr;
  return nullptr;
}

}  // namespace kvfuse
