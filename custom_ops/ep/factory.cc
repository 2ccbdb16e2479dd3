// The entry points of a plugin execution provider, and its factory.
#include <cctype>
#include <memory>
#include <string>

#include "api.h"
#include "kvfuse/error.h"
#include "kvfuse/export.h"
#include "kvfuse/registration.h"
#include "provider.h"

namespace kvfuse {
namespace {

constexpr const char* kWhere = "[KvfuseExecutionProvider]";
constexpr const char* kVirtualSuffix = ".virtual";

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The provider options, which onnxruntime hands over as session entries "ep.<lower-case provider name>.<option>".
struct Options {
  std::string device, variant;

  explicit Options(const OrtSessionOptions* session) {
    std::string prefix = std::string("ep.") + kProviderName + ".";
    for (char& letter : prefix) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    OrtKeyValuePairs* entries = nullptr;
    Check(Api().GetSessionOptionsConfigEntries(session, &entries));
    const std::unique_ptr<OrtKeyValuePairs, void (*)(OrtKeyValuePairs*)> release(
        entries, [](OrtKeyValuePairs* pairs) { Api().ReleaseKeyValuePairs(pairs); });
    const char *const *keys = nullptr, *const *values = nullptr;
    size_t count = 0;
    Api().GetKeyValuePairs(entries, &keys, &values, &count);
    for (size_t i = 0; i < count; ++i)
      if (std::string(keys[i]).compare(0, prefix.size(), prefix) == 0) Set(keys[i] + prefix.size(), values[i]);
  }

  void Set(const std::string& name, const char* value) {
    if (name != "device" && name != "variant")
      Fail(kWhere, " expected the options 'device' and 'variant'; found '", name, "'");
    (name == "device" ? device : variant) = value;
  }
};

struct Factory : OrtEpFactory {
  explicit Factory(const std::string& registered_name);
  ~Factory() {
    if (virtual_device != nullptr) Api().GetEpApi()->ReleaseHardwareDevice(virtual_device);
  }

  void GetDevices(const OrtHardwareDevice* const* devices, size_t count, OrtEpDevice** ep_devices, size_t limit,
                  size_t* ep_count);

