// Which positions of a layer cache are held how: the bookkeeping that is the same on every device. No memory here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvfuse/error.h"
#include "kvfuse/format.h"

namespace kvfuse {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct LayerSpan {
  // The chunk between Prepare and Commit.
  struct Chunk {
    int64_t past = 0, total = 0;
    int64_t encode_from = 0, encode_to = 0;  // positions that enter the low-bit store
    int64_t store_from = 0;                  // positions from here to total are stored exactly
  };

  int64_t length = 0;
  int64_t encoded_end = 0;                // the low-bit store holds [pages_begin, encoded_end)
  int64_t pages_begin = 0;                // a sliding window has freed what lies before
  int64_t exact_begin = 0;                // f32 rows are held from here to length
  int64_t undo_begin = 0, undo_end = -1;  // and here, in case the last chunk is dropped again
  Chunk chunk;

  // Exact rows that a later query, or a block still to be encoded, may need; plus the slack.
  static int64_t KeepExactFrom(const CacheFormat& format, int64_t length) {
    if (!format.has_exact_window()) return length;
    const int64_t from = std::max<int64_t>(0, format.WindowBegin(length) - kRollbackSlack);
    return from / kExactPageTokens * kExactPageTokens;
  }

  void Prepare(const CacheFormat& format, int64_t past, int64_t count) {
    const int64_t encoded = std::min(encoded_end, past), total = past + count;
    chunk = {past, total, encoded, std::max(encoded, format.EncodedEnd(total)),
             std::max(past, KeepExactFrom(format, total))};
  }

  void Commit(const CacheFormat& format) {
    undo_begin = exact_begin;
    undo_end = chunk.past;
    length = chunk.total;
    encoded_end = chunk.encode_to;
    exact_begin = std::max(exact_begin, KeepExactFrom(format, length));
    chunk = {};
  }

  // Afterwards pages before exact_begin and pages_begin may be freed.
  void Settle(const CacheFormat& format) {
    undo_end = -1;
    if (format.window_left < 0) return;
    const int64_t unseen = std::max<int64_t>(0, length - format.window_left - kRollbackSlack);
    pages_begin = std::max(pages_begin, std::min(unseen, encoded_end) / kPageTokens * kPageTokens);
  }

  void CheckTruncate(const CacheFormat& format, int64_t to) const {
    if (to > 0 && to < length && to - format.window_left < pages_begin && pages_begin > 0)
      Fail("[truncate] expected a length of 0 or at least ", pages_begin + format.window_left,
           ", since the sliding window has freed older tokens; found ", to);
  }

  // Of a length that CheckTruncate accepts; false when there is nothing to drop. Afterwards pages from encoded_end and
  // length on may be freed.
  bool Truncate(const CacheFormat& format, int64_t to) {
    if (to >= length) return false;
    CheckTruncate(format, to);
    length = to;
    if (to <= undo_end) exact_begin = undo_begin;
    undo_end = -1;
    exact_begin = std::min(exact_begin, to);
    // A block that is open again counts as not encoded while its floats are there; else it stays low-bit.
    encoded_end = std::min(encoded_end, std::max(format.EncodedEnd(to), exact_begin));
    if (to == 0) pages_begin = 0;
    return true;
  }
};

}  // namespace kvfuse
