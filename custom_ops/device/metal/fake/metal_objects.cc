// The classes of Metal. Each method says what it is in Apple's documentation of the same selector; what that calls
// undefined, or what API validation refuses, ends the process here.
#include "device/metal/fake/metal_objects.h"

#include <objc/runtime.h>

#include <cstring>

namespace kvfuse::fake_metal {

Settings& TheSettings() {
  static Settings* settings = new Settings;
  return *settings;
}

AtomicCounts& Counters() {
  static auto* counts = new AtomicCounts;
  return *counts;
}

std::atomic<int64_t>& MemoryInUse() {
  static auto* bytes = new std::atomic<int64_t>(0);
  return *bytes;
}

namespace {

// Numbers of Apple's headers, written down here a second time on purpose.
constexpr UInteger kStorageShared = 0;
constexpr UInteger kDataTypeInt = 29;
constexpr UInteger kMathModeSafe = 0, kMathFunctionsPrecise = 1;
constexpr UInteger kLanguage31 = (3 << 16) + 1;

void SetError(ErrorObject** error, const std::string& words, long code) {
  if (error != nullptr) *error = Autorelease(new ErrorObject(words, code));
}

void AddDevice() {
  Add("MTLDevice", "maxBufferLength", +[](Device*, SEL) { return UInteger(TheSettings().max_buffer_length); });
  Add("MTLDevice", "newCommandQueue", +[](Device* self, SEL) -> Object* { return NewQueue(self); });
  Add(
      "MTLDevice", "newBufferWithLength:options:", +[](Device* self, SEL, UInteger size, UInteger options) -> Object* {
        if (size == 0) AbortWith("expected a buffer of 1 byte or more; found 0");
        if (options != kStorageShared) AbortWith("expected shared storage; found options " + std::to_string(options));
        const auto bytes = static_cast<int64_t>(size);
        if (bytes > TheSettings().max_buffer_length || MemoryInUse() + bytes > TheSettings().memory) return nullptr;
        return new Buffer(Ref<Device>(self), bytes);
      });
  Add(
      "MTLDevice", "newLibraryWithSource:options:error:",
      +[](Device* self, SEL, String* source, CompileOptions* options, ErrorObject** error) -> Object* {
        if (options == nullptr || options->fast_math) AbortWith("expected fast math off; found it on");
        if (options->language != kLanguage31) AbortWith("expected Metal 3.1; found another version");
        // macOS 15 has switches that older systems lack; where they are, they are set.
        if (KnownMethods().count("-[MTLCompileOptions setMathMode:]") != 0 &&
            !(options->safe_mode && options->precise_functions)) {
          AbortWith("expected safe math with precise functions; found other modes");
        }
        MslText text = ReadMsl(source->text);
        if (!TheSettings().compile_error.empty()) text.error = TheSettings().compile_error;
        if (!text.error.empty()) {
          SetError(error, text.error, 3);
          return nullptr;
        }
        SetError(error, "program_source:1:1: warning: words of the compiler, beside a library", 4);
        return new Library(Ref<Device>(self), std::move(text));
      });
  Add(
      "MTLDevice", "newComputePipelineStateWithFunction:error:",
      +[](Device*, SEL, Function* function, ErrorObject** error) -> Object* {
        if (!TheSettings().pipeline_error.empty()) {
          SetError(error, TheSettings().pipeline_error, 2);
          return nullptr;
        }
        return new Pipeline(Ref<Function>(function));
      });

  Add("MTLBuffer", "contents", +[](Buffer* self, SEL) { return static_cast<void*>(self->bytes); });
  Add("MTLBuffer", "length", +[](Buffer* self, SEL) { return UInteger(self->size); });
}

void AddLibrary() {
  Add("+MTLCompileOptions", "alloc", +[](Object*, SEL) -> Object* { return new CompileOptions; });
  Add("MTLCompileOptions", "init", +[](CompileOptions* self, SEL) { return self; });
  Add("MTLCompileOptions", "setFastMathEnabled:", +[](CompileOptions* self, SEL, bool on) { self->fast_math = on; });
  Add(
      "MTLCompileOptions",
      "setLanguageVersion:", +[](CompileOptions* self, SEL, UInteger version) { self->language = version; });
  Add(
      "MTLCompileOptions",
      "setMathMode:", +[](CompileOptions* self, SEL, UInteger mode) { self->safe_mode = mode == kMathModeSafe; });
  Add(
      "MTLCompileOptions", "setMathFloatingPointFunctions:", +[](CompileOptions* self, SEL, UInteger functions) {
        self->precise_functions = functions == kMathFunctionsPrecise;
      });

  Add("+MTLFunctionConstantValues", "alloc", +[](Object*, SEL) -> Object* { return new FunctionConstantValues; });
  Add("MTLFunctionConstantValues", "init", +[](FunctionConstantValues* self, SEL) { return self; });
  Add(
      "MTLFunctionConstantValues", "setConstantValue:type:atIndex:",
      +[](FunctionConstantValues* self, SEL, const void* value, UInteger type, UInteger index) {
        if (type != kDataTypeInt) AbortWith("expected a constant of type int; found type " + std::to_string(type));
        std::memcpy(&self->values[static_cast<int>(index)], value, sizeof(int32_t));
      });
  Add(
      "MTLLibrary", "newFunctionWithName:constantValues:error:",
      +[](Library* self, SEL, String* name, FunctionConstantValues* given, ErrorObject** error) -> Object* {
        const auto kernel = self->text.kernels.find(name->text);
        if (kernel == self->text.kernels.end()) {
          SetError(error, "Function " + name->text + " was not found in the library", 5);
          return nullptr;
        }
        for (const int index : kernel->second.constants) {
          const FunctionConstant& constant = self->text.constants.at(index);
          if (given->values.count(index) == 0) {
            SetError(error, "function constant " + constant.name + " has no value", 3);
            return nullptr;
          }
          if (constant.type != "int") {
            SetError(error, "function constant " + constant.name + " is a " + constant.type + ", not an int", 3);
            return nullptr;
          }
        }
        return new Function(Ref<Library>(self), name->text, given->values);
      });
  Add(
      "MTLComputePipelineState", "maxTotalThreadsPerThreadgroup",
      +[](Pipeline*, SEL) { return UInteger(TheSettings().max_threads); });
  Add(
      "MTLComputePipelineState", "threadExecutionWidth",
      +[](Pipeline*, SEL) { return UInteger(TheSettings().simd_width); });
}

}  // namespace

void AddMetal() {
  AddDevice();
  AddLibrary();
  AddCommands();
}

Counts TheCounts() {
  const AtomicCounts& counters = Counters();
  return {counters.command_buffers, counters.encoders, counters.dispatches, counters.copies, counters.waiting};
}

void ResetCounts() {
  AtomicCounts& counters = Counters();
  counters.command_buffers = counters.encoders = counters.dispatches = counters.copies = 0;
}

}  // namespace kvfuse::fake_metal

using namespace kvfuse::fake_metal;

// The caller owns what it gets, as the name says in Apple's rules.
extern "C" __attribute__((visibility("hidden"))) void* MTLCreateSystemDefaultDevice() {
  return TheSettings().has_device ? new Device : nullptr;
}

extern "C" __attribute__((visibility("hidden"))) void* MTLCopyAllDevices() { return nullptr; }
