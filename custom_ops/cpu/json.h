// Just enough JSON for a safetensors header: objects, arrays, strings, non-negative integers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kvfuse/error.h"

namespace kvfuse {

// Reads one token after the other; every deviation throws Error.
class JsonCursor {
 public:
  explicit JsonCursor(std::string_view text) : text_(text) {}

  size_t position() const { return at_; }

  void Expect(char wanted) {
    SkipSpace();
    if (at_ >= text_.size() || text_[at_] != wanted)
      Fail("[state] expected '", wanted, "' in the header; found ", At());
    ++at_;
  }

  bool Accept(char wanted) {
    SkipSpace();
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  // Calls item() for each element, between `open` and `close`.
  template <typename Item>
  void Sequence(char open, char close, Item item) {
    Expect(open);
    if (Accept(close)) return;
    do item();
    while (Accept(','));
    Expect(close);
  }

  std::string String() {
    Expect('"');
    std::string value;
    for (;;) {
      const char c = Next();
      if (c == '"') return value;
      if (static_cast<unsigned char>(c) < 0x20) Fail("[state] expected no control character in a string; found one");
      value += c == '\\' ? Escaped() : std::string(1, c);
    }
  }

  int64_t Integer() {
    SkipSpace();
    const size_t begin = at_;
    int64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      if (value > (int64_t{1} << 58)) Fail("[state] expected a number below 2^62 in the header; found a larger one");
      value = value * 10 + (text_[at_++] - '0');
    }
    if (at_ == begin) Fail("[state] expected a number in the header; found ", At());
    return value;
  }

  void End() {
    SkipSpace();
    if (at_ != text_.size()) Fail("[state] expected the end of the header; found ", At());
  }

 private:
  void SkipSpace() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t'))
      ++at_;
  }

  std::string At() const {
    return at_ < text_.size() ? "byte " + std::to_string(static_cast<unsigned char>(text_[at_])) + " at position " +
                                    std::to_string(at_)
                              : "its end";
  }

  char Next() {
    if (at_ >= text_.size()) Fail("[state] expected a closed string in the header; found its end");
    return text_[at_++];
  }

  // Control characters are all that the writer escapes with \u.
  std::string Escaped() {
    const char c = Next();
    if (c == '"' || c == '\\' || c == '/') return std::string(1, c);
    if (c != 'u') Fail("[state] expected a known escape in a string; found '\\", c, "'");
    int code = 0;
    for (int i = 0; i < 4; ++i) {
      const char digit = Next();
      const int value = digit >= '0' && digit <= '9'   ? digit - '0'
                        : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                                                       : 99;
      if (value > 15) Fail("[state] expected four hexadecimal digits after '\\u'; found another character");
      code = code * 16 + value;
    }
    if (code == 0 || code >= 0x80) Fail("[state] expected an escape from \\u0001 to \\u007f; found another");
    return std::string(1, static_cast<char>(code));
  }

  std::string_view text_;
  size_t at_ = 0;
};

// Well-formed UTF-8, by the table of RFC 3629: what a caller in any language can print.
inline bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) { return k < text.size() ? static_cast<unsigned char>(text[k]) : 0; };
    const unsigned char first = byte(i);
    const size_t length = first < 0x80 ? 1 : first >= 0xc2 && first < 0xe0 ? 2 : first >= 0xe0 && first < 0xf0 ? 3 : 4;
    if (length == 4 && (first < 0xf0 || first > 0xf4)) return false;
    for (size_t k = i + 1; k < i + length; ++k)
      if ((byte(k) & 0xc0) != 0x80) return false;
    const unsigned char second = byte(i + 1);
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) || (first == 0xf0 && second < 0x90) ||
        (first == 0xf4 && second > 0x8f))
      return false;
    i += length;
  }
  return true;
}

// Text of unknown length for an error sentence: cut at a character, after some 80 bytes.
inline std::string Shown(const std::string& text) {
  constexpr size_t kMost = 80;
  if (text.size() <= kMost) return text;
  size_t end = kMost;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

inline std::string JsonString(const std::string& text) {
  static const char kHex[] = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      quoted += "\\u00";
      quoted += kHex[c >> 4];
      quoted += kHex[c & 15];
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

}  // namespace kvfuse
