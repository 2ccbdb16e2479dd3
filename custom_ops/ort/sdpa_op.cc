// kvfuse::QuantizedKvSdpa: appends this step's keys and values to the layer's cache and attends over it.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <sstream>

#include "api.h"
#include "execution.h"
#include "kvfuse/error.h"
#include "kvfuse/half.h"
#include "kvfuse/sequence.h"
#include "kvfuse/warnings.h"
#include "profile.h"
#include "sdpa_attributes.h"

namespace kvfuse {
namespace {

enum InputIndex : size_t { kQuery, kKey, kValue, kSlots, kPadding, kBias, kHeadSink, kInputCount };

// A tensor as f32: itself, or a converted copy of an f16 one.
struct FloatView {
  const float* data = nullptr;
  std::vector<float> copy;

  explicit FloatView(const Tensor& tensor) {
    if (!tensor.present()) return;
    if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
      data = tensor.data<float>();
      return;
    }
    const uint16_t* half = tensor.data<uint16_t>();
    copy.resize(tensor.size());
    for (size_t i = 0; i < copy.size(); ++i) copy[i] = HalfToFloat(half[i]);
    data = copy.data();
  }
};

struct Dims {
  int64_t batch, num_heads, kv_num_heads, sequence_length, head_dim, value_head_dim;
};

// Strides of a [B, H, S, D] (axis 2) or [B, S, H, D] (axis 1) tensor.
struct Strides {
  ptrdiff_t batch, head, token;
  Strides(int axis, int64_t heads, int64_t tokens, int64_t dim)
      : batch(heads * tokens * dim), head(axis == 2 ? tokens * dim : dim), token(axis == 2 ? dim : heads * dim) {}
};

// The operands of attention_bias, broadcast to [B, num_heads, S, total] with stride 0 where it has one.
struct Bias {
  const float* data = nullptr;
  ptrdiff_t batch = 0, head = 0, query = 0, key = 0;

  Bias(const std::string& where, const Tensor& tensor, const float* values, const Dims& dims, int64_t total) {
    if (!tensor.present()) return;
    data = values;
    std::vector<int64_t> shape = tensor.shape;
    if (shape.size() > 4) Fail(where, " expected attention_bias of at most 4 dimensions; found ", ShapeText(shape));
    shape.insert(shape.begin(), 4 - shape.size(), 1);
    const int64_t expected[4] = {dims.batch, dims.num_heads, dims.sequence_length, total};
    ptrdiff_t* strides[4] = {&batch, &head, &query, &key};
    ptrdiff_t stride = 1;
    for (int i = 3; i >= 0; --i) {
      const bool fits = shape[i] == 1 || shape[i] == expected[i];
      if (!fits)
        Fail(where, " expected attention_bias broadcastable to [", dims.batch, ", ", dims.num_heads, ", ",
             dims.sequence_length, ", ", total, "]; found ", ShapeText(tensor.shape));
      *strides[i] = shape[i] == 1 ? 0 : stride;
      stride *= shape[i];
    }
  }
};

// key_padding of any integer type as bytes, [batch][columns].
struct Padding {
  std::vector<uint8_t> bytes;
  int64_t columns = 0;

  Padding(const std::string& where, const Tensor& tensor, int64_t batch, int64_t total) {
    if (!tensor.present()) return;
    if (tensor.shape.size() != 2 || tensor.shape[0] != batch || tensor.shape[1] < total)
      Fail(where, " expected key_padding of shape [", batch, ", ", total, "] or wider; found ",
           ShapeText(tensor.shape));
    columns = tensor.shape[1];
    bytes.resize(tensor.size());
    switch (tensor.type) {
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
        Convert(tensor.data<uint8_t>());
        break;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
        Convert(tensor.data<int32_t>());
        break;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
        Convert(tensor.data<int64_t>());
        break;
      default:
        Fail(where, " expected key_padding of bool, int32 or int64; found element type ", tensor.type);
    }
  }

