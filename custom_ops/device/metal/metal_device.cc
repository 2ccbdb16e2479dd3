// Memory is shared with the CPU: an upload into a buffer that no queued command uses is a memcpy, and a download is one
// after the wait. Commands are gathered in one command buffer and go to the GPU when somebody waits, or when it is
// full.
#include "device/metal/metal_device.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "device/check.h"
#include "device/metal/metal_cpp.h"
#include "kvfuse/error.h"

namespace kvfuse {
namespace {

constexpr int kCommandsPerBatch = 64;    // the GPU starts on them while the next ones are being written
constexpr int64_t kLargestValue = 4096;  // setBytes takes no more
constexpr int64_t kStagingBytes = 1 << 20;
constexpr int64_t kSimdWidth = 32;  // what kernels.metal is written for

// Metal returns many objects that live until the pool around the call ends; threads of a pool have none of their own.
class AutoreleaseScope {
 public:
  AutoreleaseScope() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  ~AutoreleaseScope() { pool_->release(); }
  AutoreleaseScope(const AutoreleaseScope&) = delete;

 private:
  NS::AutoreleasePool* pool_;
};

// Owns one reference. (metal-cpp's NS::SharedPtr sends messages to null, which C++ leaves undefined.)
template <typename T>
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() {
    if (object_ != nullptr) object_->release();
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

  static Owned Of(T* object) {  // of methods whose name begins with new, alloc or Create
    Owned owned;
    owned.object_ = object;
    return owned;
  }
  static Owned Retained(T* object) {  // of all others
    if (object != nullptr) object->retain();
    return Of(object);
  }

 private:
  T* object_ = nullptr;
};

template <typename T>
Owned<T> Own(T* object) {
  return Owned<T>::Of(object);
}
template <typename T>
Owned<T> Retain(T* object) {
  return Owned<T>::Retained(object);
}

NS::String* Text(const std::string& text) { return NS::String::string(text.c_str(), NS::UTF8StringEncoding); }

std::string Words(NS::Error* error) {
  if (error == nullptr) return "no reason given";
  std::string words = error->localizedDescription()->utf8String();
  return words + " (code " + std::to_string(error->code()) + ")";
}

bool RespondsTo(NS::Object* object, const char* selector) {
  using Send = bool (*)(const void*, SEL, SEL);
  return reinterpret_cast<Send>(&objc_msgSend)(object, sel_registerName("respondsToSelector:"),
                                               sel_registerName(selector));
}

class MetalBuffer final : public DeviceBuffer {
 public:
  MetalBuffer(Owned<MTL::Buffer> buffer, int64_t size) : buffer(std::move(buffer)), size_(size) {}
  int64_t size() const override { return size_; }
  uint8_t* bytes() const { return static_cast<uint8_t*>(buffer->contents()); }

  Owned<MTL::Buffer> buffer;
  uint64_t last_batch = 0;  // the newest batch with a command that uses this buffer

 private:
  const int64_t size_;
};

// A command buffer keeps what it uses alive until it has run, so a DeviceBuffer may go before that.
struct Batch {
  Owned<MTL::CommandBuffer> commands;
  uint64_t number;
  int command_count = 0;
  std::string first_kernel;

  bool Finished() const { return commands->status() >= MTL::CommandBufferStatusCompleted; }
  bool Failed() const { return commands->status() == MTL::CommandBufferStatusError; }
};

// Host memory that queued copies read from, so that the source of an upload may change at once.
struct Staging {
  Owned<MTL::Buffer> buffer;
  int64_t used = 0;
};

class MetalDevice final : public Device {
 public:
  explicit MetalDevice(const std::string& source);
  ~MetalDevice() override;

