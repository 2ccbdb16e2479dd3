// Metal without a Mac: the objects that metal_device.cc talks to, running kernels on the CPU. It checks what Metal's
// API validation checks, keeps the queue's order, and can be told to fail where a real system can.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace kvfuse::fake_metal {

struct KernelCall {
  std::string kernel;
  std::map<int, int32_t> constants;  // function constants: index, value
  struct Argument {
    void* bytes;
    int64_t size;  // to the end of the buffer
  };
  std::vector<Argument> arguments;
  uint32_t groups[3];
  uint32_t threads;
};

// Runs a kernel of the library's text. An exception's text becomes the error of the command buffer.
using KernelRunner = std::function<void(const KernelCall&)>;

enum class Schedule {
  kLate,    // command buffers run when somebody waits: who reads too early reads old bytes
  kAtOnce,  // at the commit
  kThread,  // on a thread of the queue, beside the caller
};

// What the fake does from the next call on.
struct Settings {
  KernelRunner runner;
  Schedule schedule = Schedule::kLate;
  bool has_device = true;
  std::string compile_error;       // not empty: no text compiles
  std::string pipeline_error;      // not empty: no pipeline can be made
  int failing_command_buffer = 0;  // 1: the next one that runs ends with an error, 2: the one after it, …
  int64_t simd_width = 32;
  int64_t max_threads = 1024;
  int64_t max_buffer_length = int64_t{1} << 34;
  int64_t memory = int64_t{1} << 34;  // bytes of all buffers together
};
Settings& TheSettings();

// What has happened since the start of the process, or the last ResetCounts.
struct Counts {
  int64_t command_buffers = 0;  // that have run
  int64_t encoders = 0;
  int64_t dispatches = 0;
  int64_t copies = 0;
  int64_t waiting = 0;  // threads inside waitUntilCompleted now
};
Counts TheCounts();
void ResetCounts();

}  // namespace kvfuse::fake_metal