  const uint8_t* row(int64_t b) const { return bytes.empty() && columns == 0 ? nullptr : bytes.data() + b * columns; }

 private:
  template <typename T>
  void Convert(const T* values) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = values[i] != 0;
  }
};

// One batch row: whose cache it is, locked for the whole step.
struct Row {
  std::shared_ptr<Sequence> sequence;
  int64_t past = 0, run = 0;
  std::shared_ptr<LayerCache> cache;
  std::unique_lock<std::mutex> lock;
};

// Runs task(0 .. count - 1) on onnxruntime's own threads; the first exception comes out here.
template <typename Task>
void ParallelFor(OrtKernelContext* context, size_t count, const Task& task) {
  struct State {
    const Task& task;
    std::mutex mutex;
    std::exception_ptr error;
  } state{task, {}, nullptr};
  const auto run = [](void* user, size_t index) {
    auto* shared = static_cast<State*>(user);
    try {
      shared->task(index);
    } catch (...) {
      std::lock_guard<std::mutex> lock(shared->mutex);
      if (shared->error == nullptr) shared->error = std::current_exception();
    }
  };
  if (count > 0) Check(Api().KernelContext_ParallelFor(context, run, count, 0, &state));
  if (state.error != nullptr) std::rethrow_exception(state.error);
}

class SdpaKernel {
 public:
  // On the CPU, or on the device of the session's provider.
  SdpaKernel(const OrtKernelInfo* info, bool on_device)
      : attributes_(ReadSdpaAttributes(info)), session_(ConfigEntry(info, "kvfuse.session")) {
    execution_ = FindExecution(Logger(info));
    if (!on_device) return;
    if (execution_ == nullptr) Fail(attributes_.where, " expected a session of ", kProviderName, "; found another");
    device_ = &execution_->caches();
  }

  void Compute(OrtKernelContext* context) {
    const profile::Timed timed(profile::kCall);
    Tensor inputs[kInputCount];
    for (size_t i = 0; i < kInputCount; ++i) inputs[i] = Input(context, i);
    const Dims dims = CheckDims(inputs);
    CacheFormat format = attributes_.format;
    format.kv_num_heads = static_cast<int>(dims.kv_num_heads);
    format.key.dim = static_cast<int>(dims.head_dim);
    format.value.dim = static_cast<int>(dims.value_head_dim);

    // All is checked before anything changes: a refused run leaves its sequences as they were.
    const bool slotted = inputs[kSlots].present();
    std::vector<Row> rows = slotted ? SlotRows(inputs[kSlots], dims, format) : PrivateRows(dims, format);
    int64_t total = 0;
    for (const Row& row : rows) total = std::max(total, row.past + dims.sequence_length);
    const FloatView query(inputs[kQuery]), key(inputs[kKey]), value(inputs[kValue]);
    const FloatView bias_values(inputs[kBias]), head_sink(inputs[kHeadSink]);
    const Bias bias(attributes_.where, inputs[kBias], bias_values.data, dims, total);
    const Padding padding(attributes_.where, inputs[kPadding], dims.batch, total);
    if (slotted) StartRows(rows, format);

    std::vector<int64_t> shape = inputs[kQuery].shape;
    shape[3] = dims.value_head_dim;
    const Tensor output = Output(context, 0, shape);
    const bool half = inputs[kQuery].type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    std::vector<float> wide(half ? output.size() : 0);

    StepArgs step;
    step.output = half ? wide.data() : output.data<float>();
    step.num_heads = static_cast<int>(dims.num_heads);
    step.sequence_length = dims.sequence_length;
    step.scale = attributes_.scale.value_or(1.0f / std::sqrt(static_cast<float>(dims.head_dim)));
    step.softcap = attributes_.softcap;
    step.causal = attributes_.causal;
    step.head_sink = head_sink.data;
    step.guard = attributes_.guard;

    Prepare(rows, key.data, value.data, dims);
    Run(context, rows, step, query.data, bias, padding, dims);
    if (half)  // a quantized value may pass the largest half, which its original did not
      for (size_t i = 0; i < wide.size(); ++i) output.data<uint16_t>()[i] = FloatToHalfSaturated(wide[i]);
    if (attributes_.guard && !warned_) Warn(context, rows);
    for (Row& row : rows) row.cache->Commit();
    for (Row& row : rows) row.lock.unlock();  // all of them first: a sequence's mutex comes before its layers'
    for (Row& row : rows) row.sequence->FinishLayer(row.run);
  }

