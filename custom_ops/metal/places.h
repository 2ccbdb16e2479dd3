// Where the parts of a layer cache lie, and rotation. A part of kernels.metal.
#pragma once

// The kv head's part of the low-bit page of a token's tile.
inline device const uchar* low_page(constant Cache& cache, device const uchar* pages, device const int* table, int tile,
                                    int kv_head) {
  const long page = table[cache.low_table + tile];
  return pages + (page * cache.kv_heads + kv_head) * cache.head_bytes;
}

inline device const float* chunk_row(constant Cache& cache, constant Side& side, device const float* chunk, int kv_head,
                                     int j) {
  return chunk + (long(kv_head) * (cache.total - cache.past) + (j - cache.past)) * side.pitch;
}

inline long exact_offset(constant Cache& cache, bool key, device const int* table, int kv_head, int j) {
  const long page = table[cache.exact_table + j / kExactTile];
  const int row = kv_head * kExactTile + j % kExactTile;
  const int within =
      key ? row * cache.key.pitch : cache.kv_heads * kExactTile * cache.key.pitch + row * cache.value.pitch;
  return page * cache.exact_floats + within;
}

inline long sink_offset(constant Cache& cache, bool key, int kv_head, int j) {
  const long row = long(j) * cache.kv_heads + kv_head;
  return key ? row * cache.key.pitch
             : long(cache.sink_rows) * cache.kv_heads * cache.key.pitch + row * cache.value.pitch;
}

// A token's floats for `append`: of the chunk, else of the exact pages.
inline device const float* float_row(constant Cache& cache, bool key, device const float* exact,
                                     device const int* table, device const float* chunk, int kv_head, int j) {
  if (j >= cache.past)
    return key ? chunk_row(cache, cache.key, chunk, kv_head, j) : chunk_row(cache, cache.value, chunk, kv_head, j);
  return exact + exact_offset(cache, key, table, kv_head, j);
}

inline float scale_of(constant Side& side, device const uchar* page, int group, int token) {
  device const uchar* scales = page + side.scales;
  if (side.group_size == 0) return ((device const float*)scales)[token];
  return from_half(((device const ushort*)scales)[group * kTile + token]);
}

// 1 / sqrt(block), as the reference's division and square root round it: an even power of two is exact, an odd one is
// that of 2 times one.
inline float rotation_norm(int block) {
  float norm = 1.0f;
  for (; block >= 4; block /= 4) norm *= 0.5f;
  return block == 2 ? norm * as_type<float>(0x3f3504f3u) : norm;
}

// Walsh-Hadamard in place, block-diagonal over the binary decomposition of dim. Begins and ends with a barrier.
inline void rotate_row(threadgroup float* row, int dim, int thread_index, int threads) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int start = 0;
  while (dim - start > 1) {
    int block = 1;
    while (2 * block <= dim - start) block *= 2;
    ROLLED for (int width = 1; width < block; width *= 2) {
      ROLLED for (int pair = thread_index; pair < block / 2; pair += threads) {
        const int low = start + ((pair & ~(width - 1)) << 1) + (pair & (width - 1));
        const float a = row[low], b = row[low + width];
        row[low] = a + b;
        row[low + width] = a - b;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const float norm = rotation_norm(block);
    ROLLED for (int i = thread_index; i < block; i += threads) row[start + i] *= norm;
    start += block;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
