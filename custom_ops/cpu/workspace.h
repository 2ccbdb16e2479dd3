// Scratch memory of one thread, kept between calls: a decode step should not ask the heap for anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace kvfuse {

class Workspace {
 public:
  static Workspace& OfThread() {
    static thread_local Workspace space;
    return space;
  }

  // What is taken within a scope is given back at its end.
  class Scope {
   public:
    Scope() : space_(OfThread()), block_(space_.block_), used_(space_.used_) {}
    ~Scope() { space_.block_ = block_, space_.used_ = used_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Workspace& space_;
    size_t block_;
    int64_t used_;
  };

  // Aligned to 64 bytes, not initialized; valid until the scope ends.
  template <typename T>
  T* Take(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].size) ++block_, used_ = 0;
    if (block_ == blocks_.size()) blocks_.push_back(Block(std::max<int64_t>(bytes, kBlock)));
    T* at = reinterpret_cast<T*>(blocks_[block_].memory.get() + used_);
    used_ += bytes;
    return at;
  }

 private:
  static constexpr int64_t kBlock = 1 << 16;

  struct Free {
    void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  struct Block {
    explicit Block(int64_t bytes)
        : size(bytes), memory(static_cast<char*>(::operator new[](bytes, std::align_val_t{64}))) {}
    int64_t size;
    std::unique_ptr<char, Free> memory;
  };

  std::vector<Block> blocks_;
  size_t block_ = 0;
  int64_t used_ = 0;
};

}  // namespace kvfuse
