#include "provider.h"

#include <cstring>
#include <utility>
#include <vector>

#include "kvfuse/registration.h"

namespace kvfuse {
namespace {

constexpr const char* kRewind = "kvcache_rewind";  // what onnxruntime-genai sends: the new length, as text

OrtStatus* ORT_API_CALL GetCapability(OrtEp*, const OrtGraph* graph, OrtEpGraphSupportInfo* support) noexcept {
  return Guard([&] {
    size_t count = 0;
    Check(Api().Graph_GetNumNodes(graph, &count));
    std::vector<const OrtNode*> nodes(count);
    Check(Api().Graph_GetNodes(graph, nodes.data(), count));
    for (const OrtNode* node : nodes) {
      const char *domain = nullptr, *type = nullptr;
      Check(Api().Node_GetDomain(node, &domain));
      Check(Api().Node_GetOperatorType(node, &type));
      if (std::strcmp(domain, kDomain) == 0 && std::strcmp(type, "QuantizedKvSdpa") == 0)
        Check(Api().GetEpApi()->EpGraphSupportInfo_AddSingleNode(support, node));
    }
  });
}

// Options of other providers come here as well, and are theirs.
OrtStatus* ORT_API_CALL SetDynamicOptions(OrtEp* self, const char* const* keys, const char* const* values,
                                          size_t count) noexcept {
  return Guard([&] {
    for (size_t i = 0; i < count; ++i)
      if (std::strcmp(keys[i], kRewind) == 0) static_cast<Provider*>(self)->execution->Rewind(values[i]);
  });
}

}  // namespace

Provider::Provider(std::shared_ptr<Execution> chosen) : OrtEp{}, execution(std::move(chosen)) {
  ort_version_supported = static_cast<uint32_t>(NegotiatedApiVersion());
  OrtEp::GetName = [](const OrtEp*) noexcept -> const char* { return kProviderName; };
  OrtEp::GetCapability = kvfuse::GetCapability;
  OrtEp::SetDynamicOptions = kvfuse::SetDynamicOptions;
}

}  // namespace kvfuse
