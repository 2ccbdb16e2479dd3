// No parser: it knows words, brackets and the order of top-level definitions. That is enough to notice a missing
// include, a kernel that is not there, an argument that nobody binds and a function constant that nobody sets.
#include "device/metal/fake/msl_text.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <vector>

#include "device/metal/fake/objc_runtime.h"

namespace kvfuse::fake_metal {
namespace {

using Tokens = std::vector<std::string>;  // words, numbers, and single characters for all else

bool InWord(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

std::string WithoutComments(const std::string& source) {
  std::string text;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source.compare(i, 2, "//") == 0) {
      i = std::min(source.find('\n', i), source.size()) - 1;
    } else if (source.compare(i, 2, "/*") == 0) {
      const size_t end = std::min(source.find("*/", i + 2), source.size() - 2) + 2;
      text += std::string(static_cast<size_t>(std::count(&source[i], &source[end], '\n')), '\n') + ' ';
      i = end - 1;
    } else {
      text += source[i];
    }
  }
  return text;
}

// Takes the preprocessor's lines out of the tokens: `#define NAME NUMBER` goes to `named`, the first line that no
// compiler would accept to `error`; the rest is of no interest here.
struct Source {
  Tokens tokens;
  std::map<std::string, int> named;
  bool has_stdlib = false;
  std::string error;
};

void ReadDirective(const std::string& line, int number, Source& source) {
  Tokens words;
  for (size_t i = 0; i < line.size();) {
    size_t end = i + 1;
    if (InWord(line[i])) {
      while (end < line.size() && InWord(line[end])) ++end;
    }
    if (std::isspace(static_cast<unsigned char>(line[i])) == 0) words.push_back(line.substr(i, end - i));
    i = end;
  }
  if (words.size() < 2) return;
  const std::string at = "program_source:" + std::to_string(number) + ":1: ";
  const bool first = source.error.empty();
  if (first && words[1] == "error") source.error = at + "error:" + line.substr(line.find("error") + 5);
  if (first && words[1] == "include" && words.size() > 2 && words[2] == "\"") {
    source.error = at + "fatal error: " + line.substr(line.find('"')) + " file not found";
  }
  if (words[1] == "include" && words.size() > 3 && words[3] == "metal_stdlib") source.has_stdlib = true;
  if (words[1] == "define" && words.size() == 4 && std::isdigit(static_cast<unsigned char>(words[3][0])) != 0) {
    source.named[words[2]] = std::atoi(words[3].c_str());
  }
}

Source Tokenize(const std::string& text) {
  Source source;
  bool line_is_empty = true;
  int line = 1;
  for (size_t i = 0; i < text.size();) {
    size_t end = i + 1;
    if (text[i] == '\n') {
      ++line;
      line_is_empty = true;
    } else if (text[i] == '#' && line_is_empty) {
      end = i;
      do {
        end = std::min(text.find('\n', end + 1), text.size());
      } while (end < text.size() && text[end - 1] == '\\');
      ReadDirective(text.substr(i, end - i), line, source);
      line += static_cast<int>(std::count(&text[i], &text[end], '\n'));
    } else if (std::isspace(static_cast<unsigned char>(text[i])) == 0) {
      line_is_empty = false;
      if (InWord(text[i])) {
        while (end < text.size() && InWord(text[end])) ++end;
      }
      source.tokens.push_back(text.substr(i, end - i));
    }
    i = end;
  }
  return source;
}

// The index of the bracket that closes the one at `open`.
size_t Close(const Tokens& tokens, size_t open) {
  int depth = 0;
  for (size_t i = open; i < tokens.size(); ++i) {
    const std::string& token = tokens[i];
    if (token == "(" || token == "[" || token == "{") ++depth;
    if (token == ")" || token == "]" || token == "}") --depth;
    if (depth == 0) return i;
  }
  AbortWith("expected every bracket of the Metal text closed; found an open one");
}

// Of a buffer of `type`: the size of an element; of a struct of ints and floats, that of one of them.
int Alignment(const std::string& type) {
  const char last = type.empty() ? '0' : type.back();
  const int lanes = last == '2' ? 2 : last == '3' || last == '4' ? 4 : 1;
  const std::string element = lanes == 1 ? type : type.substr(0, type.size() - 1);
  if (element == "char" || element == "uchar" || element == "bool") return lanes;
  return lanes * (element == "short" || element == "ushort" || element == "half" ? 2 : 4);
}

class Reader {
 public:
  explicit Reader(const Source& source) : tokens_(source.tokens), named_(source.named) {
    ReadEnumerations();
    ReadDefinitions();
  }

