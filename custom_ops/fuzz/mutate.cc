#include "mutate.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kvfuse/error.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

namespace fuzz {
namespace {

using kvfuse::SafetensorsReader;

constexpr char kChecksumField[] = "\"checksum\":\"";
constexpr size_t kDigits = 16;

std::string MutateBytes(std::string_view input, size_t most) {
  std::string bytes(input);
  bytes.resize(std::max(most, input.size()));
  bytes.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(bytes.data()), input.size(), bytes.size()));
  return bytes;
}

// FNV-1a over the header with zeros for its checksum, and the data; see safetensors.cc.
void FixChecksum(std::string& header, std::string_view data) {
  const size_t field = header.find(kChecksumField);
  if (field == std::string::npos || field + sizeof kChecksumField - 1 + kDigits > header.size()) return;
  const size_t at = field + sizeof kChecksumField - 1;
  header.replace(at, kDigits, std::string(kDigits, '0'));
  uint64_t state = 0xcbf29ce484222325ull;
  for (const std::string_view part : {std::string_view(header), data})
    for (const char c : part) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  for (size_t i = 0; i < kDigits; ++i) header[at + i] = "0123456789abcdef"[(state >> (60 - 4 * i)) & 15];
}

std::string Join(std::string header, std::string_view data) {
  FixChecksum(header, data);
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i));
  return bytes.append(header).append(data);
}

// Replaces one run of digits by a number that sits at some edge.
std::string MutateNumber(std::string header, std::mt19937& random) {
  std::vector<std::pair<size_t, size_t>> numbers;
  for (size_t i = 0; i < header.size();) {
    size_t end = i;
    while (end < header.size() && header[end] >= '0' && header[end] <= '9') ++end;
    if (end > i) numbers.emplace_back(i, end - i);
    i = std::max(end, i + 1);
  }
  if (numbers.empty()) return header;
  const auto [at, count] = numbers[random() % numbers.size()];
  static const char* const kEdges[] = {"0",  "1",  "2",   "3",   "4",     "8",     "15",         "16",
                                       "17", "31", "32",  "33",  "63",    "64",    "65",         "127",
                                       "-1", "96", "128", "256", "65535", "65536", "2147483648", "1099511627776",
                                       "",   "7"};
  std::string number = kEdges[random() % (sizeof kEdges / sizeof *kEdges)];
  if (random() % 3 == 0 && count < 10)
    number = std::to_string(std::stoll(header.substr(at, count)) + static_cast<int>(random() % 5) - 2);
  return header.replace(at, count, number);
}

// A layer's fields, some changed, and tensors of exactly the sizes that they claim: what only the meaning can refuse.
class Rebuilder {
 public:
  Rebuilder(const SafetensorsReader& in, std::string_view data, size_t most, std::mt19937& random)
      : in_(in), data_(data), most_(most), random_(random) {}

  std::string Rebuild() {
    for (const auto& [key, value] : in_.metadata())
      if (key != "checksum") out_.SetMetadata(key, value);
    int64_t length = in_.Number("length");
    if (random_() % 3 == 0) length = std::max<int64_t>(0, Change(length));
    out_.SetMetadata("length", std::to_string(length));
    for (int64_t i = 0; i < in_.Number("layers"); ++i) Layer(std::to_string(i) + ".", length);
    return too_large_ ? std::string() : out_.Finish();
  }

 private:
  int64_t Change(int64_t value) {
    static const int64_t kEdges[] = {0, 1, -1, 2, 3, 4, 8, 16, 17, 31, 32, 64, 65, 128, 192, 65536, int64_t{1} << 40};
    switch (random_() % 4) {
      case 0:
        return value + 1;
      case 1:
        return value - 1;
      case 2:
        return value + static_cast<int64_t>(random_() % 129) - 64;
      default:
        return kEdges[random_() % (sizeof kEdges / sizeof *kEdges)];
    }
  }

  int64_t Field(const std::string& name, unsigned one_in = 12) {
    int64_t value = in_.Number(name, -1);
    if (random_() % one_in == 0) value = Change(value);
    out_.SetMetadata(name, std::to_string(value));
    return value;
  }

