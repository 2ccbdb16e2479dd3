// The few things that every file here needs of onnxruntime. Only members of the C API that the declared
// minimum version has are called, because the struct of an older runtime is shorter.
#pragma once

#define ORT_API_MANUAL_INIT
#include <onnxruntime_c_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvfuse {

constexpr int kMinimumApi = 24;  // onnxruntime 1.24: config entries reach a kernel
constexpr const char* kDomain = "kvfuse";

// Asks the runtime for min(its version, ours). Returns a status when it is too old, else null; then Api() works.
OrtStatus* NegotiateApi(const OrtApiBase* base);
const OrtApi& Api();

// Throws Error with the status' text.
void Check(OrtStatus* status);
// Runs `body`, and turns any exception into a status.
template <typename Body>
OrtStatus* Guard(Body body);
OrtStatus* StatusFromException(OrtErrorCode code);

struct Tensor {
  OrtValue* value = nullptr;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<int64_t> shape;

  bool present() const { return value != nullptr; }
  int64_t size() const;
  template <typename T>
  T* data() const {
    return static_cast<T*>(Data());
  }
  void* Data() const;
};

std::string ShapeText(const std::vector<int64_t>& shape);

// A missing optional input, whether the list is short or the name empty, gives a Tensor that is not present.
Tensor Input(OrtKernelContext* context, size_t index);
Tensor Output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape);

int64_t IntAttribute(const OrtKernelInfo* info, const std::string& where, const char* name, int64_t absent);
std::optional<float> FloatAttribute(const OrtKernelInfo* info, const std::string& where, const char* name);
std::string StringAttribute(const OrtKernelInfo* info, const std::string& where, const char* name,
                            const std::string& absent);
std::string NodeName(const OrtKernelInfo* info);
// Through the run's own logger, which prints what its severity lets through.
void LogWarning(OrtKernelContext* context, const std::string& sentence);
// The session's logger: one address for all kernels and providers of a session.
const OrtLogger* Logger(const OrtKernelInfo* info);
// A session config entry; empty when not set.
std::string ConfigEntry(const OrtKernelInfo* info, const char* key);

// Names for output dimensions that are not known when the model is loaded. Each is new, since onnxruntime
// takes equal names for equal sizes.
void SetOutputShape(OrtShapeInferContext* context, size_t index, ONNXTensorElementDataType type,
                    std::vector<int64_t> shape, std::vector<std::string> symbols);

// An OrtCustomOp whose optional members are null and whose version fits the runtime.
OrtCustomOp EmptyCustomOp();

const OrtCustomOp* BeginOp();
// One for each element type and provider: the CPU's and ours.
std::vector<const OrtCustomOp*> SdpaOps();
// All of them, in one domain that every session shares and none releases.
OrtCustomOpDomain* Domain();

template <typename Body>
OrtStatus* Guard(Body body) {
  try {
    body();
    return nullptr;
  } catch (...) {
    return StatusFromException(ORT_INVALID_ARGUMENT);
  }
}

}  // namespace kvfuse
