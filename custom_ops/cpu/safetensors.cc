#include "safetensors.h"

#include <algorithm>
#include <cstring>

#include "json.h"

namespace kvfuse {
namespace {

constexpr char kChecksum[] = "checksum";
constexpr size_t kDigits = 16;

// FNV-1a, 64 bits: each step is a bijection of the state, so no change of one byte goes unnoticed. It guards
// against damage, not against forgery. (http://www.isthe.com/chongo/tech/comp/fnv)
class Checksum {
 public:
  void Add(std::string_view bytes) {
    for (const char c : bytes) state_ = (state_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  }

  std::string Hex() const {
    std::string text(kDigits, '0');
    for (size_t i = 0; i < kDigits; ++i) text[i] = "0123456789abcdef"[(state_ >> (60 - 4 * i)) & 15];
    return text;
  }

 private:
  uint64_t state_ = 0xcbf29ce484222325ull;
};

int64_t ElementSize(const std::string& dtype) {
  if (dtype == "U8") return 1;
  if (dtype == "F16") return 2;
  if (dtype == "F32") return 4;
  Fail("[state] expected tensors of dtype U8, F16 or F32; found '", Shown(dtype), "'");
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? "," : "") + std::to_string(shape[i]);
  return text + "]";
}

// The bytes of a tensor, or -1 when they are more than `most`.
int64_t ByteSize(const std::string& dtype, const std::vector<int64_t>& shape, int64_t most) {
  int64_t size = ElementSize(dtype);
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  for (const int64_t dim : shape) {
    if (size > most / dim) return -1;
    size *= dim;
  }
  return size;
}

}  // namespace

void SafetensorsWriter::Add(const std::string& name, const char* dtype, std::vector<int64_t> shape, const void* data,
                            size_t size) {
  entries_.push_back({name, dtype, std::move(shape), data_.size(), data_.size() + size});
  if (size > 0) data_.append(static_cast<const char*>(data), size);
}

std::string SafetensorsWriter::Finish() const {
  std::string header = "{\"__metadata__\":{\"";
  header += std::string(kChecksum) + "\":\"";
  const size_t checksum_at = header.size();
  header += std::string(kDigits, '0') + '"';
  for (const auto& [key, value] : metadata_) header += ',' + JsonString(key) + ':' + JsonString(value);
  header += '}';
  for (const Entry& entry : entries_)
    header += ',' + JsonString(entry.name) + ":{\"dtype\":\"" + entry.dtype + "\",\"shape\":" + ShapeText(entry.shape) +
              ",\"data_offsets\":[" + std::to_string(entry.begin) + ',' + std::to_string(entry.end) + "]}";
  header += '}';
  header.append((8 - header.size() % 8) % 8, ' ');  // tensors start aligned
  Checksum checksum;
  checksum.Add(header);
  checksum.Add(data_);
  header.replace(checksum_at, kDigits, checksum.Hex());
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i));
  return bytes + header + data_;
}

SafetensorsReader::SafetensorsReader(std::string_view bytes) {
  if (bytes.size() < 8) Fail("[state] expected at least 8 bytes; found ", bytes.size());
  uint64_t header_size = 0;
  for (int i = 0; i < 8; ++i) header_size |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  if (header_size > bytes.size() - 8)
    Fail("[state] expected a header of at most ", bytes.size() - 8, " bytes; found ", header_size);
  const std::string_view header = bytes.substr(8, header_size), data = bytes.substr(8 + header_size);

  if (!IsUtf8(header)) Fail("[state] expected a header in UTF-8; found other bytes");
  JsonCursor json(header);
  size_t checksum_end = 0;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  json.Sequence('{', '}', [&] {
    const std::string name = json.String();
    json.Expect(':');
    if (name == "__metadata__") {
      json.Sequence('{', '}', [&] {
        const std::string key = json.String();
        json.Expect(':');
        const std::string value = json.String();
        if (key == kChecksum) checksum_end = json.position() - 1;
        if (!metadata_.emplace(key, value).second)
          Fail("[state] expected each field once; found '", Shown(key), "' twice");
      });
      return;
    }
    StoredTensor tensor;
    int64_t begin = -1, end = -1;
    json.Sequence('{', '}', [&] {
      const std::string key = json.String();
      json.Expect(':');
      std::vector<int64_t> numbers;
      if (key == "dtype") {
        tensor.dtype = json.String();
      } else if (key == "shape" || key == "data_offsets") {
        json.Sequence('[', ']', [&] { numbers.push_back(json.Integer()); });
        if (key == "shape")
          tensor.shape = numbers;
        else if (numbers.size() == 2)
          begin = numbers[0], end = numbers[1];
      } else {
        Fail("[state] expected dtype, shape and data_offsets of tensor '", Shown(name), "'; found '", Shown(key), "'");
      }
    });
    const auto size = static_cast<int64_t>(data.size());
    if (begin < 0 || end < begin || end > size || ByteSize(tensor.dtype, tensor.shape, size) != end - begin)
      Fail("[state] expected the offsets of tensor '", Shown(name),
           "' to lie in the data and to fit its shape; found [", begin, ", ", end, ")");
    tensor.bytes = data.substr(begin, end - begin);
    ranges.emplace_back(begin, end);
    if (!tensors_.emplace(name, tensor).second)
      Fail("[state] expected each tensor once; found '", Shown(name), "' twice");
  });
  json.End();

  std::sort(ranges.begin(), ranges.end());
  int64_t filled = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != filled) Fail("[state] expected tensors side by side; found one at ", begin, " after ", filled);
    filled = end;
  }
  if (filled != static_cast<int64_t>(data.size()))
    Fail("[state] expected ", filled, " bytes of tensors; found ", data.size());

  const std::string& stored = Metadata(kChecksum);
  if (stored.size() != kDigits || header.substr(checksum_end - kDigits, kDigits) != stored)
    Fail("[state] expected a checksum of ", kDigits, " digits; found '", Shown(stored), "'");
  Checksum checksum;
  checksum.Add(header.substr(0, checksum_end - kDigits));
  checksum.Add(std::string(kDigits, '0'));
  checksum.Add(header.substr(checksum_end));
  checksum.Add(data);
  if (checksum.Hex() != stored)
    Fail("[state] expected the checksum ", stored, " that the state was stored with; found ", checksum.Hex());
}

const std::string& SafetensorsReader::Metadata(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) Fail("[state] expected the field '", key, "'; found none");
  return found->second;
}

int64_t SafetensorsReader::Number(const std::string& key, int64_t least) const {
  const std::string& text = Metadata(key);
  const bool negative = text == "-1";
  const bool digits = !text.empty() && text.size() <= 13 &&
                      std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  int64_t value = -1;
  if (digits) {
    value = 0;
    for (const char c : text) value = value * 10 + (c - '0');
  }
  if ((!digits && !negative) || value < least || value > (int64_t{1} << 40))
    Fail("[state] expected '", key, "' from ", least, " to 2^40; found '", Shown(text), "'");
  return value;
}

const StoredTensor& SafetensorsReader::Tensor(const std::string& name, const char* dtype,
                                              const std::vector<int64_t>& shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) Fail("[state] expected the tensor '", name, "'; found none");
  const StoredTensor& tensor = found->second;
  if (tensor.dtype != dtype || tensor.shape != shape)
    Fail("[state] expected the tensor '", name, "' of ", dtype, ' ', ShapeText(shape), "; found ", tensor.dtype, ' ',
         ShapeText(tensor.shape));
  return tensor;
}

}  // namespace kvfuse
