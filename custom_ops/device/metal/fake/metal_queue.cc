// Command queues: buffers of commands, their encoders, and when they run.
#include <objc/runtime.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "device/metal/fake/metal_objects.h"

namespace kvfuse::fake_metal {
namespace {

// MTLCommandBufferStatus, written down here a second time on purpose.
constexpr UInteger kStatusNotEnqueued = 0, kStatusCommitted = 2, kStatusCompleted = 4, kStatusError = 5;
constexpr size_t kMostCommandBuffers = 64;  // of a queue; commandBuffer waits beyond it

struct Size {
  UInteger width, height, depth;
};

// One command with all that it uses: references keep buffers alive until it has run.
struct Command {
  Ref<Pipeline> pipeline;
  struct Argument {
    Ref<Buffer> buffer;
    int64_t offset = 0;
    std::vector<uint8_t> value;
  };
  std::map<int, Argument> arguments;
  Size groups{}, threads{};
  // A copy, where there is no pipeline.
  Ref<Buffer> from, to;
  int64_t from_offset = 0, to_offset = 0, size = 0;
};

void RunCopy(const Command& command) {
  std::memcpy(command.to->bytes + command.to_offset, command.from->bytes + command.from_offset,
              static_cast<size_t>(command.size));
  ++Counters().copies;
}

void RunKernel(Command& command) {
  KernelCall call;
  call.kernel = command.pipeline->function->name;
  call.constants = command.pipeline->function->constants;
  for (auto& [index, argument] : command.arguments) {
    if (argument.buffer) {
      call.arguments.push_back({argument.buffer->bytes + argument.offset, argument.buffer->size - argument.offset});
    } else {
      call.arguments.push_back({argument.value.data(), static_cast<int64_t>(argument.value.size())});
    }
  }
  call.groups[0] = static_cast<uint32_t>(command.groups.width);
  call.groups[1] = static_cast<uint32_t>(command.groups.height);
  call.groups[2] = static_cast<uint32_t>(command.groups.depth);
  call.threads = static_cast<uint32_t>(command.threads.width);
  if (!TheSettings().runner) AbortWith("expected a runner for kernels; found none");
  TheSettings().runner(call);
  ++Counters().dispatches;
}

class Queue;

class CommandBuffer : public Object {
 public:
  explicit CommandBuffer(Queue* queue);
  ~CommandBuffer() override;
  void Run();

  Queue* const queue;  // held, see below
  std::vector<Command> commands;
  bool has_open_encoder = false;
  std::atomic<UInteger> status{kStatusNotEnqueued};
  Ref<ErrorObject> error;
};

// Runs command buffers in the order of their commits, when the schedule says so.
class Queue : public Object {
 public:
  explicit Queue(Ref<Device> device) : Object("MTLCommandQueue"), device_(device) {}
  ~Queue() override {
    if (worker_.joinable()) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
      }
      changed_.notify_all();
      worker_.join();
    }
  }

  void Commit(CommandBuffer* buffer) {
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.emplace_back(buffer);
    switch (TheSettings().schedule) {
      case Schedule::kLate:
        break;
      case Schedule::kAtOnce:
        RunUntil(lock, buffer);
        break;
      case Schedule::kThread:
        if (!worker_.joinable()) worker_ = std::thread([this] { Work(); });
        changed_.notify_all();
        break;
    }
  }

  void WaitFor(CommandBuffer* buffer) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (worker_.joinable()) {
      changed_.wait(lock, [&] { return buffer->status >= kStatusCompleted && running_ != buffer; });
    } else {
      RunUntil(lock, buffer);
    }
  }

  void MakeRoom() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (worker_.joinable()) {
      changed_.wait(lock, [this] { return waiting_.size() + (running_ != nullptr) < kMostCommandBuffers; });
    } else if (waiting_.size() >= kMostCommandBuffers) {
      RunUntil(lock, waiting_.front().get());
    }
  }

 private:
  // With the lock held throughout: a GPU runs one thing at a time, whoever waits for it.
  void RunUntil(std::unique_lock<std::mutex>&, CommandBuffer* last) {
    while (last->status < kStatusCompleted) {
      Ref<CommandBuffer> next = waiting_.front();
      waiting_.pop_front();
      next->Run();
    }
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Ref<CommandBuffer> next = waiting_.front();
      waiting_.pop_front();
      running_ = next.get();
      lock.unlock();
      next->Run();
      lock.lock();
      next = Ref<CommandBuffer>();  // before anyone hears of it: the last one to hold it may end the queue
      running_ = nullptr;
      changed_.notify_all();
    }
  }

  const Ref<Device> device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Ref<CommandBuffer>> waiting_;
  const CommandBuffer* running_ = nullptr;
  std::thread worker_;
  bool stopping_ = false;
};