  const std::string& name() const override { return name_; }
  std::shared_ptr<DeviceBuffer> Allocate(int64_t bytes) override;
  void Upload(DeviceBuffer& to, int64_t offset, const void* from, int64_t bytes) override;
  void Copy(DeviceBuffer& to, int64_t to_offset, DeviceBuffer& from, int64_t from_offset, int64_t bytes) override;
  void Launch(const Dispatch& dispatch) override;
  void Download(void* to, DeviceBuffer& from, int64_t offset, int64_t bytes) override;
  void Wait() override;

 private:
  using Constants = std::vector<std::pair<int, int32_t>>;
  using Lock = std::unique_lock<std::mutex>;

  Owned<MTL::Buffer> NewBuffer(int64_t bytes);
  MTL::ComputePipelineState* Pipeline(const std::string& kernel, Constants constants);
  Batch& OpenBatch();
  MTL::ComputeCommandEncoder* ComputeEncoder();
  MTL::BlitCommandEncoder* BlitEncoder();
  void EndEncoder();
  void CountCommand();
  void Commit();
  void Finish(Lock& lock);
  void TakeFinished();
  bool Idle(const MetalBuffer& buffer);
  std::pair<MTL::Buffer*, int64_t> Stage(const void* from, int64_t bytes);

  const std::string name_ = "metal";
  Owned<MTL::Device> device_;
  Owned<MTL::CommandQueue> queue_;
  Owned<MTL::Library> library_;

