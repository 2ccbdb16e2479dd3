// The classes that metal_device.cc gets from a device: plain holders of what Metal keeps in them.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "device/metal/fake/fake_metal.h"
#include "device/metal/fake/foundation.h"
#include "device/metal/fake/msl_text.h"
#include "device/metal/fake/objc_runtime.h"

namespace kvfuse::fake_metal {

using UInteger = uintptr_t;

struct AtomicCounts {
  std::atomic<int64_t> command_buffers{0}, encoders{0}, dispatches{0}, copies{0}, waiting{0};
};
AtomicCounts& Counters();
std::atomic<int64_t>& MemoryInUse();  // bytes of all buffers

class Device : public Object {
 public:
  Device() : Object("MTLDevice") {}
};

// Exactly as large as asked, so that a sanitizer sees every byte beyond it.
class Buffer : public Object {
 public:
  Buffer(Ref<Device> device, int64_t size)
      : Object("MTLBuffer"), size(size), bytes(static_cast<uint8_t*>(std::calloc(1, size))), device_(device) {
    MemoryInUse() += size;
  }
  ~Buffer() override {
    MemoryInUse() -= size;
    std::free(bytes);
  }
  const int64_t size;
  uint8_t* const bytes;

 private:
  const Ref<Device> device_;
};

class CompileOptions : public Object {
 public:
  CompileOptions() : Object("MTLCompileOptions") {}
  bool fast_math = true;
  bool safe_mode = false;
  bool precise_functions = false;
  UInteger language = 0;
};

class Library : public Object {
 public:
  Library(Ref<Device> device, MslText text) : Object("MTLLibrary"), text(std::move(text)), device_(device) {}
  const MslText text;

 private:
  const Ref<Device> device_;
};

class FunctionConstantValues : public Object {
 public:
  FunctionConstantValues() : Object("MTLFunctionConstantValues") {}
  std::map<int, int32_t> values;
};

class Function : public Object {
 public:
  Function(Ref<Library> library, std::string name, std::map<int, int32_t> constants)
      : Object("MTLFunction"), name(std::move(name)), constants(std::move(constants)), library(library) {}
  const std::string name;
  const std::map<int, int32_t> constants;
  const Ref<Library> library;
};

class Pipeline : public Object {
 public:
  explicit Pipeline(Ref<Function> function) : Object("MTLComputePipelineState"), function(function) {}
  const Ref<Function> function;
};

// The classes of metal_queue.cc.
Object* NewQueue(Device* device);
void AddCommands();

}  // namespace kvfuse::fake_metal