 private:
  // Once for each layer and session: a format that does not do for this layer's keys.
  void Warn(OrtKernelContext* context, const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      const double error = row.cache->key_error();
      if (!(error > kKeyErrorLimit) || warned_.exchange(true)) continue;
      const int bits = attributes_.format.key.bits;
      std::ostringstream text;
      text.precision(2);
      text << attributes_.where << " expected low-bit keys to change the attention's output by at most "
           << kKeyErrorLimit << " of its size; found " << error << " with " << bits << "-bit keys: "
           << (bits < 8 ? "rewrite this layer with key_bits 8 (kvfuse rewrite --format auto does)"
                        : "rewrite this layer with key_bits 16");
      Warnings::Global().Add(session_, text.str());
      LogWarning(context, text.str());
    }
  }

  Dims CheckDims(const Tensor* inputs) const {
    const std::string& where = attributes_.where;
    const char* names[] = {"query", "key", "value"};
    for (size_t i : {kQuery, kKey, kValue})
      if (inputs[i].shape.size() != 4)
        Fail(where, " expected ", names[i], " of 4 dimensions; found ", ShapeText(inputs[i].shape));
    const int head_axis = attributes_.axis == 2 ? 1 : 2, token_axis = attributes_.axis;
    const auto& q = inputs[kQuery].shape;
    const auto& k = inputs[kKey].shape;
    const auto& v = inputs[kValue].shape;
    const Dims d{q[0], q[head_axis], k[head_axis], q[token_axis], q[3], v[3]};
    if (k[0] != d.batch || k[token_axis] != d.sequence_length || k[3] != d.head_dim)
      Fail(where, " expected key with the batch, tokens and head size of query ", ShapeText(q), " (sequence axis ",
           attributes_.axis, "); found ", ShapeText(k));
    if (v[0] != k[0] || v[token_axis] != k[token_axis] || v[head_axis] != k[head_axis])
      Fail(where, " expected value with the batch, heads and tokens of key ", ShapeText(k), "; found ", ShapeText(v));
    if (d.num_heads < 1 || d.kv_num_heads < 1 || d.num_heads % d.kv_num_heads != 0)
      Fail(where, " expected num_heads to be a multiple of kv_num_heads; found ", d.num_heads, " and ", d.kv_num_heads);
    if (d.head_dim < 1 || d.value_head_dim < 1 || d.head_dim > 65536 || d.value_head_dim > 65536)
      Fail(where, " expected head sizes from 1 to 65536; found ", d.head_dim, " and ", d.value_head_dim);
    const Tensor& sink = inputs[kHeadSink];
    if (sink.present() && (sink.shape.size() != 1 || sink.shape[0] != d.num_heads))
      Fail(where, " expected head_sink of shape [", d.num_heads, "]; found ", ShapeText(sink.shape));
    return d;
  }

  std::vector<Row> SlotRows(const Tensor& slots, const Dims& dims, const CacheFormat& format) const {
    if (slots.shape != std::vector<int64_t>{dims.batch, 3})
      Fail(attributes_.where, " expected slots of shape [", dims.batch, ", 3]; found ", ShapeText(slots.shape));
    std::vector<Row> rows(dims.batch);
    for (int64_t b = 0; b < dims.batch; ++b) {
      const int64_t* slot = slots.data<int64_t>() + 3 * b;
      rows[b].sequence = SequenceTable::Global().Find(slot[0]);
      rows[b].past = slot[1];
      rows[b].run = slot[2];
      for (int64_t earlier = 0; earlier < b; ++earlier)
        if (rows[earlier].sequence == rows[b].sequence)
          Fail(attributes_.where, " expected each sequence in one row of the batch; found sequence ", slot[0],
               " twice");
      rows[b].sequence->CheckLayer(rows[b].run, attributes_.layer, format, rows[b].past + dims.sequence_length,
                                   dims.sequence_length, *device_);
    }
    return rows;
  }

  // Without slots the node owns its state: one sequence per batch row, which only ever goes on.
  std::vector<Row> PrivateRows(const Dims& dims, const CacheFormat& format) {
    std::lock_guard<std::mutex> lock(private_mutex_);
    const auto live = [](const std::shared_ptr<Sequence>& sequence) { return sequence->Length() > 0; };
    if (std::any_of(private_.begin(), private_.end(), live) && static_cast<int64_t>(private_.size()) != dims.batch)
      Fail(attributes_.where, " expected a batch of ", private_.size(), ", as the state under way has; found ",
           dims.batch);
    private_.resize(dims.batch);
    std::vector<Row> rows(dims.batch);
    for (int64_t b = 0; b < dims.batch; ++b) {
      if (private_[b] == nullptr) {
        private_[b] = std::make_shared<Sequence>(0);
        if (execution_ != nullptr) execution_->Own(private_[b]);
      }
      rows[b].sequence = private_[b];
      rows[b].run = private_[b]->run();
      private_[b]->CheckLayer(rows[b].run, attributes_.layer, format, 0, 0, *device_);
      rows[b].cache = private_[b]->StartLayer(rows[b].run, attributes_.layer, format, *device_);
      rows[b].lock = std::unique_lock<std::mutex>(rows[b].cache->mutex);
      rows[b].past = rows[b].cache->length();
    }
    return rows;
  }

  void StartRows(std::vector<Row>& rows, const CacheFormat& format) const {
    for (Row& row : rows) row.cache = row.sequence->StartLayer(row.run, attributes_.layer, format, *device_);
    // Locked in the order of handles, so that two batches with the same sequences cannot wait for each other.
    std::vector<Row*> order;
    for (Row& row : rows) order.push_back(&row);
    std::sort(order.begin(), order.end(),
              [](const Row* a, const Row* b) { return a->sequence->id() < b->sequence->id(); });
    for (Row* row : order) {
      row->lock = std::unique_lock<std::mutex>(row->cache->mutex);
      row->sequence->CheckRun(row->run, attributes_.layer);
      if (row->cache->length() != row->past)
        Fail(attributes_.where, " expected to be at the past length ", row->past, " of this run; found ",
             row->cache->length(), " (two nodes with one layer key?)");
    }
  }

  void Prepare(std::vector<Row>& rows, const float* key, const float* value, const Dims& d) const {
    const Strides ks(attributes_.axis, d.kv_num_heads, d.sequence_length, d.head_dim);
    const Strides vs(attributes_.axis, d.kv_num_heads, d.sequence_length, d.value_head_dim);
    for (int64_t b = 0; b < d.batch; ++b)
      rows[b].cache->Prepare(rows[b].past, d.sequence_length, {key + b * ks.batch, ks.head, ks.token},
                             {value + b * vs.batch, vs.head, vs.token});
  }

  // The same phase of all rows at once.
  void Run(OrtKernelContext* context, const std::vector<Row>& rows, const StepArgs& shared, const float* query,
           const Bias& bias, const Padding& padding, const Dims& d) const {
    const Strides qs(attributes_.axis, d.num_heads, d.sequence_length, d.head_dim);
    const Strides os(attributes_.axis, d.num_heads, d.sequence_length, d.value_head_dim);
    std::vector<std::vector<Phase>> work;
    for (int64_t b = 0; b < d.batch; ++b) {
      StepArgs step = shared;
      step.query = {query + b * qs.batch, qs.head, qs.token};
      step.output += b * os.batch;
      step.output_head_stride = os.head;
      step.output_token_stride = os.token;
      step.padding = padding.row(b);
      if (bias.data != nullptr) step.bias = bias.data + b * bias.batch;
      step.bias_head_stride = bias.head;
      step.bias_query_stride = bias.query;
      step.bias_key_stride = bias.key;
      work.push_back(rows[b].cache->Step(step));
    }
    size_t phases = 0;
    for (const auto& row : work) phases = std::max(phases, row.size());
    for (size_t phase = 0; phase < phases; ++phase) {
      std::vector<std::pair<size_t, size_t>> pieces;  // row, piece
      bool small = work.size() == 1;
      for (size_t b = 0; b < work.size(); ++b) small &= phase < work[b].size() && work[b][phase].small;
      if (small) {
        for (size_t i = 0; i < work[0][phase].pieces; ++i) work[0][phase].run(i);
        continue;
      }
      for (size_t b = 0; b < work.size(); ++b)
        for (size_t i = 0; phase < work[b].size() && i < work[b][phase].pieces; ++i) pieces.emplace_back(b, i);
      ParallelFor(context, pieces.size(), [&](size_t i) { work[pieces[i].first][phase].run(pieces[i].second); });
    }
  }

  const SdpaAttributes attributes_;
  const std::string session_;  // the token of kvfuse's own sessions
  std::atomic<bool> warned_{false};
  std::shared_ptr<Execution> execution_;  // null when the session has no provider of ours
  CacheDevice* device_ = &CpuDevice();
  std::mutex private_mutex_;
  std::vector<std::shared_ptr<Sequence>> private_;
};