  void Tensor(const std::string& name, const char* dtype, std::vector<int64_t> shape) {
    uint64_t size = dtype[0] == 'U' ? 1 : dtype[1] == '1' ? 2 : 4;
    for (int64_t& dim : shape) {
      dim = std::max<int64_t>(0, dim);
      size = dim > (1 << 20) || size > (1 << 20) ? uint64_t{1} << 40 : size * dim;
      if (dim == 0) size = 0;
    }
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) size = 0;
    if (too_large_ = too_large_ || total_ + size > most_; too_large_) return;
    total_ += size;
    std::string bytes(size, '\0');
    for (size_t i = 0; i < size && !data_.empty(); ++i) bytes[i] = data_[(offset_ + i) % data_.size()];
    offset_ += size;
    out_.Add(name, dtype, std::move(shape), bytes.data(), bytes.size());
  }

  void Layer(const std::string& p, int64_t length) {
    const int64_t heads = Field(p + "kv_num_heads"), key_dim = Field(p + "head_dim");
    const int64_t value_dim = Field(p + "value_head_dim"), key_bits = Field(p + "key_bits");
    const int64_t value_bits = Field(p + "value_bits"), group = Field(p + "group_size");
    const int64_t center = Field(p + "key_center"), block = std::max<int64_t>(1, Field(p + "block"));
    const int64_t sinks = std::min(Field(p + "n_sink"), length);
    for (const char* name : {"full_codes", "rotation", "n_recent", "window_left"}) Field(p + name);
    const int64_t begin = Field(p + "begin", 6), end = Field(p + "encoded_end", 6);
    const int64_t exact = length - Field(p + "exact_begin", 6);
    for (const bool key : {true, false}) {
      const std::string side = p + (key ? "key" : "value");
      const int64_t dim = key ? key_dim : value_dim, bits = key ? key_bits : value_bits;
      const int64_t groups = bits == 16 ? 0 : group <= 0 ? 1 : (dim + group - 1) / group;
      Tensor(side + "_codes", "U8", {heads, end - begin, (dim % 65537 * (bits % 65537) + 7) / 8});
      Tensor(side + "_scales", "F32", {heads, end - begin, groups});
      if (key && center == 1 && bits != 16)
        Tensor(p + "key_means", "F16", {heads, (end + block - 1) / block - begin / block, dim});
      Tensor(p + (key ? "exact_key" : "exact_value"), "F32", {heads, exact, dim});
      Tensor(p + (key ? "sink_key" : "sink_value"), "F32", {heads, sinks, dim});
    }
  }

  const SafetensorsReader& in_;
  std::string_view data_;
  size_t most_, offset_ = 0;
  uint64_t total_ = 0;
  bool too_large_ = false;
  std::mt19937& random_;
  kvfuse::SafetensorsWriter out_;
};

}  // namespace

std::string Mutate(std::string_view input, size_t most, unsigned seed) {
  std::mt19937 random(seed);
  const unsigned kind = random() % 8;
  uint64_t header_size = 0;
  if (input.size() >= 8) std::memcpy(&header_size, input.data(), 8);
  if (kind == 0 || input.size() < 8 || header_size > input.size() - 8) return MutateBytes(input, most);
  std::string header(input.substr(8, header_size));
  const std::string_view data = input.substr(8 + header_size);
  std::string result;
  try {
    if (kind == 1)
      result = Join(MutateBytes(header, header.size() + 64), data);
    else if (kind == 2)
      result = Join(header, MutateBytes(data, data.size() + (random() % 4 == 0 ? 8 : 0)));
    else if (kind == 3)
      result = Join(MutateNumber(header, random), data);
    else
      result = Rebuilder(SafetensorsReader(input), data, most, random).Rebuild();
  } catch (const kvfuse::Error&) {  // the input was no state: only bytes can be changed
  }
  return result.empty() || result.size() > most ? MutateBytes(input, most) : result;
}

}  // namespace fuzz
