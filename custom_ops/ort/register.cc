// The entry point of a custom-op library.
#include "api.h"

#include "kvfuse/error.h"
#include "kvfuse/export.h"

namespace kvfuse {

OrtCustomOpDomain* Domain() {
  static OrtCustomOpDomain* const domain = [] {
    OrtCustomOpDomain* made = nullptr;
    Check(Api().CreateCustomOpDomain(kDomain, &made));
    Check(Api().CustomOpDomain_Add(made, BeginOp()));
    for (const OrtCustomOp* op : SdpaOps()) Check(Api().CustomOpDomain_Add(made, op));
    return made;
  }();
  return domain;
}

}  // namespace kvfuse

extern "C" KVFUSE_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  if (OrtStatus* status = kvfuse::NegotiateApi(base)) return status;
  return kvfuse::Guard([&] { kvfuse::Check(kvfuse::Api().AddCustomOpDomain(options, kvfuse::Domain())); });
}
