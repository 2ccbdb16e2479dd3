// The entry point of a custom-op library.
#include "api.h"

#include "kvfuse/error.h"
#include "kvfuse/export.h"

extern "C" KVFUSE_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  if (OrtStatus* status = kvfuse::NegotiateApi(base)) return status;
  return kvfuse::Guard([&] {
    // Ops and domain are shared by all sessions; onnxruntime copies neither and releases neither.
    static OrtCustomOpDomain* const domain = [] {
      OrtCustomOpDomain* made = nullptr;
      kvfuse::Check(kvfuse::Api().CreateCustomOpDomain(kvfuse::kDomain, &made));
      kvfuse::Check(kvfuse::Api().CustomOpDomain_Add(made, kvfuse::BeginOp()));
      for (auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16})
        kvfuse::Check(kvfuse::Api().CustomOpDomain_Add(made, kvfuse::SdpaOp(type)));
      return made;
    }();
    kvfuse::Check(kvfuse::Api().AddCustomOpDomain(options, domain));
  });
}
