// The safetensors container: 8 bytes of header length, a JSON header, the tensors' bytes. Reading trusts nothing.
// https://github.com/huggingface/safetensors (format description)
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace kvfuse {

struct StoredTensor {
  std::string dtype;           // "U8", "F16", "F32"
  std::vector<int64_t> shape;  // of the bytes below
  std::string_view bytes;
};

class SafetensorsWriter {
 public:
  void SetMetadata(const std::string& key, const std::string& value) { metadata_[key] = value; }
  void Add(const std::string& name, const char* dtype, std::vector<int64_t> shape, const void* data, size_t size);
  // The whole container, under a checksum that SafetensorsReader checks.
  std::string Finish() const;

 private:
  struct Entry {
    std::string name, dtype;
    std::vector<int64_t> shape;
    size_t begin, end;
  };

  std::map<std::string, std::string> metadata_;
  std::vector<Entry> entries_;
  std::string data_;
};

// Views into the given bytes, which must outlive it. Throws Error, naming the field, for anything that is not a
// complete container whose tensors fill its data exactly and whose checksum is right.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(std::string_view bytes);

  const std::string& Metadata(const std::string& key) const;
  // From 0 to 2^40, as decimal digits.
  int64_t Number(const std::string& key, int64_t least = 0) const;
  // Throws Error when it is missing or not of this type and shape.
  const StoredTensor& Tensor(const std::string& name, const char* dtype, const std::vector<int64_t>& shape) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  size_t tensor_count() const { return tensors_.size(); }

 private:
  std::map<std::string, std::string> metadata_;
  std::map<std::string, StoredTensor> tensors_;
};

}  // namespace kvfuse
