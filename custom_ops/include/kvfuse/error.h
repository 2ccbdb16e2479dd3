// The one exception type of the library: its text is a sentence, `[where] expected …; found …`.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "kvfuse/export.h"

namespace kvfuse {

class KVFUSE_EXPORT Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Memory, of the machine or of a limit, has run out.
class KVFUSE_EXPORT MemoryError : public Error {
 public:
  using Error::Error;
};

// Throws Error with all arguments streamed into one sentence.
template <typename... Parts>
[[noreturn]] void Fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

template <typename... Parts>
[[noreturn]] void FailMemory(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw MemoryError(text.str());
}

}  // namespace kvfuse