CommandBuffer::CommandBuffer(Queue* queue) : Object("MTLCommandBuffer"), queue(Retain(queue)) {}
CommandBuffer::~CommandBuffer() { Release(queue); }

void CommandBuffer::Run() {
  UInteger outcome = kStatusCompleted;
  int& failing = TheSettings().failing_command_buffer;
  if (failing > 0 && --failing == 0) {
    Object* made = new ErrorObject("Caused GPU Timeout Error", 2);
    error = Ref<ErrorObject>(static_cast<ErrorObject*>(made));
    Release(made);
    outcome = kStatusError;
  } else {
    try {
      for (Command& command : commands) command.pipeline ? RunKernel(command) : RunCopy(command);
    } catch (const std::exception& exception) {
      Object* made = new ErrorObject(exception.what(), 1);
      error = Ref<ErrorObject>(static_cast<ErrorObject*>(made));
      Release(made);
      outcome = kStatusError;
    }
  }
  commands.clear();
  ++Counters().command_buffers;
  status = outcome;
}

// Base of both encoders: one is open at a time, and each must be ended before it goes.
class Encoder : public Object {
 public:
  Encoder(const char* class_name, CommandBuffer* buffer) : Object(class_name), buffer_(buffer) {
    if (buffer->status != kStatusNotEnqueued) AbortWith("expected an open command buffer; found a committed one");
    if (buffer->has_open_encoder) AbortWith("expected one open encoder of a command buffer; found a second one");
    buffer->has_open_encoder = true;
    ++Counters().encoders;
  }
  ~Encoder() override {
    if (open_) AbortWith("expected endEncoding before the encoder goes; found none");
  }
  void End() {
    CheckOpen();
    open_ = false;
    buffer_->has_open_encoder = false;
  }
  void Push(Command command) {
    CheckOpen();
    buffer_->commands.push_back(std::move(command));
  }
  void CheckOpen() const {
    if (!open_) AbortWith("expected an open encoder; found an ended one");
  }

 private:
  const Ref<CommandBuffer> buffer_;
  bool open_ = true;
};

class ComputeEncoder : public Encoder {
 public:
  explicit ComputeEncoder(CommandBuffer* buffer) : Encoder("MTLComputeCommandEncoder", buffer) {}
  Ref<Pipeline> pipeline;
  std::map<int, Command::Argument> arguments;  // stay bound from one dispatch to the next
};

class BlitEncoder : public Encoder {
 public:
  explicit BlitEncoder(CommandBuffer* buffer) : Encoder("MTLBlitCommandEncoder", buffer) {}
};

}  // namespace

Object* NewQueue(Device* device) { return new Queue(Ref<Device>(device)); }

