// Whole files, in and out.
#pragma once

#include <string>

#include "kvfuse/error.h"

namespace kvfuse {

class FileError : public Error {
 public:
  using Error::Error;
};

// Throws FileError.
std::string ReadFile(const std::string& path);
// Replaces the file in one step, or throws FileError and leaves it as it was.
void WriteFile(const std::string& path, const std::string& bytes);

}  // namespace kvfuse
