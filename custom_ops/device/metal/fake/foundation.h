// Strings and errors, as far as the fake's Metal needs them.
#pragma once

#include <string>

#include "device/metal/fake/objc_runtime.h"

namespace kvfuse::fake_metal {

class String : public Object {
 public:
  explicit String(std::string text) : Object("NSString"), text(std::move(text)) {}
  const std::string text;
};

class ErrorObject : public Object {
 public:
  ErrorObject(std::string words, long code) : Object("NSError"), words(std::move(words)), code(code) {}
  const std::string words;
  const long code;
};

}  // namespace kvfuse::fake_metal
