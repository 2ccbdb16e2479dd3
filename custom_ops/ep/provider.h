// OrtEp: the part of a session that runs on our devices. It claims kvfuse::QuantizedKvSdpa, nothing else.
#pragma once

#include <memory>

#include "api.h"
#include "execution.h"

namespace kvfuse {

struct Provider : OrtEp {
  explicit Provider(std::shared_ptr<Execution> chosen);

  const std::shared_ptr<Execution> execution;
};

}  // namespace kvfuse