  std::mutex mutex_;  // guards all below, and MetalBuffer::last_batch
  std::map<std::pair<std::string, Constants>, Owned<MTL::ComputePipelineState>> pipelines_;
  std::shared_ptr<Batch> open_;  // being written; at most one of the encoders is open in it
  Owned<MTL::ComputeCommandEncoder> compute_;
  Owned<MTL::BlitCommandEncoder> blit_;
  std::vector<std::shared_ptr<Batch>> in_flight_;  // committed, oldest first
  uint64_t newest_ = 0;                            // number of the last batch that was opened
  uint64_t finished_ = 0;                          // all batches up to this number have run
  std::vector<Staging> staging_;
};

MetalBuffer& Mine(DeviceBuffer& buffer) {
  auto* mine = dynamic_cast<MetalBuffer*>(&buffer);
  if (mine == nullptr) Fail("[metal] expected a buffer of this device; found one of another device");
  return *mine;
}

// Metal's copies on macOS take whole words only.
bool Words4(int64_t a, int64_t b, int64_t c) { return ((a | b | c) & 3) == 0; }

MetalDevice::MetalDevice(const std::string& source) {
  AutoreleaseScope scope;
  device_ = Own(MTL::CreateSystemDefaultDevice());
  if (!device_) Fail("[metal] expected a GPU that Metal knows; found none");
  queue_ = Own(device_->newCommandQueue());
  if (!queue_) Fail("[metal] expected a command queue of the GPU; found none");

  auto options = Own(MTL::CompileOptions::alloc()->init());
  options->setLanguageVersion(MTL::LanguageVersion3_1);
  // Equality with the CPU is promised: no reassociation, no flushed special cases. macOS 15 has finer switches.
  options->setFastMathEnabled(false);
  if (RespondsTo(options.get(), "setMathMode:")) {
    options->setMathMode(MTL::MathModeSafe);
    options->setMathFloatingPointFunctions(MTL::MathFloatingPointFunctionsPrecise);
  }
  NS::Error* error = nullptr;  // also set for mere warnings
  library_ = Own(device_->newLibrary(Text(source), options.get(), &error));
  if (!library_) Fail("[metal] expected kernels that Metal's compiler accepts; found: ", Words(error));
}

MetalDevice::~MetalDevice() {
  AutoreleaseScope scope;
  Lock lock(mutex_);
  Commit();
  for (const auto& batch : in_flight_) batch->commands->waitUntilCompleted();
}

Owned<MTL::Buffer> MetalDevice::NewBuffer(int64_t bytes) {
  const auto most = static_cast<int64_t>(device_->maxBufferLength());
  if (bytes > most) {
    FailMemory("[metal] expected at most ", most, " bytes in one buffer of this GPU; found ", bytes);
  }
  // Metal fills new buffers with zeros.
  auto buffer = Own(device_->newBuffer(static_cast<NS::UInteger>(bytes), MTL::ResourceStorageModeShared));
  if (!buffer) FailMemory("[metal] expected ", bytes, " bytes of GPU memory; found too little left");
  return buffer;
}

std::shared_ptr<DeviceBuffer> MetalDevice::Allocate(int64_t bytes) {
  CheckSize("metal", bytes);
  AutoreleaseScope scope;
  return std::make_shared<MetalBuffer>(NewBuffer(std::max<int64_t>(bytes, 16)), bytes);  // Metal refuses empty ones
}

// A pipeline is a kernel compiled for its function constants; made once.
MTL::ComputePipelineState* MetalDevice::Pipeline(const std::string& kernel, Constants constants) {
  std::sort(constants.begin(), constants.end());
  auto& pipeline = pipelines_[{kernel, constants}];
  if (pipeline) return pipeline.get();

  auto values = Own(MTL::FunctionConstantValues::alloc()->init());
  for (const auto& [index, value] : constants) {
    values->setConstantValue(&value, MTL::DataTypeInt, static_cast<NS::UInteger>(index));
  }
  NS::Error* error = nullptr;
  auto function = Own(library_->newFunction(Text(kernel), values.get(), &error));
  if (!function) Fail("[metal] expected kernel '", kernel, "' in the library; found: ", Words(error));
  auto made = Own(device_->newComputePipelineState(function.get(), &error));
  if (!made) Fail("[metal] expected a pipeline for kernel '", kernel, "'; found: ", Words(error));
  const auto width = static_cast<int64_t>(made->threadExecutionWidth());
  if (width != kSimdWidth) Fail("[metal] expected a GPU with simdgroups of ", kSimdWidth, " threads; found ", width);
  pipeline = std::move(made);
  return pipeline.get();
}

Batch& MetalDevice::OpenBatch() {
  if (!open_) {
    auto commands = Retain(queue_->commandBuffer());  // blocks while 64 of them are under way
    if (!commands) Fail("[metal] expected a command buffer of the queue; found none");
    open_ = std::make_shared<Batch>(Batch{std::move(commands), ++newest_});
  }
  return *open_;
}

MTL::ComputeCommandEncoder* MetalDevice::ComputeEncoder() {
  if (!compute_) {
    Batch& batch = OpenBatch();
    EndEncoder();
    // Serial: each dispatch sees what those before it wrote.
    compute_ = Retain(batch.commands->computeCommandEncoder());
    if (!compute_) Fail("[metal] expected an encoder for kernels; found none");  // messages to none do nothing
  }
  return compute_.get();
}

MTL::BlitCommandEncoder* MetalDevice::BlitEncoder() {
  if (!blit_) {
    Batch& batch = OpenBatch();
    EndEncoder();
    blit_ = Retain(batch.commands->blitCommandEncoder());
    if (!blit_) Fail("[metal] expected an encoder for copies; found none");
  }
  return blit_.get();
}

void MetalDevice::EndEncoder() {
  if (compute_) compute_->endEncoding();
  if (blit_) blit_->endEncoding();
  compute_ = {};
  blit_ = {};
}

void MetalDevice::CountCommand() {
  if (++open_->command_count >= kCommandsPerBatch) Commit();
}

void MetalDevice::Commit() {
  if (!open_) return;
  EndEncoder();
  open_->commands->commit();
  in_flight_.push_back(std::move(open_));
  open_.reset();
}

// Commits and waits. The lock is open during the wait, so that other threads may queue more.
void MetalDevice::Finish(Lock& lock) {
  Commit();
  if (in_flight_.empty()) return;
  const std::vector<std::shared_ptr<Batch>> waited = in_flight_;
  lock.unlock();
  for (const auto& batch : waited) batch->commands->waitUntilCompleted();
  lock.lock();
  finished_ = std::max(finished_, waited.back()->number);
  in_flight_.erase(std::remove_if(in_flight_.begin(), in_flight_.end(),
                                  [this](const auto& batch) { return batch->number <= finished_; }),
                   in_flight_.end());
  if (in_flight_.empty() && !open_ && !staging_.empty()) {
    staging_.resize(1);
    staging_[0].used = 0;
    if (static_cast<int64_t>(staging_[0].buffer->length()) > kStagingBytes) staging_.clear();
  }
  // Two threads that waited for one batch both learn of its failure.
  for (const auto& batch : waited) {
    if (batch->Failed()) {
      Fail("[metal] expected ", batch->command_count, " queued commands (the first: ", batch->first_kernel,
           ") to finish; found: ", Words(batch->commands->error()));
    }
  }
}

// Takes note of what has run without anyone having waited; failures stay for those who will.
void MetalDevice::TakeFinished() {
  auto batch = in_flight_.begin();
  while (batch != in_flight_.end() && (*batch)->Finished() && !(*batch)->Failed()) {
    finished_ = (*batch)->number;
    ++batch;
  }
  in_flight_.erase(in_flight_.begin(), batch);
}

// Whether no queued command uses the buffer, so that the CPU may touch its bytes at once.
bool MetalDevice::Idle(const MetalBuffer& buffer) {
  if (buffer.last_batch <= finished_) return true;
  TakeFinished();
  return buffer.last_batch <= finished_;
}

std::pair<MTL::Buffer*, int64_t> MetalDevice::Stage(const void* from, int64_t bytes) {
  if (staging_.empty() || staging_.back().used + bytes > static_cast<int64_t>(staging_.back().buffer->length())) {
    staging_.push_back({NewBuffer(std::max(bytes, kStagingBytes)), 0});
  }
  Staging& staging = staging_.back();
  const int64_t offset = staging.used;
  std::memcpy(static_cast<uint8_t*>(staging.buffer->contents()) + offset, from, static_cast<size_t>(bytes));
  staging.used = (offset + bytes + 15) / 16 * 16;
  return {staging.buffer.get(), offset};
}

void MetalDevice::Upload(DeviceBuffer& to, int64_t offset, const void* from, int64_t bytes) {
  MetalBuffer& target = Mine(to);
  CheckRange("metal", to, offset, bytes);
  if (bytes == 0) return;
  AutoreleaseScope scope;
  Lock lock(mutex_);
  const bool idle = Idle(target);
  if (!idle && Words4(offset, bytes, 0)) {
    const auto [source, source_offset] = Stage(from, bytes);
    BlitEncoder()->copyFromBuffer(source, static_cast<NS::UInteger>(source_offset), target.buffer.get(),
                                  static_cast<NS::UInteger>(offset), static_cast<NS::UInteger>(bytes));
    target.last_batch = open_->number;
    if (open_->first_kernel.empty()) open_->first_kernel = "an upload";
    CountCommand();
    return;
  }
  while (!Idle(target)) Finish(lock);
  std::memcpy(target.bytes() + offset, from, static_cast<size_t>(bytes));
}

void MetalDevice::Copy(DeviceBuffer& to, int64_t to_offset, DeviceBuffer& from, int64_t from_offset, int64_t bytes) {
  MetalBuffer& target = Mine(to);
  MetalBuffer& source = Mine(from);
  CheckRange("metal", to, to_offset, bytes);
  CheckRange("metal", from, from_offset, bytes);
  if (bytes == 0) return;
  AutoreleaseScope scope;
  Lock lock(mutex_);
  const bool apart = &target != &source || to_offset + bytes <= from_offset || from_offset + bytes <= to_offset;
  if (apart && Words4(to_offset, from_offset, bytes)) {
    BlitEncoder()->copyFromBuffer(source.buffer.get(), static_cast<NS::UInteger>(from_offset), target.buffer.get(),
                                  static_cast<NS::UInteger>(to_offset), static_cast<NS::UInteger>(bytes));
    target.last_batch = source.last_batch = open_->number;
    if (open_->first_kernel.empty()) open_->first_kernel = "a copy";
    CountCommand();
    return;
  }
  // Metal copies neither parts of words nor onto itself; the CPU does, once the queue is empty.
  while (!Idle(target) || !Idle(source)) Finish(lock);
  std::memmove(target.bytes() + to_offset, source.bytes() + from_offset, static_cast<size_t>(bytes));
}

void MetalDevice::Launch(const Dispatch& dispatch) {
  for (const Dispatch::Argument& argument : dispatch.arguments) {
    if (argument.buffer != nullptr) {
      CheckRange("metal", Mine(*argument.buffer), argument.offset, 0);
    } else if (argument.byte_count < 1 || argument.byte_count > static_cast<int64_t>(kMaxInlineArgument)) {
      Fail("[metal] expected 1 to ", kMaxInlineArgument, " bytes by value for kernel '", dispatch.kernel, "'; found ",
           argument.byte_count);
    }
  }
  for (const uint32_t groups : dispatch.groups) {
    if (groups == 0) {
      Fail("[metal] expected at least one group each way of kernel '", dispatch.kernel, "'; found ", groups);
    }
  }
  AutoreleaseScope scope;
  Lock lock(mutex_);
  MTL::ComputePipelineState* pipeline = Pipeline(dispatch.kernel, dispatch.constants);
  // Registers may leave room for fewer threads than the hardware's 1024.
  const auto most = static_cast<uint32_t>(pipeline->maxTotalThreadsPerThreadgroup());
  if (dispatch.threads == 0 || dispatch.threads % kSimdWidth != 0 || dispatch.threads > most) {
    Fail("[metal] expected a multiple of ", kSimdWidth, " up to ", most, " threads in a group of kernel '",
         dispatch.kernel, "' on this GPU; found ", dispatch.threads);
  }

  MTL::ComputeCommandEncoder* encoder = ComputeEncoder();
  encoder->setComputePipelineState(pipeline);
  NS::UInteger index = 0;
  for (const Dispatch::Argument& argument : dispatch.arguments) {
    if (argument.buffer != nullptr) {
      auto& buffer = static_cast<MetalBuffer&>(*argument.buffer);
      encoder->setBuffer(buffer.buffer.get(), static_cast<NS::UInteger>(argument.offset), index);
      buffer.last_batch = open_->number;
    } else {
      encoder->setBytes(argument.bytes, static_cast<NS::UInteger>(argument.byte_count), index);
    }
    ++index;
  }
  encoder->dispatchThreadgroups(MTL::Size(dispatch.groups[0], dispatch.groups[1], dispatch.groups[2]),
                                MTL::Size(dispatch.threads, 1, 1));
  if (open_->first_kernel.empty()) open_->first_kernel = dispatch.kernel;
  CountCommand();
}

void MetalDevice::Download(void* to, DeviceBuffer& from, int64_t offset, int64_t bytes) {
  MetalBuffer& source = Mine(from);
  CheckRange("metal", from, offset, bytes);
  AutoreleaseScope scope;
  Lock lock(mutex_);
  Finish(lock);
  if (bytes == 0) return;
  std::memcpy(to, source.bytes() + offset, static_cast<size_t>(bytes));
}

void MetalDevice::Wait() {
  AutoreleaseScope scope;
  Lock lock(mutex_);
  Finish(lock);
}

}  // namespace

bool HasMetalDevice() {
  AutoreleaseScope scope;
  return static_cast<bool>(Own(MTL::CreateSystemDefaultDevice()));
}

std::unique_ptr<Device> MakeMetalDevice(const std::string& source) { return std::make_unique<MetalDevice>(source); }

}  // namespace kvfuse
