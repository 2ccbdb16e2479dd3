#include "api.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>

#include "kvfuse/error.h"
#include "kvfuse/registration.h"

namespace kvfuse {
namespace {

const OrtApi* g_api = nullptr;
int g_api_version = 0;

// "1.24.4" -> 24; 0 when it is not such a text.
int MinorVersion(const char* text) {
  if (text == nullptr || std::strncmp(text, "1.", 2) != 0) return 0;
  return std::atoi(text + 2);
}

// Runs a getter of an optional attribute: absent is fine, any other failure (a wrong type) is not.
bool HasAttribute(OrtStatus* status, const std::string& where, const char* name) {
  if (status == nullptr) return true;
  const std::string message = Api().GetErrorMessage(status);
  Api().ReleaseStatus(status);
  if (message.find("No attribute with name") == std::string::npos)
    Fail(where, " expected attribute ", name, " of its declared type; found: ", message);
  return false;
}

}  // namespace

OrtStatus* NegotiateApi(const OrtApiBase* base) {
  const char* text = base->GetVersionString();
  const int runtime = MinorVersion(text);
  const int version = std::min<int>(ORT_API_VERSION, runtime);
  const OrtApi* api = version < kMinimumApi ? nullptr : base->GetApi(version);
  if (api == nullptr) {
    std::ostringstream message;
    message << "[kvfuse] expected onnxruntime 1." << kMinimumApi << " or newer; found " << (text ? text : "no version");
    const OrtApi* oldest = base->GetApi(1);
    return oldest == nullptr ? nullptr : oldest->CreateStatus(ORT_FAIL, message.str().c_str());
  }
  g_api = api;
  g_api_version = version;
  return nullptr;
}

const OrtApi& Api() { return *g_api; }
int NegotiatedApiVersion() { return g_api_version; }

void Check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = Api().GetErrorMessage(status);
  Api().ReleaseStatus(status);
  throw Error(message);
}

OrtStatus* StatusFromException(OrtErrorCode code) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return Api().CreateStatus(ORT_RUNTIME_EXCEPTION, "[kvfuse] expected enough memory for the cache; found none left");
  } catch (const MemoryError& error) {
    return Api().CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  } catch (const std::exception& error) {
    return Api().CreateStatus(code, error.what());
  } catch (...) {
    return Api().CreateStatus(ORT_RUNTIME_EXCEPTION, "[kvfuse] expected no foreign exception; found one");
  }
}

int64_t Tensor::size() const {
  int64_t count = 1;
  for (int64_t dim : shape) count *= dim;
  return count;
}

void* Tensor::Data() const {
  void* data = nullptr;
  Check(Api().GetTensorMutableData(value, &data));
  return data;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  text << ']';
  return text.str();
}

Tensor Input(OrtKernelContext* context, size_t index) {
  Tensor tensor;
  size_t count = 0;
  Check(Api().KernelContext_GetInputCount(context, &count));
  if (index >= count) return tensor;
  const OrtValue* value = nullptr;
  Check(Api().KernelContext_GetInput(context, index, &value));
  if (value == nullptr) return tensor;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  Check(Api().GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  OrtStatus* status = Api().GetTensorElementType(info, &tensor.type);
  if (status == nullptr) status = Api().GetDimensionsCount(info, &rank);
  tensor.shape.resize(rank);
  if (status == nullptr) status = Api().GetDimensions(info, tensor.shape.data(), rank);
  Api().ReleaseTensorTypeAndShapeInfo(info);
  Check(status);
  tensor.value = const_cast<OrtValue*>(value);
  return tensor;
}

Tensor Output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape) {
  Tensor tensor;
  size_t count = 0;
  Check(Api().KernelContext_GetOutputCount(context, &count));
  if (index >= count) return tensor;
  Check(Api().KernelContext_GetOutput(context, index, shape.data(), shape.size(), &tensor.value));
  tensor.shape = shape;
  return tensor;
}

int64_t IntAttribute(const OrtKernelInfo* info, const std::string& where, const char* name, int64_t absent) {
  int64_t value = 0;
  return HasAttribute(Api().KernelInfoGetAttribute_int64(info, name, &value), where, name) ? value : absent;
}

std::optional<float> FloatAttribute(const OrtKernelInfo* info, const std::string& where, const char* name) {
  float value = 0;
  if (!HasAttribute(Api().KernelInfoGetAttribute_float(info, name, &value), where, name)) return std::nullopt;
  return value;
}

std::string StringAttribute(const OrtKernelInfo* info, const std::string& where, const char* name,
                            const std::string& absent) {
  size_t size = 0;  // with the terminating zero
  if (!HasAttribute(Api().KernelInfoGetAttribute_string(info, name, nullptr, &size), where, name)) return absent;
  std::string value(size, '\0');
  Check(Api().KernelInfoGetAttribute_string(info, name, value.data(), &size));
  value.resize(size == 0 ? 0 : size - 1);
  return value;
}

std::string NodeName(const OrtKernelInfo* info) {
  size_t size = 0;
  Check(Api().KernelInfo_GetNodeName(info, nullptr, &size));
  std::string name(size, '\0');
  Check(Api().KernelInfo_GetNodeName(info, name.data(), &size));
  name.resize(size == 0 ? 0 : size - 1);
  return name;
}

void LogWarning(OrtKernelContext* context, const std::string& sentence) {
  const OrtLogger* logger = nullptr;
  Check(Api().KernelContext_GetLogger(context, &logger));
  Check(Api().Logger_LogMessage(logger, ORT_LOGGING_LEVEL_WARNING, sentence.c_str(), ORT_FILE, __LINE__, "kvfuse"));
}

const OrtLogger* Logger(const OrtKernelInfo* info) {
  const OrtLogger* logger = nullptr;
  Check(Api().KernelInfo_GetLogger(info, &logger));
  return logger;
}

std::string ConfigEntry(const OrtKernelInfo* info, const char* key) {
  OrtKeyValuePairs* entries = nullptr;
  Check(Api().KernelInfo_GetConfigEntries(info, &entries));
  const char* value = Api().GetKeyValue(entries, key);
  const std::string result = value == nullptr ? "" : value;
  Api().ReleaseKeyValuePairs(entries);
  return result;
}

void SetOutputShape(OrtShapeInferContext* context, size_t index, ONNXTensorElementDataType type,
                    std::vector<int64_t> shape, std::vector<std::string> symbols) {
  static std::atomic<int64_t> unknown{0};
  symbols.resize(shape.size());
  for (size_t i = 0; i < shape.size(); ++i)
    if (shape[i] < 0 && symbols[i].empty()) symbols[i] = "kvfuse_dim_" + std::to_string(unknown.fetch_add(1));
  std::vector<const char*> names;
  for (const std::string& symbol : symbols) names.push_back(symbol.c_str());
  OrtTensorTypeAndShapeInfo* info = nullptr;
  Check(Api().CreateTensorTypeAndShapeInfo(&info));
  OrtStatus* status = Api().SetTensorElementType(info, type);
  if (status == nullptr) status = Api().SetDimensions(info, shape.data(), shape.size());
  if (status == nullptr) status = Api().SetSymbolicDimensions(info, names.data(), names.size());
  if (status == nullptr) status = Api().ShapeInferContext_SetOutputTypeShape(context, index, info);
  Api().ReleaseTensorTypeAndShapeInfo(info);
  Check(status);
}

OrtCustomOp EmptyCustomOp() {
  OrtCustomOp op = {};
  op.version = static_cast<uint32_t>(NegotiatedApiVersion());
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  return op;
}

}  // namespace kvfuse