// The output is the query's shape with the value's head size.
OrtStatus* InferShapes(const OrtCustomOp*, OrtShapeInferContext* context) {
  return Guard([&] {
    size_t count = 0;
    Check(Api().ShapeInferContext_GetInputCount(context, &count));
    if (count < 3) return;
    std::vector<int64_t> shape(4, -1);
    std::vector<std::string> symbols(4);
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    for (size_t input : {kQuery, kValue}) {
      OrtTensorTypeAndShapeInfo* info = nullptr;  // borrowed
      Check(Api().ShapeInferContext_GetInputTypeShape(context, input, &info));
      size_t rank = 0;
      Check(Api().GetDimensionsCount(info, &rank));
      if (input == kQuery) Check(Api().GetTensorElementType(info, &type));
      if (rank != 4) continue;  // not known here
      std::vector<int64_t> dims(4);
      std::vector<const char*> names(4, nullptr);
      Check(Api().GetDimensions(info, dims.data(), 4));
      Check(Api().GetSymbolicDimensions(info, names.data(), 4));
      for (size_t i = input == kQuery ? 0 : 3; i < (input == kQuery ? 3u : 4u); ++i) {
        shape[i] = dims[i];
        symbols[i] = names[i] == nullptr ? "" : names[i];
      }
    }
    if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED) return;
    SetOutputShape(context, 0, type, shape, symbols);
  });
}

template <ONNXTensorElementDataType kType, bool kOnDevice>
OrtCustomOp MakeOp() {
  OrtCustomOp op = EmptyCustomOp();
  if (kOnDevice) op.GetExecutionProviderType = [](const OrtCustomOp*) { return kProviderName; };
  op.GetName = [](const OrtCustomOp*) { return "QuantizedKvSdpa"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kInputCount; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) {
    if (index == kSlots) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    return index == kPadding ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED : kType;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
    return index <= kValue ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) { return kType; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
    return Guard([&] { *kernel = new SdpaKernel(info, kOnDevice); });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    return Guard([&] { static_cast<SdpaKernel*>(kernel)->Compute(context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<SdpaKernel*>(kernel); };
  op.InferOutputShapeFn = InferShapes;
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> SdpaOps() {
  static const OrtCustomOp ops[] = {
      MakeOp<ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, false>(), MakeOp<ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, false>(),
      MakeOp<ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, true>(), MakeOp<ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, true>()};
  std::vector<const OrtCustomOp*> pointers;
  for (const OrtCustomOp& op : ops) pointers.push_back(&op);
  return pointers;
}

}  // namespace kvfuse