void AddCommands() {
  Add(
      "MTLCommandQueue", "commandBuffer", +[](Queue* self, SEL) {
        self->MakeRoom();
        return Autorelease(new CommandBuffer(self));
      });
  Add(
      "MTLCommandBuffer", "computeCommandEncoder",
      +[](CommandBuffer* self, SEL) { return Autorelease(new ComputeEncoder(self)); });
  Add(
      "MTLCommandBuffer", "blitCommandEncoder",
      +[](CommandBuffer* self, SEL) { return Autorelease(new BlitEncoder(self)); });
  Add(
      "MTLCommandBuffer", "commit", +[](CommandBuffer* self, SEL) {
        if (self->has_open_encoder) AbortWith("expected endEncoding before commit; found an open encoder");
        if (self->status != kStatusNotEnqueued)
          AbortWith("expected one commit of a command buffer; found a second one");
        self->status = kStatusCommitted;
        self->queue->Commit(self);
      });
  Add(
      "MTLCommandBuffer", "waitUntilCompleted", +[](CommandBuffer* self, SEL) {
        if (self->status == kStatusNotEnqueued) AbortWith("expected a commit before the wait; found none");
        ++Counters().waiting;
        self->queue->WaitFor(self);
        --Counters().waiting;
      });
  Add("MTLCommandBuffer", "status", +[](CommandBuffer* self, SEL) { return UInteger(self->status); });
  Add("MTLCommandBuffer", "error", +[](CommandBuffer* self, SEL) { return self->error.get(); });

  const char* compute = "MTLComputeCommandEncoder";
  Add(compute, "endEncoding", +[](ComputeEncoder* self, SEL) { self->End(); });
  Add(
      compute, "setComputePipelineState:", +[](ComputeEncoder* self, SEL, Pipeline* pipeline) {
        self->CheckOpen();
        self->pipeline = Ref<Pipeline>(pipeline);
      });
  Add(
      compute,
      "setBuffer:offset:atIndex:", +[](ComputeEncoder* self, SEL, Buffer* buffer, UInteger offset, UInteger index) {
        self->CheckOpen();
        if (index > 30) AbortWith("expected an argument index up to 30; found " + std::to_string(index));
        if (offset > UInteger(buffer->size)) AbortWith("expected an offset within the buffer; found one beyond it");
        self->arguments[static_cast<int>(index)] = {Ref<Buffer>(buffer), static_cast<int64_t>(offset), {}};
      });
  Add(
      compute,
      "setBytes:length:atIndex:", +[](ComputeEncoder* self, SEL, const void* bytes, UInteger length, UInteger index) {
        self->CheckOpen();
        if (index > 30) AbortWith("expected an argument index up to 30; found " + std::to_string(index));
        if (length == 0 || length > 4096) AbortWith("expected 1 to 4096 bytes; found " + std::to_string(length));
        const auto* first = static_cast<const uint8_t*>(bytes);
        self->arguments[static_cast<int>(index)] = {{}, 0, {first, first + length}};
      });
  Add(
      compute,
      "dispatchThreadgroups:threadsPerThreadgroup:", +[](ComputeEncoder* self, SEL, Size groups, Size threads) {
        if (!self->pipeline) AbortWith("expected a pipeline before the dispatch; found none");
        const Function& function = *self->pipeline->function.get();
        const UInteger count = threads.width * threads.height * threads.depth;
        if (count == 0 || count > UInteger(TheSettings().max_threads) || threads.width != count) {
          AbortWith("expected 1 to " + std::to_string(TheSettings().max_threads) + " threads in one row; found " +
                    std::to_string(count));
        }
        if (groups.width * groups.height * groups.depth == 0) AbortWith("expected one threadgroup or more; found none");
        Command command;
        command.pipeline = self->pipeline;
        // Only what this kernel has: what an earlier dispatch has bound beyond it is not used.
        int next = 0;
        for (const auto& [index, alignment] : function.library->text.kernels.at(function.name).buffers) {
          const auto argument = self->arguments.find(index);
          if (argument == self->arguments.end() || index != next) {
            AbortWith("expected kernel " + function.name + " with argument " + std::to_string(next) +
                      " bound; found none");
          }
          if (argument->second.offset % alignment != 0) {
            AbortWith("expected argument " + std::to_string(index) + " of kernel " + function.name +
                      " at a multiple of " + std::to_string(alignment) + " bytes; found offset " +
                      std::to_string(argument->second.offset));
          }
          command.arguments[index] = argument->second;
          ++next;
        }
        command.groups = groups;
        command.threads = threads;
        self->Push(std::move(command));
      });

  const char* blit = "MTLBlitCommandEncoder";
  Add(blit, "endEncoding", +[](BlitEncoder* self, SEL) { self->End(); });
  Add(
      blit, "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:",
      +[](BlitEncoder* self, SEL, Buffer* from, UInteger from_offset, Buffer* to, UInteger to_offset, UInteger size) {
        if ((from_offset | to_offset | size) % 4 != 0)
          AbortWith("expected a copy of whole words; found parts of words");
        if (from_offset + size > UInteger(from->size) || to_offset + size > UInteger(to->size)) {
          AbortWith("expected a copy within both buffers; found one beyond");
        }
        if (from == to && from_offset < to_offset + size && to_offset < from_offset + size) {
          AbortWith("expected a copy between separate places; found overlapping ones");
        }
        Command command;
        command.from = Ref<Buffer>(from);
        command.to = Ref<Buffer>(to);
        command.from_offset = static_cast<int64_t>(from_offset);
        command.to_offset = static_cast<int64_t>(to_offset);
        command.size = static_cast<int64_t>(size);
        self->Push(std::move(command));
      });
}

}  // namespace kvfuse::fake_metal
