// kvfuse::KvCacheBegin: says which sequence each batch row is, and how long it is, before any layer runs.
#include <algorithm>
#include <memory>
#include <set>
#include <sstream>

#include "api.h"
#include "execution.h"
#include "kvfuse/error.h"
#include "kvfuse/sequence.h"

namespace kvfuse {
namespace {

constexpr const char* kWhere = "[KvCacheBegin]";

class BeginKernel {
 public:
  explicit BeginKernel(const OrtKernelInfo* info) : rows_(std::make_shared<std::vector<int64_t>>()) {
    fingerprint_ = StringAttribute(info, kWhere, "fingerprint", "");
    std::istringstream layers(StringAttribute(info, kWhere, "layers", ""));
    for (std::string layer; std::getline(layers, layer);) layers_.push_back(layer);
    std::set<std::string> unique;
    for (const std::string& layer : layers_)
      if (!unique.insert(layer).second) Fail(kWhere, " expected every layer key once; found '", layer, "' twice");
    const int64_t uniform = IntAttribute(info, kWhere, "uniform", 1);
    if (uniform != 0 && uniform != 1) Fail(kWhere, " expected uniform to be 0 or 1; found ", uniform);
    uniform_ = uniform == 1;
    const std::string token = ConfigEntry(info, "kvfuse.session");
    if (!token.empty()) SequenceTable::Global().Publish(token, rows_);
    execution_ = FindExecution(Logger(info));
  }

  ~BeginKernel() {
    for (int64_t id : *rows_) {
      try {
        SequenceTable::Global().Destroy(id);
      } catch (const Error&) {  // a caller destroyed the session's own sequence by its handle
      }
    }
  }

  void Compute(OrtKernelContext* context) {
    const Tensor handles = Input(context, 0), lengths = Input(context, 1), like = Input(context, 2);
    if (like.shape.empty()) Fail(kWhere, " expected 'like' with a batch dimension; found a scalar");
    const int64_t batch = like.shape[0];
    const std::vector<int64_t> wanted = PerRow(handles, batch, "kv_sequence");
    const std::vector<int64_t> pasts = PerRow(lengths, batch, "kv_past_length");
    const std::vector<std::shared_ptr<Sequence>> sequences = Resolve(wanted, pasts);

    std::set<int64_t> seen;
    for (const auto& sequence : sequences)
      if (!seen.insert(sequence->id()).second)
        Fail(kWhere, " expected each sequence in one row of the batch; found sequence ", sequence->id(), " twice");
    for (int64_t b = 0; b < batch; ++b) sequences[b]->CheckBegin(fingerprint_, layers_, pasts[b]);
    if (uniform_) CheckUniform(sequences, pasts);

    int64_t* slots = Output(context, 0, {batch, 3}).data<int64_t>();
    const Tensor past_length = Output(context, 1, {}), past_lengths = Output(context, 2, {batch});
    for (int64_t b = 0; b < batch; ++b) {
      const auto [past, run] = sequences[b]->Begin(fingerprint_, layers_, pasts[b]);
      slots[3 * b] = sequences[b]->id();
      slots[3 * b + 1] = past;
      slots[3 * b + 2] = run;
      if (past_lengths.present()) past_lengths.data<int64_t>()[b] = past;
    }
    if (past_length.present()) *past_length.data<int64_t>() = batch == 0 ? 0 : slots[1];
  }

 private:
  static std::vector<int64_t> PerRow(const Tensor& tensor, int64_t batch, const char* name) {
    const int64_t count = tensor.size();
    if (tensor.shape.size() > 1 || (count != 1 && count != batch))
      Fail(kWhere, " expected ", name, " of shape [1] or [", batch, "]; found ", ShapeText(tensor.shape));
    const int64_t* data = tensor.data<int64_t>();
    std::vector<int64_t> rows(batch);
    for (int64_t b = 0; b < batch; ++b) rows[b] = data[count == 1 ? 0 : b];
    return rows;
  }

  // Handle 0 is the session's own sequence of that row.
  std::vector<std::shared_ptr<Sequence>> Resolve(const std::vector<int64_t>& wanted,
                                                 const std::vector<int64_t>& pasts) {
    SequenceTable& table = SequenceTable::Global();
    std::lock_guard<std::mutex> lock(table.published_mutex());
    CheckBatch(wanted, pasts);
    std::vector<std::shared_ptr<Sequence>> sequences;
    for (size_t b = 0; b < wanted.size(); ++b) {
      if (wanted[b] != 0) {
        sequences.push_back(table.Find(wanted[b]));
        continue;
      }
      table.Grow(*rows_, b + 1);
      sequences.push_back(table.Find((*rows_)[b]));
      if (execution_ != nullptr) execution_->Own(sequences.back());
    }
    return sequences;
  }

  // A conversation of the session's own rows goes on with the batch it has. Starting it again may change that.
  void CheckBatch(const std::vector<int64_t>& wanted, const std::vector<int64_t>& pasts) {
    if (std::any_of(wanted.begin(), wanted.end(), [](int64_t handle) { return handle != 0; })) return;
    SequenceTable& table = SequenceTable::Global();
    const bool restart = std::all_of(pasts.begin(), pasts.end(), [](int64_t past) { return past == 0; });
    size_t live = 0;
    for (size_t b = 0; b < rows_->size(); ++b)
      if (table.Find((*rows_)[b])->Length() > 0) live = b + 1;
    if (restart) {
      for (size_t b = wanted.size(); b < live; ++b) table.Find((*rows_)[b])->Truncate(0);
    } else if (live != 0 && live != wanted.size()) {
      Fail(kWhere, " expected a batch of ", live,
           ", as the sequences under way have (kv_past_length = 0 starts again); found ", wanted.size());
    }
  }

  // A graph that computes positions from the scalar past length cannot serve rows of different lengths.
  static void CheckUniform(const std::vector<std::shared_ptr<Sequence>>& sequences, const std::vector<int64_t>& pasts) {
    for (size_t b = 0; b < sequences.size(); ++b) {
      const auto past = [&](size_t row) { return pasts[row] < 0 ? sequences[row]->Length() : pasts[row]; };
      if (past(b) != past(0))
        Fail(kWhere, " expected equal past lengths in all rows, since this graph computes positions from one; found ",
             past(0), " in row 0 and ", past(b), " in row ", b);
    }
  }

  std::shared_ptr<std::vector<int64_t>> rows_;  // handles of the session's own sequences
  std::shared_ptr<Execution> execution_;        // null when the session has no provider of ours
  std::string fingerprint_;
  std::vector<std::string> layers_;
  bool uniform_ = true;
};

OrtStatus* InferShapes(const OrtCustomOp*, OrtShapeInferContext* context) {
  return Guard([&] {
    SetOutputShape(context, 0, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, {-1, 3}, {});
    SetOutputShape(context, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, {}, {});
    SetOutputShape(context, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, {-1}, {});
  });
}

OrtCustomOp MakeOp() {
  OrtCustomOp op = EmptyCustomOp();
  op.GetName = [](const OrtCustomOp*) { return "KvCacheBegin"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 3; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) {
    return index < 2 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 3; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t index) {
    return index == 0 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
    return Guard([&] { *kernel = new BeginKernel(info); });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    return Guard([&] { static_cast<BeginKernel*>(kernel)->Compute(context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<BeginKernel*>(kernel); };
  op.InferOutputShapeFn = InferShapes;
  return op;
}

}  // namespace

const OrtCustomOp* BeginOp() {
  static const OrtCustomOp op = MakeOp();
  return &op;
}

}  // namespace kvfuse
