// Runs scenarios of the Metal back end: host_test NAME. Exit 0: as it should be; else a sentence on stderr.
//   --list     the names;  --methods  the Objective-C methods that all of them call
#include <cstdio>
#include <string>

#include "host_scenarios.h"
#if defined(KVFUSE_FAKE_METAL)
#include "device/metal/fake/fake_metal.h"
#include "device/metal/fake/objc_runtime.h"
#endif

namespace kvfuse {

#if defined(KVFUSE_FAKE_METAL)
void RunHostKernel(const fake_metal::KernelCall& call);
#endif

namespace {

#if defined(KVFUSE_FAKE_METAL)
void RunOnce(void (*scenario)(), fake_metal::Schedule schedule) {
  fake_metal::TheSettings() = {};
  fake_metal::TheSettings().runner = RunHostKernel;
  fake_metal::TheSettings().schedule = schedule;
  fake_metal::ResetCounts();
  scenario();
  for (const auto& [class_name, count] : fake_metal::LiveObjects()) {
    Fail("expected every object released; found ", count, " left of ", class_name);
  }
}

void RunAny(void (*scenario)()) {
  for (const auto schedule :
       {fake_metal::Schedule::kLate, fake_metal::Schedule::kAtOnce, fake_metal::Schedule::kThread}) {
    RunOnce(scenario, schedule);
  }
}

void RunFake(void (*scenario)()) { RunOnce(scenario, fake_metal::Schedule::kLate); }

// Runs everything but what takes methods away.
void PrintMethods() {
  for (const auto& [name, scenario] : AnyScenarios()) RunAny(scenario);
  for (const auto& [name, scenario] : FakeScenarios()) {
    if (std::string(name) != "systems_before_macos_15") RunFake(scenario);
  }
  const auto called = fake_metal::CalledMethods();
  for (const std::string& method : fake_metal::KnownMethods()) {
    std::printf("%s%s\n", called.count(method) == 0 ? "never called: " : "", method.c_str());
  }
}
#else
}  // namespace

std::vector<Scenario> FakeScenarios() { return {}; }
std::vector<Scenario> AbortScenarios() { return {}; }

namespace {

void RunAny(void (*scenario)()) { scenario(); }
void RunFake(void (*)()) {}
void PrintMethods() { Fail("expected the fake Metal for --methods; found a real one"); }
#endif

void RunNamed(const std::string& name) {
  for (const auto& [known, scenario] : AnyScenarios()) {
    if (name == known) return RunAny(scenario);
  }
  for (const auto& scenarios : {FakeScenarios(), AbortScenarios()}) {
    for (const auto& [known, scenario] : scenarios) {
      if (name == known) return RunFake(scenario);
    }
  }
  Fail("expected the name of a scenario; found '", name, "'");
}

void PrintNames() {
  for (const auto& [name, scenario] : AnyScenarios()) std::printf("%s\n", name);
  for (const auto& [name, scenario] : FakeScenarios()) std::printf("%s\n", name);
}

}  // namespace
}  // namespace kvfuse

int main(int count, char** arguments) {
  const std::string name = count > 1 ? arguments[1] : "";
  try {
    if (name == "--methods") {
      kvfuse::PrintMethods();
    } else if (name == "--list") {
      kvfuse::PrintNames();
    } else {
      kvfuse::RunNamed(name);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
    return 1;
  }
  return 0;
}
