// Device memory of a layer's forks: slots of one size in one buffer, counted by their users.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device/device.h"

namespace kvfuse {

// Grows by doubling, later by a quarter: a new buffer, into which the device copies the old one. Not synchronized.
class DevicePool {
 public:
  DevicePool(Device& device, int64_t slot_bytes) : device_(device), slot_bytes_(slot_bytes) {}

  int64_t slot_bytes() const { return slot_bytes_; }
  // Null before the first slot. Changes when the pool grows.
  const std::shared_ptr<DeviceBuffer>& buffer() const { return buffer_; }

  int32_t Take();  // with one user. Throws MemoryError.
  void Share(int32_t slot) { ++users_[slot]; }
  void Release(int32_t slot);
  bool unique(int32_t slot) const { return users_[slot] == 1; }
  void CopySlot(int32_t to, int32_t from);

 private:
  void Grow();

  Device& device_;
  const int64_t slot_bytes_;
  std::shared_ptr<DeviceBuffer> buffer_;
  std::vector<int32_t> users_, free_;
};

// Consecutive pages by number, each a slot of a pool; those before begin() have been freed. Not synchronized; the
// owner clears it before it goes.
class SlotRun {
 public:
  int64_t begin() const { return begin_; }
  int64_t end() const { return begin_ + static_cast<int64_t>(slots_.size()); }
  int32_t operator[](int64_t number) const { return slots_[number - begin_]; }
  int64_t count() const;  // pages that are there

  // Makes page `number` exist and be ours alone: copied when it is shared.
  void MakeWritable(DevicePool& pool, int64_t number);
  void FreeBefore(DevicePool& pool, int64_t number);
  void FreeFrom(DevicePool& pool, int64_t number);
  // This empty run becomes another user of all of `other`.
  void ShareAll(DevicePool& pool, const SlotRun& other);

 private:
  static constexpr int32_t kNone = -1;

  int64_t begin_ = 0;
  std::vector<int32_t> slots_;
};

}  // namespace kvfuse
