// The fake Metal told to fail where a real system can, and made to find mistakes.
#include <atomic>
#include <thread>

#include "device/metal/fake/fake_metal.h"
#include "device/metal/fake/objc_runtime.h"
#include "device/metal/metal_cpp.h"
#include "host_scenarios.h"

namespace kvfuse {
namespace {

using fake_metal::Schedule;
using fake_metal::TheCounts;
using fake_metal::TheSettings;

}  // namespace

// host.metal as C++.
void RunHostKernel(const fake_metal::KernelCall& call) {
  const auto threads = static_cast<int>(call.groups[0] * call.threads);
  auto* first = static_cast<int32_t*>(call.arguments[0].bytes);
  if (call.kernel == "scale") {
    const auto& params = *static_cast<const ScaleParams*>(call.arguments[1].bytes);
    const int factor = call.constants.at(CONSTANT_FACTOR);
    if (params.bias == 666) Fail("kernel 'scale' met an address that is not there");
    for (int i = 0; i < std::min(threads, params.count); ++i) first[i] = first[i] * factor + params.bias;
  } else {
    auto* to = static_cast<int32_t*>(call.arguments[1].bytes);
    const int count = *static_cast<const int32_t*>(call.arguments[2].bytes);
    for (int i = 0; i < std::min(threads, count); ++i) to[i] = first[i] + 1;
  }
}

namespace {

// A decode step costs one command buffer; a long queue is cut so that the GPU need not wait for its end.
void CommandsAreBatched() {
  auto device = Make();
  auto data = BufferOf(*device, {0});
  EXPECT(TheCounts().command_buffers == 0 && TheCounts().copies == 0);  // the upload was a memcpy
  for (int i = 0; i < 5; ++i) Scale(*device, *data, 1, 1, 1);
  EXPECT(Read(*device, *data) == Ints{5});
  EXPECT(TheCounts().command_buffers == 1 && TheCounts().encoders == 1 && TheCounts().dispatches == 5);
  EXPECT(Read(*device, *data) == Ints{5});  // nothing queued, nothing sent
  EXPECT(TheCounts().command_buffers == 1);
  device->Upload(*data, 0, Range(1).data(), 4);
  EXPECT(TheCounts().copies == 0);
  for (int i = 0; i < 200; ++i) Scale(*device, *data, 1, 1, 1);
  EXPECT(Read(*device, *data) == Ints{200});
  EXPECT(TheCounts().command_buffers == 5);  // 64 + 64 + 64 + 8
}

// What has run without anyone having waited is noticed: the next upload needs no copy on the GPU.
void UploadsNoticeFinishedWork() {
  TheSettings().schedule = Schedule::kAtOnce;
  auto device = Make();
  auto data = BufferOf(*device, {0}), other = BufferOf(*device, {0});
  for (int i = 0; i < 64; ++i) Scale(*device, *data, 1, 1, 1);  // a full batch: committed
  device->Upload(*data, 0, Range(1, 40).data(), 4);
  EXPECT(TheCounts().copies == 0);
  for (int i = 0; i < 10; ++i) Scale(*device, *data, 1, 1, 1);
  device->Upload(*other, 0, Range(1, 40).data(), 4);  // not in the open batch
  EXPECT(Read(*device, *data) == Ints{50} && Read(*device, *other) == Ints{40});
  EXPECT(TheCounts().copies == 0);
}

void NoDevice() {
  TheSettings().has_device = false;
  ExpectError({"[metal] expected a GPU that Metal knows; found none"}, [] { Make(); });
}

void CompilerSpeaks() {
  TheSettings().compile_error = "program_source:12:3: error: use of undeclared identifier 'x'";
  ExpectError({"undeclared identifier 'x' (code 3)"}, [] { Make(); });
  TheSettings().compile_error.clear();
  ExpectError({"program_source:1", "error: "}, [] { MakeMetalDevice("using namespace metal;\n"); });
}

void SystemsBeforeMacOs15() {
  fake_metal::RemoveMethod("MTLCompileOptions", "setMathMode:");
  fake_metal::RemoveMethod("MTLCompileOptions", "setMathFloatingPointFunctions:");
  auto device = Make();
  auto data = BufferOf(*device, {5});
  Scale(*device, *data, 1, 2, 1);
  EXPECT(Read(*device, *data) == Ints{11});
}

void PipelineFails() {
  auto device = Make();
  auto data = BufferOf(*device, {5});
  TheSettings().pipeline_error = "Compiler encountered an internal error";
  ExpectError({"[metal] expected a pipeline for kernel 'scale'; found: Compiler encountered"},
              [&] { Scale(*device, *data, 1, 2, 1); });
  TheSettings().pipeline_error.clear();
  Scale(*device, *data, 1, 2, 1);
  EXPECT(Read(*device, *data) == Ints{11});
}

void UnsetFunctionConstant() {
  auto device = Make();
  auto data = BufferOf(*device, {5});
  ScaleParams params{1, 1};
  ExpectError({"'scale'", "function constant kFactor has no value"},
              [&] { device->Launch({"scale", {}, {{data.get()}, Value(&params, sizeof params)}}); });
}

void OtherSimdWidth() {
  TheSettings().simd_width = 64;
  auto device = Make();
  auto data = BufferOf(*device, {5});
  ExpectError({"[metal] expected a GPU with simdgroups of 32 threads; found 64"},
              [&] { Scale(*device, *data, 1, 2, 1); });
}

void RegistersLeaveFewThreads() {
  TheSettings().max_threads = 32;
  auto device = Make();
  auto data = BufferOf(*device, Range(64)), other = device->Allocate(256);
  ExpectError({"up to 32 threads", "'follow'", "found 64"}, [&] { Follow(*device, *data, *other, 64); });
}

void OutOfMemory() {
  auto device = Make();
  TheSettings().max_buffer_length = 1 << 20;
  ExpectError<MemoryError>({"[metal] expected at most 1048576 bytes in one buffer of this GPU; found 1048580"},
                           [&] { device->Allocate((1 << 20) + 4); });
  TheSettings().memory = 3 << 20;
  auto data = device->Allocate(1 << 20), other = device->Allocate(1 << 20);
  {
    auto third = device->Allocate(1 << 20);
    ExpectError<MemoryError>({"[metal] expected 16 bytes of GPU memory; found too little left"},
                             [&] { device->Allocate(16); });
    // The same where a queued upload needs memory of its own; nothing is torn.
    Scale(*device, *data, 1, 1, 1);
    ExpectError<MemoryError>({"too little left"}, [&] { device->Upload(*data, 0, Range(1).data(), 4); });
    EXPECT(Read(*device, *data)[0] == 1);
  }
  device->Allocate(16);
}

// Whoever waits for a failed batch hears of it; the device goes on.
void CommandBufferFails() {
  for (const Schedule schedule : {Schedule::kLate, Schedule::kAtOnce}) {
    TheSettings().schedule = schedule;
    auto device = Make();
    auto data = BufferOf(*device, {5});
    TheSettings().failing_command_buffer = 1;
    Scale(*device, *data, 1, 2, 1);
    Scale(*device, *data, 1, 2, 1);
    ExpectError(
        {"[metal] expected 2 queued commands (the first: scale) to finish; found: Caused GPU Timeout Error (code 2)"},
        [&] { Read(*device, *data); });
    EXPECT(Read(*device, *data) == Ints{5});
    Scale(*device, *data, 1, 2, 1);
    EXPECT(Read(*device, *data) == Ints{11});
    // A batch that failed without anyone having waited, an upload that looks, and only then the wait.
    TheSettings().failing_command_buffer = 1;
    for (int i = 0; i < 70; ++i) Scale(*device, *data, 1, 1, 1);
    device->Upload(*data, 0, Range(1).data(), 4);
    ExpectError({"expected 64 queued commands"}, [&] { device->Wait(); });
    device->Wait();
    // One in the middle of many.
    TheSettings().failing_command_buffer = 2;
    for (int i = 0; i < 200; ++i) Scale(*device, *data, 1, 1, 1);
    ExpectError({"GPU Timeout"}, [&] { device->Wait(); });
    // What the kernel itself meets.
    Scale(*device, *data, 1, 1, 666);
    ExpectError({"an address that is not there"}, [&] { device->Wait(); });
    // An upload or a copy before any kernel.
    Scale(*device, *data, 1, 1, 1);
    device->Wait();
    TheSettings().failing_command_buffer = 1;
    device->Copy(*data, 0, *data, 0, 0);
    auto other = device->Allocate(4);
    device->Copy(*other, 0, *data, 0, 4);
    ExpectError({"(the first: a copy)"}, [&] { device->Wait(); });
    device->Copy(*other, 0, *data, 0, 4);
    device->Upload(*data, 0, Range(1).data(), 4);
  }
}

void BothWaitersHearOfAFailure() {
  TheSettings().schedule = Schedule::kThread;
  TheSettings().runner = [](const fake_metal::KernelCall&) {
    while (TheCounts().waiting < 2) std::this_thread::yield();
    Fail("on purpose");
  };
  auto device = Make();
  auto data = BufferOf(*device, {5});
  Scale(*device, *data, 1, 1, 1);
  // The second thread to commit finds the batch under way, and waits for it as well.
  std::atomic<int> heard{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      try {
        device->Wait();
      } catch (const Error&) {
        ++heard;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT(heard == 2);
}

void DeviceGoesWithWorkQueued() {
  for (const Schedule schedule : {Schedule::kLate, Schedule::kAtOnce, Schedule::kThread}) {
    TheSettings().schedule = schedule;
    std::shared_ptr<DeviceBuffer> data;
    {
      auto device = Make();
      data = BufferOf(*device, Range(32));
      for (int i = 0; i < 70; ++i) Scale(*device, *data, 32, 1, 1);
    }
    EXPECT(data->size() == 128);
  }
}

struct RawMetal {
  NS::AutoreleasePool* pool = NS::AutoreleasePool::alloc()->init();
  MTL::Device* device = MTL::CreateSystemDefaultDevice();
  MTL::CommandQueue* queue = device->newCommandQueue();
  MTL::CommandBuffer* commands = queue->commandBuffer();
};

}  // namespace

std::vector<Scenario> FakeScenarios() {
  return {
      {"commands_are_batched", CommandsAreBatched},
      {"uploads_notice_finished_work", UploadsNoticeFinishedWork},
      {"no_device", NoDevice},
      {"compiler_speaks", CompilerSpeaks},
      {"pipeline_fails", PipelineFails},
      {"unset_function_constant", UnsetFunctionConstant},
      {"other_simd_width", OtherSimdWidth},
      {"registers_leave_few_threads", RegistersLeaveFewThreads},
      {"out_of_memory", OutOfMemory},
      {"command_buffer_fails", CommandBufferFails},
      {"both_waiters_hear_of_a_failure", BothWaitersHearOfAFailure},
      {"device_goes_with_work_queued", DeviceGoesWithWorkQueued},
      {"systems_before_macos_15", SystemsBeforeMacOs15},
  };
}

std::vector<Scenario> AbortScenarios() {
  return {
      {"unknown_method", [] { RawMetal().device->lowPower(); }},
      {"no_pool", [] { NS::String::string("x", NS::UTF8StringEncoding); }},
      {"released_object",
       [] {
         RawMetal metal;
         metal.queue->release();
         metal.pool->release();
         metal.queue->commandBuffer();
       }},
      {"leaked_object", [] { RawMetal().pool->release(); }},
      {"two_encoders",
       [] {
         RawMetal metal;
         metal.commands->computeCommandEncoder();
         metal.commands->blitCommandEncoder();
       }},
      {"encoder_not_ended",
       [] {
         RawMetal metal;
         metal.commands->blitCommandEncoder();
         metal.pool->release();
       }},
      {"commit_with_open_encoder",
       [] {
         RawMetal metal;
         metal.commands->blitCommandEncoder();
         metal.commands->commit();
       }},
      {"wait_without_commit", [] { RawMetal().commands->waitUntilCompleted(); }},
      {"parts_of_words",
       [] {
         RawMetal metal;
         auto* buffer = metal.device->newBuffer(64, MTL::ResourceStorageModeShared);
         metal.commands->blitCommandEncoder()->copyFromBuffer(buffer, 0, buffer, 32, 3);
       }},
      {"overlapping_copy",
       [] {
         RawMetal metal;
         auto* buffer = metal.device->newBuffer(64, MTL::ResourceStorageModeShared);
         metal.commands->blitCommandEncoder()->copyFromBuffer(buffer, 0, buffer, 4, 8);
       }},
      {"unbound_argument",
       [] {
         auto device = Make();
         auto data = device->Allocate(4);
         device->Launch({"scale", {{CONSTANT_FACTOR, 1}}, {{data.get()}}});
       }},
      {"unaligned_argument",
       [] {
         auto device = Make();
         auto data = device->Allocate(64);
         Scale(*device, *data, 1, 1, 1, 2);
       }},
      {"fast_math",
       [] {
         RawMetal metal;
         NS::Error* error = nullptr;
         metal.device->newLibrary(NS::String::string("", NS::UTF8StringEncoding), MTL::CompileOptions::alloc()->init(),
                                  &error);
       }},
  };
}

}  // namespace kvfuse
