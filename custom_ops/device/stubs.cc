// Sentences that stand in for the back ends that this library is built without.
#include "device/backends.h"

namespace kvfuse {
#if !defined(KVFUSE_METAL)
std::string metal_backend::Reason() { return "built without Metal: not macOS"; }
std::unique_ptr<Device> metal_backend::Make() { return nullptr; }
#endif
#if !defined(KVFUSE_CUDA)
std::string cuda_backend::Reason() {
  return "built without CUDA: nvcc or an NVIDIA driver was missing when kvfuse was built";
}
std::unique_ptr<Device> cuda_backend::Make() { return nullptr; }
#endif
#if !defined(KVFUSE_EMULATED)
std::string emulated_backend::Reason() { return "built without the emulated device: not Linux"; }
std::unique_ptr<Device> emulated_backend::Make() { return nullptr; }
#endif
}  // namespace kvfuse
