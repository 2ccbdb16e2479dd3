// Gives the fake GPU the kernels of the library, as the emulated device runs them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "device/emulated/device.h"
#include "device/metal/fake/fake_metal.h"
#include "device/metal/fake/objc_runtime.h"
#include "kvfuse/error.h"

namespace kvfuse::fake_metal {
namespace {

void RunEmulated(const KernelCall& call) {
  const emulated::Program& program = emulated::BuiltinProgram();
  static const emulated::Schedule schedule = emulated::Schedule::FromEnvironment();
  emulated::Grid grid;
  grid.program = &program;
  grid.kernel = &program.Find(call.kernel);
  grid.constants.assign(call.constants.begin(), call.constants.end());
  std::copy(call.groups, call.groups + 3, grid.groups);
  grid.threads = call.threads;
  const auto& expected = grid.kernel->arguments;
  if (expected.size() != call.arguments.size()) {
    Fail("[fake metal] expected ", expected.size(), " arguments of kernel ", call.kernel, "; found ",
         call.arguments.size());
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const KernelCall::Argument& argument = call.arguments[i];
    if (expected[i].reference && argument.size < static_cast<int64_t>(expected[i].bytes)) {
      Fail("[fake metal] expected ", expected[i].bytes, " bytes of argument '", expected[i].name, "' of kernel ",
           call.kernel, "; found ", argument.size);
    }
    grid.arguments.push_back(argument.bytes);
  }
  emulated::Run(grid, schedule);
}

// KVFUSE_FAKE_METAL_SCHEDULE: late (when it is not set), at-once or thread.
Schedule ScheduleFromEnvironment() {
  const char* text = std::getenv("KVFUSE_FAKE_METAL_SCHEDULE");
  const std::string name = text == nullptr ? "late" : text;
  if (name == "at-once") return Schedule::kAtOnce;
  return name == "thread" ? Schedule::kThread : Schedule::kLate;
}

// Made when the library is loaded, so it goes after every device and cache, which are made later.
struct Installed {
  Installed() {
    TheSettings().runner = RunEmulated;
    TheSettings().schedule = ScheduleFromEnvironment();
  }
  // KVFUSE_FAKE_METAL_LEAKS=1: says which objects nobody has released.
  ~Installed() {
    if (std::getenv("KVFUSE_FAKE_METAL_LEAKS") == nullptr) return;
    const Counts counts = TheCounts();
    std::fprintf(stderr, "[fake metal] %lld kernels ran; left:", static_cast<long long>(counts.dispatches));
    for (const auto& [class_name, count] : LiveObjects()) std::fprintf(stderr, " %d %s", count, class_name.c_str());
    std::fprintf(stderr, "\n");
  }
} installed;

}  // namespace
}  // namespace kvfuse::fake_metal
