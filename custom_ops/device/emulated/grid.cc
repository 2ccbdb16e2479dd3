#include "device/emulated/grid.h"

#include <cstdlib>

#include "kvfuse/error.h"

namespace kvfuse::emulated {

const Kernel& Program::Find(const std::string& name) const {
  for (const Kernel& kernel : kernels)
    if (kernel.name == name) return kernel;
  std::string known;
  for (const Kernel& kernel : kernels) known += (known.empty() ? "" : ", ") + kernel.name;
  Fail("[device] expected one of the kernels ", known, "; found '", name, "'");
}

Schedule Schedule::FromText(const std::string& text) {
  if (text == "forward") return {kForward, 0};
  if (text == "reverse") return {kReverse, 0};
  if (text == "skewed") return {kSkewed, 0};
  if (text.rfind("random:", 0) == 0 && text.size() > 7 &&
      text.find_first_not_of("0123456789", 7) == std::string::npos && text.size() < 26)
    return {kRandom, std::strtoull(text.c_str() + 7, nullptr, 10)};
  Fail("[device] expected KVFUSE_EMULATED_SCHEDULE forward, reverse, skewed or random:NUMBER; found '", text, "'");
}

Schedule Schedule::FromEnvironment() {
  const char* text = std::getenv("KVFUSE_EMULATED_SCHEDULE");
  return text == nullptr || *text == '\0' ? Schedule{} : FromText(text);
}

}  // namespace kvfuse::emulated
