// The only file that decides which kernels run.
#include <cstdlib>
#include <cstring>

#include "kvfuse/error.h"
#include "kvfuse/kernels.h"

namespace kvfuse {
namespace {

constexpr KernelTable kReference = {"reference",         reference::Rotate,  reference::QuantizeRow,
                                    reference::StoreRow, reference::LoadRow, reference::Attend};

const KernelTable& Choose() {
  const char* wanted = std::getenv("KVFUSE_KERNEL");
  if (wanted != nullptr && *wanted != '\0' && std::strcmp(wanted, kReference.name) != 0)
    Fail("[KVFUSE_KERNEL] expected one of: reference; found '", wanted, "'");
  return kReference;
}

}  // namespace

const KernelTable& Kernels() {
  static const KernelTable& table = Choose();
  return table;
}

std::vector<KernelChoice> KernelChoices() { return {{kReference.name, ""}}; }

}  // namespace kvfuse