  const bool is_virtual;  // registered as "<name>.virtual": a device that needs no hardware, the emulator
  OrtHardwareDevice* virtual_device = nullptr;
};

OrtHardwareDevice* MakeVirtualDevice() {
  OrtKeyValuePairs* facts = nullptr;
  Api().CreateKeyValuePairs(&facts);
  Api().AddKeyValuePair(facts, "is_virtual", "1");
  OrtHardwareDevice* device = nullptr;
  OrtStatus* status = Api().GetEpApi()->CreateHardwareDevice(OrtHardwareDeviceType_GPU, 0, 0, "kvfuse", facts, &device);
  Api().ReleaseKeyValuePairs(facts);
  Check(status);
  return device;
}

// The hardware device that stands for ours: the GPU on macOS; elsewhere the CPU, since onnxruntime finds a GPU only
// through files that containers lack, and whether one is there is asked of the driver when a session is made.
const OrtHardwareDevice* FindHardware(const OrtHardwareDevice* const* devices, size_t count) {
#if defined(__APPLE__)
  constexpr OrtHardwareDeviceType kOrder[] = {OrtHardwareDeviceType_GPU, OrtHardwareDeviceType_CPU};
#else
  constexpr OrtHardwareDeviceType kOrder[] = {OrtHardwareDeviceType_CPU};
#endif
  for (OrtHardwareDeviceType type : kOrder)
    for (size_t i = 0; i < count; ++i)
      if (Api().HardwareDevice_Type(devices[i]) == type) return devices[i];
  return nullptr;
}

void Factory::GetDevices(const OrtHardwareDevice* const* devices, size_t count, OrtEpDevice** ep_devices, size_t limit,
                         size_t* ep_count) {
  *ep_count = 0;
  if (limit == 0) return;
  if (is_virtual && virtual_device == nullptr) virtual_device = MakeVirtualDevice();
  const OrtHardwareDevice* hardware = is_virtual ? virtual_device : FindHardware(devices, count);
  if (hardware == nullptr) return;
  // No memory of its own is declared: tensors stay in the CPU's, and nothing is copied between providers.
  Check(Api().GetEpApi()->CreateEpDevice(this, hardware, nullptr, nullptr, ep_devices));
  *ep_count = 1;
}

OrtStatus* ORT_API_CALL CreateEp(OrtEpFactory* self, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*,
                                 size_t, const OrtSessionOptions* options, const OrtLogger* logger,
                                 OrtEp** ep) noexcept {
  return Guard([&] {
    *ep = nullptr;
    const bool emulate = static_cast<Factory*>(self)->is_virtual;
    const Options chosen(options);
    auto execution = std::make_shared<Execution>(chosen.device, chosen.variant, emulate);
    Publish(logger, execution);
    *ep = new Provider(std::move(execution));
  });
}

// onnxruntime calls most of these without asking whether they are there.
Factory::Factory(const std::string& registered_name)
    : OrtEpFactory{}, is_virtual(EndsWith(registered_name, kVirtualSuffix)) {
  ort_version_supported = static_cast<uint32_t>(NegotiatedApiVersion());
  GetName = [](const OrtEpFactory*) noexcept -> const char* { return kProviderName; };
  GetVendor = [](const OrtEpFactory*) noexcept -> const char* { return "kvfuse"; };
  GetVendorId = [](const OrtEpFactory*) noexcept -> uint32_t { return 0; };
  GetVersion = [](const OrtEpFactory*) noexcept -> const char* { return KVFUSE_VERSION; };
  GetSupportedDevices = [](OrtEpFactory* self, const OrtHardwareDevice* const* devices, size_t count,
                           OrtEpDevice** ep_devices, size_t limit, size_t* ep_count) noexcept {
    return Guard([&] { static_cast<Factory*>(self)->GetDevices(devices, count, ep_devices, limit, ep_count); });
  };
  OrtEpFactory::CreateEp = kvfuse::CreateEp;
  ReleaseEp = [](OrtEpFactory*, OrtEp* ep) noexcept { delete static_cast<Provider*>(ep); };
  CreateAllocator = [](OrtEpFactory*, const OrtMemoryInfo*, const OrtKeyValuePairs*,
                       OrtAllocator** allocator) noexcept -> OrtStatus* {
    *allocator = nullptr;
    return nullptr;
  };
  ReleaseAllocator = [](OrtEpFactory*, OrtAllocator*) noexcept {};
  CreateDataTransfer = [](OrtEpFactory*, OrtDataTransferImpl** transfer) noexcept -> OrtStatus* {
    *transfer = nullptr;
    return nullptr;
  };
  IsStreamAware = [](const OrtEpFactory*) noexcept { return false; };
  GetNumCustomOpDomains = [](OrtEpFactory*, size_t* count) noexcept -> OrtStatus* {
    *count = 1;
    return nullptr;
  };
  GetCustomOpDomains = [](OrtEpFactory*, OrtCustomOpDomain** domains, size_t count) noexcept {
    return Guard([&] {
      if (count > 0) domains[0] = Domain();
    });
  };
}

}  // namespace
}  // namespace kvfuse

extern "C" KVFUSE_EXPORT OrtStatus* CreateEpFactories(const char* registered_name, const OrtApiBase* base,
                                                      const OrtLogger*, OrtEpFactory** factories, size_t limit,
                                                      size_t* count) {
  *count = 0;
  if (OrtStatus* status = kvfuse::NegotiateApi(base)) return status;
  return kvfuse::Guard([&] {
    if (limit < 1) kvfuse::Fail(kvfuse::kWhere, " expected room for one factory; found none");
    factories[0] = new kvfuse::Factory(registered_name == nullptr ? "" : registered_name);
    *count = 1;
  });
}

extern "C" KVFUSE_EXPORT OrtStatus* ReleaseEpFactory(OrtEpFactory* factory) {
  delete static_cast<kvfuse::Factory*>(factory);
  return nullptr;
}
