// Reference-counted bytes: what forked sequences share, and what the memory limit counts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvfuse/export.h"

namespace kvfuse {

// A fixed number of bytes, zero when made. Copies share the bytes; only a sole owner may write.
class KVFUSE_EXPORT Page {
 public:
  Page() = default;
  Page(const Page& other) : block_(other.block_) {
    if (block_ != nullptr) block_->references.fetch_add(1, std::memory_order_relaxed);
  }
  Page(Page&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  Page& operator=(Page other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Page() { Release(); }

  // Throws std::bad_alloc, or MemoryError at the process' limit.
  static Page Make(int64_t bytes);

  explicit operator bool() const { return block_ != nullptr; }
  int64_t size() const { return block_->size; }
  uint8_t* data() const { return reinterpret_cast<uint8_t*>(block_ + 1); }
  // True for the sole owner; what earlier owners read is then over.
  bool unique() const { return block_->references.load(std::memory_order_acquire) == 1; }

  // Of all pages in this process; the limit is -1 for none.
  static int64_t BytesInUse();
  static void SetLimit(int64_t bytes);

 private:
  struct alignas(64) Block {
    std::atomic<int64_t> references;
    int64_t size;
  };

  void Release();

  Block* block_ = nullptr;
};

// Consecutive pages, numbered from begin() on; those before have been freed, some within may be missing.
class PageRun {
 public:
  int64_t begin() const { return begin_; }
  int64_t end() const { return begin_ + static_cast<int64_t>(pages_.size()); }
  const Page& operator[](int64_t number) const { return pages_[number - begin_]; }

  // Makes page `number` exist and be ours alone (copied when it is shared), and returns its bytes.
  uint8_t* Writable(int64_t number, int64_t bytes);
  void FreeBefore(int64_t number);
  void FreeFrom(int64_t number);
  int64_t nbytes() const;

  // The pages as plain pointers, begin() first; null where missing.
  template <typename T>
  void FillPointers(std::vector<const T*>& pointers) const {
    pointers.resize(pages_.size());
    for (std::size_t i = 0; i < pages_.size(); ++i)
      pointers[i] = pages_[i] ? reinterpret_cast<const T*>(pages_[i].data()) : nullptr;
  }

 private:
  std::vector<Page> pages_;
  int64_t begin_ = 0;
};

}  // namespace kvfuse
