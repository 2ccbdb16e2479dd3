// run_broken KERNEL GROUPS THREADS COUNT SHIFT: runs a kernel of broken.metal once and prints `out`, an int for each
// thread; an error's sentence and exit code 3 otherwise. Built plain and with each sanitizer.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "device/emulated/device.h"
#include "kvfuse/error.h"

namespace kvfuse::emulated {
const Program& BrokenProgram();
const Program& BuiltinProgram() { return BrokenProgram(); }
}  // namespace kvfuse::emulated

int main(int, char** argv) try {
  const auto device = kvfuse::emulated::MakeDevice();
  kvfuse::Dispatch dispatch;
  dispatch.kernel = argv[1];
  dispatch.groups[0] = static_cast<uint32_t>(std::atoi(argv[2]));
  dispatch.threads = static_cast<uint32_t>(std::atoi(argv[3]));
  const int settings[2] = {std::atoi(argv[4]), std::atoi(argv[5])};
  const int64_t bytes = int64_t{4} * dispatch.groups[0] * dispatch.threads;
  std::vector<int> values(bytes / 4);
  std::iota(values.begin(), values.end(), 1);
  const auto in = device->Allocate(bytes), out = device->Allocate(bytes);
  device->Upload(*in, 0, values.data(), bytes);
  dispatch.arguments = {{in.get(), 0, nullptr, 0}, {out.get(), 0, nullptr, 0}, {nullptr, 0, settings, sizeof settings}};
  device->Launch(dispatch);
  device->Download(values.data(), *out, 0, bytes);
  for (const int value : values) std::printf("%d ", value);
  std::printf("\n");
  return 0;
} catch (const kvfuse::Error& error) {
  std::printf("%s\n", error.what());
  return 3;
}
