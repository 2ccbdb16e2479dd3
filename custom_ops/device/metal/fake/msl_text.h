// What the fake reads in the text of a Metal library: its kernels, their arguments and function constants.
#pragma once

#include <map>
#include <set>
#include <string>

namespace kvfuse::fake_metal {

struct FunctionConstant {
  std::string name;
  std::string type;
};

struct MslKernel {
  std::map<int, int> buffers;  // n of each [[buffer(n)]], and the bytes that its offset has to be a multiple of
  std::set<int> constants;     // indices of the function constants that it reaches through the functions it calls
};

struct MslText {
  std::map<std::string, MslKernel> kernels;
  std::map<int, FunctionConstant> constants;  // by index
  std::string error;                          // of a compiler, where the text is obviously wrong; else empty
};

MslText ReadMsl(const std::string& source);

}  // namespace kvfuse::fake_metal
