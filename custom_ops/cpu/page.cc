#include "kvfuse/page.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "kvfuse/error.h"

namespace kvfuse {
namespace {

std::atomic<int64_t> g_bytes_in_use{0};
std::atomic<int64_t> g_limit{-1};

}  // namespace

Page Page::Make(int64_t bytes) {
  const int64_t limit = g_limit.load(), used = g_bytes_in_use.fetch_add(bytes) + bytes;
  if (limit >= 0 && used > limit) {
    g_bytes_in_use.fetch_sub(bytes);
    FailMemory("[memory] expected at most ", limit, " bytes of cache in this process; found a need for ", used);
  }
  void* memory = ::operator new(sizeof(Block) + bytes, std::align_val_t{alignof(Block)}, std::nothrow);
  if (memory == nullptr) {
    g_bytes_in_use.fetch_sub(bytes);
    throw std::bad_alloc();
  }
  std::memset(memory, 0, sizeof(Block) + bytes);
  Page page;
  page.block_ = new (memory) Block{{1}, bytes};
  return page;
}

void Page::Release() {
  if (block_ == nullptr || block_->references.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  g_bytes_in_use.fetch_sub(block_->size);
  block_->~Block();
  ::operator delete(block_, std::align_val_t{alignof(Block)});
}

int64_t Page::BytesInUse() { return g_bytes_in_use.load(); }
void Page::SetLimit(int64_t bytes) { g_limit.store(bytes); }

uint8_t* PageRun::Writable(int64_t number, int64_t bytes) {
  if (pages_.empty()) begin_ = number;
  if (number >= end()) pages_.resize(number - begin_ + 1);
  Page& page = pages_[number - begin_];
  if (!page) {
    page = Page::Make(bytes);
  } else if (!page.unique()) {
    Page copy = Page::Make(bytes);
    std::memcpy(copy.data(), page.data(), bytes);
    page = std::move(copy);
  }
  return page.data();
}

void PageRun::FreeBefore(int64_t number) {
  const int64_t count = std::clamp<int64_t>(number - begin_, 0, pages_.size());
  pages_.erase(pages_.begin(), pages_.begin() + count);
  begin_ += count;
}

void PageRun::FreeFrom(int64_t number) {
  if (number < end()) pages_.resize(std::max<int64_t>(0, number - begin_));
}

int64_t PageRun::nbytes() const {
  int64_t bytes = 0;
  for (const Page& page : pages_) bytes += page ? page.size() : 0;
  return bytes;
}

}  // namespace kvfuse
