#include "device/check.h"

#include <algorithm>
#include <string>

#include "kvfuse/error.h"

namespace kvfuse {

void CheckSize(const char* where, int64_t bytes) {
  if (bytes < 0) Fail("[", where, "] expected a buffer size of at least 0; found ", bytes);
}

void CheckRange(const char* where, const DeviceBuffer& buffer, int64_t offset, int64_t bytes) {
  if (offset < 0 || bytes < 0 || offset > buffer.size() || bytes > buffer.size() - offset)
    Fail("[", where, "] expected a range inside the buffer's ", buffer.size(), " bytes; found ", bytes, " bytes at ",
         offset);
}

void CheckDispatch(const char* where, const Dispatch& dispatch, const std::vector<ArgumentShape>& arguments,
                   uint32_t max_threads, const std::vector<ConstantShape>& constants) {
  const std::string at = std::string("[") + where + "] expected ", of = " of kernel " + dispatch.kernel + "; found ";
  if (dispatch.threads == 0 || dispatch.threads > max_threads || dispatch.threads % 32 != 0)
    Fail(at, "a multiple of 32, at most ", max_threads, ", as the threads of a group", of, dispatch.threads);
  for (const uint32_t groups : dispatch.groups)
    if (groups == 0) Fail(at, "at least one group each way", of, groups);
  if (dispatch.arguments.size() != arguments.size())
    Fail(at, arguments.size(), " arguments", of, dispatch.arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const ArgumentShape& shape = arguments[i];
    const Dispatch::Argument& given = dispatch.arguments[i];
    const std::string argument = " for argument '" + std::string(shape.name) + "'" + of;
    if (shape.reference != (given.buffer == nullptr))
      Fail(at, shape.reference ? "bytes" : "a buffer", argument, given.buffer == nullptr ? "bytes" : "a buffer");
    if (shape.reference && (given.byte_count != static_cast<int64_t>(shape.bytes) || shape.bytes > kMaxInlineArgument))
      Fail(at, shape.bytes, " bytes (at most ", kMaxInlineArgument, ")", argument, given.byte_count);
    if (!shape.reference && (given.offset < 0 || given.offset > given.buffer->size() || given.offset % 4 != 0))
      Fail(at, "an offset in the buffer, a multiple of 4,", argument, given.offset);
  }
  for (const auto& given : dispatch.constants) {
    const auto shape = std::find_if(constants.begin(), constants.end(),
                                    [&](const ConstantShape& constant) { return constant.index == given.first; });
    if (shape == constants.end()) Fail(at, "the index of a function constant", of, given.first);
    const auto& values = shape->values;
    if (!values.empty() && std::find(values.begin(), values.end(), given.second) == values.end())
      Fail(at, "a value that function constant ", shape->name, " may have", of, given.second);
  }
}

}  // namespace kvfuse
