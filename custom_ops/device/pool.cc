#include "device/pool.h"

#include <algorithm>

namespace kvfuse {

int32_t DevicePool::Take() {
  if (free_.empty()) Grow();
  const int32_t slot = free_.back();
  free_.pop_back();
  users_[slot] = 1;
  return slot;
}

void DevicePool::Release(int32_t slot) {
  if (--users_[slot] == 0) free_.push_back(slot);
}

void DevicePool::CopySlot(int32_t to, int32_t from) {
  device_.Copy(*buffer_, to * slot_bytes_, *buffer_, from * slot_bytes_, slot_bytes_);
}

void DevicePool::Grow() {
  constexpr int64_t kFirst = 4, kDoubled = 512;
  const int64_t old = static_cast<int64_t>(users_.size());
  const int64_t grown = std::max(kFirst, old < kDoubled ? 2 * old : old + old / 4);
  std::shared_ptr<DeviceBuffer> buffer = device_.Allocate(grown * slot_bytes_);
  users_.reserve(grown);
  free_.reserve(grown);
  if (old > 0) {
    device_.Copy(*buffer, 0, *buffer_, 0, old * slot_bytes_);
    device_.Wait();  // the old buffer goes now
  }
  buffer_ = std::move(buffer);
  users_.resize(grown, 0);
  for (int64_t slot = grown; slot-- > old;) free_.push_back(static_cast<int32_t>(slot));  // the lowest is taken first
}

int64_t SlotRun::count() const {
  return std::count_if(slots_.begin(), slots_.end(), [](int32_t slot) { return slot != kNone; });
}

void SlotRun::MakeWritable(DevicePool& pool, int64_t number) {
  if (slots_.empty()) begin_ = number;
  if (number >= end()) slots_.resize(number - begin_ + 1, kNone);
  int32_t& slot = slots_[number - begin_];
  if (slot == kNone) {
    slot = pool.Take();
  } else if (!pool.unique(slot)) {
    const int32_t copy = pool.Take();
    pool.CopySlot(copy, slot);
    pool.Release(slot);
    slot = copy;
  }
}

void SlotRun::FreeBefore(DevicePool& pool, int64_t number) {
  const int64_t count = std::clamp<int64_t>(number - begin_, 0, slots_.size());
  for (int64_t i = 0; i < count; ++i)
    if (slots_[i] != kNone) pool.Release(slots_[i]);
  slots_.erase(slots_.begin(), slots_.begin() + count);
  begin_ += count;
}

void SlotRun::FreeFrom(DevicePool& pool, int64_t number) {
  if (number >= end()) return;
  const int64_t kept = std::max<int64_t>(0, number - begin_);
  for (size_t i = kept; i < slots_.size(); ++i)
    if (slots_[i] != kNone) pool.Release(slots_[i]);
  slots_.resize(kept);
}

void SlotRun::ShareAll(DevicePool& pool, const SlotRun& other) {
  begin_ = other.begin_;
  slots_ = other.slots_;
  for (int32_t slot : slots_)
    if (slot != kNone) pool.Share(slot);
}

}  // namespace kvfuse
