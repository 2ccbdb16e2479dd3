// What device.h promises, over any Metal.
#include <atomic>
#include <cstring>
#include <thread>

#include "host_scenarios.h"

namespace kvfuse {
namespace {

void UploadLaunchDownload() {
  auto device = Make();
  EXPECT(device->name() == "metal");
  auto data = BufferOf(*device, Range(100));
  Scale(*device, *data, 99, 3, 7);
  const Ints result = Read(*device, *data);
  for (int i = 0; i < 99; ++i) EXPECT(result[i] == 3 * i + 7);
  EXPECT(result[99] == 99);  // beyond count
  EXPECT(Read(*device, *data, 396) == Ints{99});
}

void NewBuffersAreZero() {
  auto device = Make();
  for (int round = 0; round < 3; ++round) {
    auto buffer = device->Allocate(4096);
    EXPECT(buffer->size() == 4096);
    EXPECT(Read(*device, *buffer) == Ints(1024));
    device->Upload(*buffer, 0, Range(1024, 1).data(), 4096);
  }
  EXPECT(device->Allocate(0)->size() == 0);
}

// An upload into a buffer that a queued kernel still has to read must not come early, nor its source be read late.
void UploadTakesItsPlaceInTheQueue() {
  auto device = Make();
  auto from = BufferOf(*device, Range(64));
  auto first = device->Allocate(256), second = device->Allocate(256);
  Follow(*device, *from, *first, 64);
  Ints next = Range(64, 1000);
  device->Upload(*from, 0, next.data(), 256);
  std::fill(next.begin(), next.end(), -1);
  Follow(*device, *from, *second, 64);
  EXPECT(Read(*device, *first) == Range(64, 1));
  EXPECT(Read(*device, *second) == Range(64, 1001));
}

// More than a staging buffer holds, several at a time, and again after the queue has run dry.
void LargeQueuedUploads() {
  auto device = Make();
  const int count = 300'000;  // 1.2 MB
  auto from = BufferOf(*device, Range(count));
  for (int round = 0; round < 2; ++round) {
    std::vector<std::shared_ptr<DeviceBuffer>> results;
    for (int i = 0; i < 4; ++i) {
      device->Upload(*from, 0, Range(count, i).data(), int64_t{4} * count);
      results.push_back(device->Allocate(int64_t{4} * count));
      Follow(*device, *from, *results.back(), count);
    }
    for (int i = 0; i < 4; ++i) EXPECT(Read(*device, *results[i]) == Range(count, i + 1));
  }
}

// Metal copies whole words and not onto itself; the interface promises any bytes.
void OddBytes() {
  auto device = Make();
  auto data = BufferOf(*device, Range(64));
  std::vector<uint8_t> expected(256);
  device->Download(expected.data(), *data, 0, 256);
  Scale(*device, *data, 64, 1, 0);
  const uint8_t bytes[] = {201, 202, 203};
  device->Upload(*data, 5, bytes, 3);
  std::memcpy(&expected[5], bytes, 3);
  Scale(*device, *data, 64, 1, 0);
  device->Copy(*data, 101, *data, 5, 3);
  std::memcpy(&expected[101], bytes, 3);
  device->Copy(*data, 8, *data, 4, 128);  // overlapping
  std::memmove(&expected[8], &expected[4], 128);
  std::vector<uint8_t> found(256);
  device->Download(found.data(), *data, 0, 256);
  EXPECT(found == expected);
  device->Download(found.data(), *data, 7, 3);
  EXPECT(std::memcmp(found.data(), &expected[7], 3) == 0);
}

void CopiesAndKernelsAlternate() {
  auto device = Make();
  auto a = BufferOf(*device, Range(64)), b = device->Allocate(256);
  for (int i = 0; i < 5; ++i) {
    device->Copy(*b, 0, *a, 0, 256);
    Follow(*device, *b, *a, 64);
  }
  device->Copy(*b, 128, *a, 0, 128);
  EXPECT(Read(*device, *a) == Range(64, 5));
  Ints expected = Range(64, 4);
  for (int i = 0; i < 32; ++i) expected[32 + i] = i + 5;
  EXPECT(Read(*device, *b) == expected);
}

// Each is a pipeline of its own.
void FunctionConstants() {
  auto device = Make();
  auto data = BufferOf(*device, {1});
  for (int factor : {2, 3, 2, -5}) Scale(*device, *data, 1, factor, 0);
  EXPECT(Read(*device, *data) == Ints{2 * 3 * 2 * -5});
}

void BuffersMayGoBeforeTheirCommandsRan() {
  auto device = Make();
  auto result = device->Allocate(256);
  {
    auto from = BufferOf(*device, Range(64));
    Follow(*device, *from, *result, 64);
    auto other = device->Allocate(256);
    device->Copy(*other, 0, *from, 0, 256);
    Follow(*device, *other, *from, 64);
  }
  EXPECT(Read(*device, *result) == Range(64, 1));
}

void MoreCommandsThanAQueueHolds() {
  auto device = Make();
  auto data = BufferOf(*device, {0});
  for (int i = 0; i < 5000; ++i) Scale(*device, *data, 1, 1, 1);
  EXPECT(Read(*device, *data) == Ints{5000});
}

void NoBytesAreNoWork() {
  auto device = Make();
  auto data = BufferOf(*device, Range(32));
  device->Upload(*data, 128, nullptr, 0);
  device->Copy(*data, 0, *data, 128, 0);
  device->Download(nullptr, *data, 128, 0);
  device->Wait();
  EXPECT(Read(*device, *data) == Range(32));
}

void ManyThreads() {
  auto device = Make();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      auto data = device->Allocate(256), other = device->Allocate(256);
      Ints expected(64);
      for (int i = 0; i < 60; ++i) {
        device->Upload(*data, 0, Range(64, t * 1000 + i).data(), 256);
        Scale(*device, *data, 64, 2, t);
        device->Copy(*other, 0, *data, 0, 256);
        Follow(*device, *other, *data, 64);
        const Ints result = Read(*device, i % 2 == 0 ? *data : *other);
        for (int k = 0; k < 64; ++k) wrong += result[k] != 2 * (t * 1000 + i + k) + t + (i % 2 == 0);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT(wrong == 0);
}

void WrongUse() {
  auto device = Make(), second = Make();
  auto data = BufferOf(*device, Range(8)), foreign = second->Allocate(32);
  int value = 0;
  ExpectError({"[metal] expected a range inside the buffer's 32 bytes; found 8 bytes at 28"},
              [&] { device->Upload(*data, 28, &value, 8); });
  ExpectError({"4 bytes at -4"}, [&] { device->Copy(*data, -4, *data, 0, 4); });
  ExpectError({"0 bytes at 33"}, [&] { device->Copy(*data, 0, *data, 33, 0); });
  ExpectError({"a range inside the buffer's 32 bytes"}, [&] { device->Download(&value, *data, INT64_MAX, 4); });
  ExpectError({"0 bytes at 36"}, [&] { Scale(*device, *data, 1, 1, 1, 36); });
  ExpectError({"[metal] expected a buffer size of at least 0; found -1"}, [&] { device->Allocate(-1); });
  class Other : public DeviceBuffer {
    int64_t size() const override { return 4; }
  } other;
  ExpectError({"another device"}, [&] { device->Upload(other, 0, &value, 4); });
  std::vector<uint8_t> large(4097);
  Dispatch dispatch{"scale", {{CONSTANT_FACTOR, 1}}, {{data.get()}, Value(large.data(), large.size())}};
  ExpectError({"1 to 4096 bytes by value", "'scale'", "4097"}, [&] { device->Launch(dispatch); });
  dispatch.arguments[1] = Value(large.data(), 0);
  ExpectError({"found 0"}, [&] { device->Launch(dispatch); });
  dispatch.arguments[1] = Value(large.data(), sizeof(ScaleParams));
  for (uint32_t threads : {0u, 33u, 2048u}) {
    dispatch.threads = threads;
    ExpectError({"a multiple of 32 up to 1024 threads", "'scale'", std::to_string(threads)},
                [&] { device->Launch(dispatch); });
  }
  dispatch.threads = 32;
  dispatch.groups[1] = 0;
  ExpectError({"at least one group", "'scale'"}, [&] { device->Launch(dispatch); });
  EXPECT(Read(*device, *data) == Range(8));
}

void MissingKernel() {
  auto device = Make();
  ExpectError({"[metal] expected kernel 'nothing' in the library; found: "},
              [&] { device->Launch({"nothing", {}, {}}); });
  auto data = BufferOf(*device, {5});
  Scale(*device, *data, 1, 2, 1);  // the device goes on
  EXPECT(Read(*device, *data) == Ints{11});
}

void TextThatDoesNotCompile() {
  ExpectError({"[metal] expected kernels that Metal's compiler accepts; found: ", "program_source:2", "on purpose"},
              [] { MakeMetalDevice("\n#error on purpose\n"); });
  ExpectError({"file not found"}, [] { MakeMetalDevice("#include \"abi.h\"\n"); });
}

}  // namespace

std::vector<Scenario> AnyScenarios() {
  return {
      {"upload_launch_download", UploadLaunchDownload},
      {"new_buffers_are_zero", NewBuffersAreZero},
      {"upload_takes_its_place_in_the_queue", UploadTakesItsPlaceInTheQueue},
      {"large_queued_uploads", LargeQueuedUploads},
      {"odd_bytes", OddBytes},
      {"copies_and_kernels_alternate", CopiesAndKernelsAlternate},
      {"function_constants", FunctionConstants},
      {"buffers_may_go_before_their_commands_ran", BuffersMayGoBeforeTheirCommandsRan},
      {"more_commands_than_a_queue_holds", MoreCommandsThanAQueueHolds},
      {"no_bytes_are_no_work", NoBytesAreNoWork},
      {"many_threads", ManyThreads},
      {"wrong_use", WrongUse},
      {"missing_kernel", MissingKernel},
      {"text_that_does_not_compile", TextThatDoesNotCompile},
  };
}

}  // namespace kvfuse