  MslText Result() {
    MslText result;
    for (const auto& [name, constant] : constants_) result.constants[constant.first] = {name, constant.second};
    for (const auto& [name, parameters] : kernels_) {
      MslKernel& kernel = result.kernels[name];
      std::string type;
      for (size_t i = 1; i + 2 < parameters.size(); ++i) {
        if (parameters[i] == "*" || parameters[i] == "&") type = parameters[i - 1];
        if (parameters[i] == "buffer" && parameters[i + 1] == "(") {
          kernel.buffers[InBrackets(parameters, i + 1)] = Alignment(type);
        }
      }
      std::set<std::string> seen;
      Tokens todo = {name};
      while (!todo.empty()) {
        const std::string word = todo.back();
        todo.pop_back();
        if (!seen.insert(word).second) continue;
        const auto constant = constants_.find(word);
        if (constant != constants_.end()) kernel.constants.insert(constant->second.first);
        const auto uses = uses_.find(word);
        if (uses != uses_.end()) todo.insert(todo.end(), uses->second.begin(), uses->second.end());
      }
    }
    return result;
  }

 private:
  // A number, or what an enumerator or a macro stands for; a scope before it does not matter.
  int Value(const std::string& word) const {
    if (std::isdigit(static_cast<unsigned char>(word[0])) != 0) return std::atoi(word.c_str());
    const auto found = named_.find(word);
    if (found == named_.end()) AbortWith("expected a number for " + word + " in the Metal text; found none");
    return found->second;
  }

  int InBrackets(const Tokens& tokens, size_t open) const { return Value(tokens[Close(tokens, open) - 1]); }

  void ReadEnumerations() {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i] != "enum") continue;
      while (tokens_[i] != "{" && tokens_[i] != ";") ++i;
      if (tokens_[i] == ";") continue;
      const size_t end = Close(tokens_, i);
      int next = 0;
      for (++i; i < end; ++i) {
        const std::string name = tokens_[i++];
        if (tokens_[i] == "=") {
          next = Value(tokens_[i + 1]);
          i += 2;
        }
        if (i < end && tokens_[i] != ",") AbortWith("expected enumerator " + name + " to be one number; found more");
        named_[name] = next++;
      }
    }
  }

  void ReadDefinitions() {
    size_t start = 0;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i] == "}") {
        start = i + 1;  // of a namespace
      } else if (tokens_[i] == ";") {
        ReadDeclaration({tokens_.begin() + start, tokens_.begin() + i});
        start = i + 1;
      } else if (tokens_[i] == "(" || tokens_[i] == "[") {
        i = Close(tokens_, i);
      } else if (tokens_[i] == "{") {
        const Tokens header(tokens_.begin() + start, tokens_.begin() + i);
        if (header.empty() || header[0] == "namespace") {
          start = i + 1;
          continue;
        }
        const size_t end = Close(tokens_, i);
        ReadFunction(header, {tokens_.begin() + i, tokens_.begin() + end});
        i = end;
        if (i + 1 < tokens_.size() && tokens_[i + 1] != ";") start = i + 1;
      }
    }
  }

  // `constant int name [[function_constant(3)]]`, or `constant int name = …`, which stands for what it is made of.
  void ReadDeclaration(const Tokens& words) {
    auto type = std::find(words.begin(), words.end(), "constant");
    if (type == words.end()) return;
    while (++type != words.end() && (*type == "constexpr" || *type == "const")) continue;
    if (words.end() - type < 3) return;
    const std::string name = type[1];
    const auto attribute = std::find(type, words.end(), "function_constant");
    if (attribute == words.end()) {
      uses_[name].insert(words.begin(), words.end());
      return;
    }
    const int index = InBrackets(words, static_cast<size_t>(attribute - words.begin()) + 1);
    for (const auto& [other, constant] : constants_) {
      if (constant.first == index) {
        AbortWith("expected one function constant of an index; found " + other + " and " + name);
      }
    }
    constants_[name] = {index, *type};
  }

  // A function; or a struct, whose methods may use what functions use.
  void ReadFunction(const Tokens& header, const Tokens& body) {
    const auto kernel = std::find(header.begin(), header.end(), "kernel");
    const auto bracket = std::find(kernel == header.end() ? header.begin() : kernel, header.end(), "(");
    const auto structure = std::find(header.begin(), header.end(), "struct");
    std::string name;
    if (bracket != header.end() && bracket != header.begin()) {
      name = bracket[-1];
      if (kernel != header.end()) kernels_[name] = {bracket, header.end()};
    } else if (header.end() - structure > 1) {
      name = structure[1];
    }
    uses_[name].insert(body.begin(), body.end());  // overloads share a name: what one of them uses, all use
  }

  const Tokens tokens_;
  std::map<std::string, int> named_;
  std::map<std::string, std::pair<int, std::string>> constants_;  // by name: index, type
  std::map<std::string, Tokens> kernels_;                         // by name: parameters
  std::map<std::string, std::set<std::string>> uses_;             // what a function or constant is made of
};

}  // namespace

MslText ReadMsl(const std::string& source) {
  Source read = Tokenize(WithoutComments(source));
  const bool needs_stdlib = std::find(read.tokens.begin(), read.tokens.end(), "metal") != read.tokens.end();
  if (read.error.empty() && needs_stdlib && !read.has_stdlib) {
    read.error = "program_source:1:1: error: expected namespace name";  // `using namespace metal`
  }
  if (!read.error.empty()) {
    MslText result;
    result.error = read.error;
    return result;
  }
  return Reader(read).Result();
}

}  // namespace kvfuse::fake_metal
