// What one layer stores per token, and how many bytes that takes. Stated once, used by every kernel.
#pragma once

#include <cstdint>
#include <string>

namespace kvfuse {

constexpr int kPageTokens = 64;       // tokens in one page of low-bit rows
constexpr int kExactPageTokens = 16;  // tokens in one page of exact f32 rows
constexpr int kRollbackSlack = 32;    // exact tokens kept beyond the window, so that a short rollback is exact

// One side (keys or values) of the low-bit store; a row is one token of one kv head.
struct SideFormat {
  int dim = 0;         // channels of a row
  int bits = 4;        // 4, 8, or 16 (IEEE half, neither rotated nor scaled)
  int group_size = 0;  // channels per f16 scale; 0: one f32 scale for the row
  bool full = false;   // 4-bit codes -8..7 from the signed extreme instead of -7..7 from max abs
  bool rotate = true;  // Hadamard-rotate before quantizing

  bool scaled() const { return bits != 16; }
  bool rotated() const { return rotate && scaled(); }
  int groups() const { return !scaled() ? 0 : group_size == 0 ? 1 : (dim + group_size - 1) / group_size; }
  int group_width() const { return group_size == 0 ? dim : group_size; }
  int code_bytes() const { return (dim * bits + 7) / 8; }
  int scale_bytes() const { return groups() * (group_size == 0 ? 4 : 2); }
  int row_bytes() const { return code_bytes() + scale_bytes(); }

  bool operator==(const SideFormat& o) const {
    return dim == o.dim && bits == o.bits && group_size == o.group_size && full == o.full && rotate == o.rotate;
  }
};

struct CacheFormat {
  int kv_num_heads = 0;
  SideFormat key, value;
  int64_t n_recent = 0;      // newest tokens used exactly
  int64_t block = 1;         // granularity of the exact window
  int64_t n_sink = 0;        // first tokens used exactly for ever
  int64_t window_left = -1;  // sliding window; -1: none
  bool center_keys = false;  // subtract each block's mean key before quantizing

  bool centered() const { return center_keys && key.scaled(); }
  bool has_exact_window() const { return n_recent > 0 || block > 1; }

  // The first position that the query at `position` uses exactly (sinks apart): key j is exact iff
  // (j div block + 1) * block > position - n_recent + 1.
  int64_t ExactFrom(int64_t position) const {
    if (!has_exact_window()) return INT64_MAX;
    const int64_t limit = position - n_recent + 1;
    return limit <= 0 ? 0 : limit / block * block;
  }

  // Tokens [0, EncodedEnd) of a cache of `length` tokens are in the low-bit store.
  int64_t EncodedEnd(int64_t length) const {
    if (block == 1) return length;
    return length <= n_recent ? 0 : (length - n_recent) / block * block;
  }

  // Queries from position `length` on use no token before this one exactly (sinks apart).
  int64_t WindowBegin(int64_t length) const { return block == 1 ? length - n_recent : EncodedEnd(length); }

  // A low-bit page is one part per kv head: kPageTokens key rows, then as many value rows. Where the bytes of a row
  // lie within its side is the kernel's affair.
  int64_t side_bytes(bool is_key) const { return int64_t{kPageTokens} * (is_key ? key : value).row_bytes(); }
  int64_t side_offset(bool is_key, int head) const {
    return head * (side_bytes(true) + side_bytes(false)) + (is_key ? 0 : side_bytes(true));
  }
  int64_t page_bytes() const { return kv_num_heads * (side_bytes(true) + side_bytes(false)); }

  bool operator==(const CacheFormat& o) const {
    return kv_num_heads == o.kv_num_heads && key == o.key && value == o.value && n_recent == o.n_recent &&
           block == o.block && n_sink == o.n_sink && window_left == o.window_left && center_keys == o.center_keys;
  }

  // "2 kv heads of 64/64 channels, 4/4 bits, …": for error sentences.
  std::string Describe() const;
};

}  // namespace kvfuse
