// AMX int8 for many queries (prefill), AVX-512 with VNNI for few and for all that is not a product of matrices. Only
// dispatch.cc may call it.
//
// The page is already what the tile product wants as its right side: a line of keys is one row of 16 tokens x 4
// channels, the 16 lines of a chunk of values are 64 tokens x 16 channels. 4-bit codes are unpacked to bytes once for
// up to kQueries queries. The left sides are the queries' codes and the two planes of their weights. int32 sums are
// those of the other kernels, and so is all float arithmetic on them: the two drivers below give the same bits.
#include "amx.h"

#include "machine.h"

#if defined(KVFUSE_X86)

#include "amx_tiles.h"
#include "avx512_isa.h"

namespace kvfuse::amx {
namespace {

using avx512_vnni::First;
using avx512_vnni::kLines;
using avx512_vnni::Scales16;
using tiles::Planes;

constexpr int kRows = 16;           // of a tile of queries
constexpr int kTileSize = 16 * 64;  // bytes

struct Isa : avx512_vnni::Isa {
  static constexpr int kQueries = 32;

  static void KeyScores(const SideFormat& side, const uint8_t* bytes, const int8_t* const* codes,
                        const int32_t* const* sums, int n, float* scores, const uint8_t* next) {
    Workspace::Scope scope;
    const int chunks = ChunkCount(side);
    auto* left = Workspace::OfThread().Take<int8_t>(int64_t{kQueries} * 64 * chunks);
    auto* right = Workspace::OfThread().Take<uint8_t>(int64_t{kTileSize} * kLines * chunks);
    PackQueries(side, codes, n, left);
    UnpackKeys(side, bytes, right, next);
    for (int first = 0; first < n; first += kRows)
      ScoreRows(side, bytes, left + first * 64, right, sums + first, std::min(kRows, n - first),
                scores + first * tiles::kSpanTokens);
  }

  static void AddSplitValues(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles, const Planes* planes,
                             int n, const float* factors, float* const* sums) {
    Workspace::Scope scope;
    auto* right = Workspace::OfThread().Take<uint8_t>(tiles::kTiles * 2 * kTileSize);
    for (int c = 0; c < side.dim;) {
      const tiles::ValueChunk chunk = tiles::ValueChunkAt(side, c);
      for (int k = 0; k < tiles; ++k)
        if (bytes.tiles[k] != nullptr)
          UnpackValues(side, bytes.tiles[k] + chunk.offset, chunk.lanes, right + k * 2 * kTileSize,
                       bytes.next[k] + chunk.offset);
      const Planes& plane = planes[c / side.group_width()];
      for (int first = 0; first < n; first += kRows) {
        const int rows = std::min(kRows, n - first);
        AddChunk(side, bytes, tiles, right, plane, first, rows, factors + first, sums + first, c, chunk.lanes);
      }
      c += chunk.width;
    }
  }

  static void Exp(const float* x, int count, float* out) {
    for (int i = 0; i < count; i += 16) avx512_vnni::Isa::Exp(x + i, std::min(16, count - i), out + i);
  }

 private:
  // A group's channels in chunks of 64 and at most one shorter: products that are 64 or 32 deep. What a chunk lacks are
  // zeros on the left.
  static int ChunksOf(int width) { return (width + 63) / 64; }
  static int ChunkCount(const SideFormat& side) {
    return side.groups() * ChunksOf(std::min(side.dim, side.group_width()));
  }

  // [chunk][query][64 bytes]
  KVFUSE_AVX512 static void PackQueries(const SideFormat& side, const int8_t* const* codes, int n, int8_t* left) {
    for (int g = 0; g < side.groups(); ++g) {
      const int last = std::min(side.dim, (g + 1) * side.group_width());
      for (int c = g * side.group_width(); c < last; c += 64, left += kQueries * 64) {
        const __mmask64 there = last - c >= 64 ? ~__mmask64{0} : (__mmask64{1} << (last - c)) - 1;
        for (int i = 0; i < n; ++i) _mm512_store_si512(left + i * 64, _mm512_maskz_loadu_epi8(there, codes[i] + c));
      }
    }
  }

  // [chunk][line of 16 tokens][four channels][token][channel]: a row of a tile is what a line of the page holds.
  KVFUSE_AVX512 static void UnpackKeys(const SideFormat& side, const uint8_t* bytes, uint8_t* right,
                                       const uint8_t* next) {
    const __m512i nibbles = _mm512_set1_epi8(15);
    for (int g = 0; g < side.groups(); ++g) {
      const int last = std::min(side.dim, (g + 1) * side.group_width());
      for (int first = g * side.group_width(); first < last; first += 64, right += kLines * kTileSize)
        for (int c = first; c < std::min(last, first + 64); c += tiles::KeyChannels(side))
          for (int l = 0; l < kLines; ++l) {
            const int64_t line = tiles::KeyLine(side, 16 * l, c);
            uint8_t* row = right + l * kTileSize + (c - first) / 4 * 64;
            const __m512i u = _mm512_load_si512(bytes + line);
            _mm_prefetch(reinterpret_cast<const char*>(next + line), _MM_HINT_T0);
            _mm512_store_si512(row, side.bits == 4 ? _mm512_and_si512(u, nibbles) : u);
            if (side.bits == 4) _mm512_store_si512(row + 64, _mm512_and_si512(_mm512_srli_epi16(u, 4), nibbles));
          }
    }
  }

  // Scores of at most 16 queries and the 64 tokens of a tile.
  KVFUSE_AVX512 static void ScoreRows(const SideFormat& side, const uint8_t* bytes, const int8_t* left,
                                      const uint8_t* right, const int32_t* const* code_sums, int n, float* scores) {
    alignas(64) int32_t dots[kRows][kPageTokens];
    for (int g = 0; g < side.groups(); ++g) {
      Tiles::Zero<0>(), Tiles::Zero<1>(), Tiles::Zero<2>(), Tiles::Zero<3>();
      const int last = std::min(side.dim, (g + 1) * side.group_width());
      for (int c = g * side.group_width(); c < last; c += 64, left += kQueries * 64, right += kLines * kTileSize) {
        if (last - c > 32) {
          Tiles::Load<4>(left, 64);
          Tiles::Load<5>(right, 64), Tiles::AddProduct<0, 4, 5>();
          Tiles::Load<5>(right + kTileSize, 64), Tiles::AddProduct<1, 4, 5>();
          Tiles::Load<5>(right + 2 * kTileSize, 64), Tiles::AddProduct<2, 4, 5>();
          Tiles::Load<5>(right + 3 * kTileSize, 64), Tiles::AddProduct<3, 4, 5>();
        } else {
          Tiles::Load<6>(left, 64);
          Tiles::Load<7>(right, 64), Tiles::AddProduct<0, 6, 7>();
          Tiles::Load<7>(right + kTileSize, 64), Tiles::AddProduct<1, 6, 7>();
          Tiles::Load<7>(right + 2 * kTileSize, 64), Tiles::AddProduct<2, 6, 7>();
          Tiles::Load<7>(right + 3 * kTileSize, 64), Tiles::AddProduct<3, 6, 7>();
        }
      }
      Tiles::Store<0>(dots[0], sizeof dots[0]);
      Tiles::Store<1>(dots[0] + 16, sizeof dots[0]);
      Tiles::Store<2>(dots[0] + 32, sizeof dots[0]);
      Tiles::Store<3>(dots[0] + 48, sizeof dots[0]);
      const int offset = side.bits == 4 ? 8 : 128;
      for (int l = 0; l < kLines; ++l) {
        const __m512 scales = Scales16(side, bytes, g, 16 * l);
        for (int i = 0; i < n; ++i) {
          const __m512i dot =
              _mm512_sub_epi32(_mm512_load_si512(dots[i] + 16 * l), _mm512_set1_epi32(offset * code_sums[i][g]));
          const __m512 score = _mm512_mul_ps(scales, _mm512_cvtepi32_ps(dot));
          float* at = scores + i * tiles::kSpanTokens + 16 * l;
          _mm512_store_ps(at, g == 0 ? score : _mm512_add_ps(_mm512_load_ps(at), score));
        }
      }
    }
  }

  // [nibble][four tokens][channel][token] of one chunk; 8-bit codes as if they were lower nibbles.
  KVFUSE_AVX512 static void UnpackValues(const SideFormat& side, const uint8_t* bytes, int lanes, uint8_t* right,
                                         const uint8_t* next) {
    const __m512i nibbles = _mm512_set1_epi8(15);
    for (int l = 0; l < 16; ++l, bytes += 4 * lanes, next += 4 * lanes) {
      const __m512i u = _mm512_maskz_loadu_epi32(First(lanes), bytes);
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
      _mm512_store_si512(right + l * 64, side.bits == 4 ? _mm512_and_si512(u, nibbles) : u);
      if (side.bits == 4)
        _mm512_store_si512(right + kTileSize + l * 64, _mm512_and_si512(_mm512_srli_epi16(u, 4), nibbles));
    }
  }

  // sums[i][c] += factors[i] * (sum over tokens of (256 * high + low) * code) for at most 16 queries and one chunk.
  KVFUSE_AVX512 static void AddChunk(const SideFormat& side, const tiles::SpanBytes& bytes, int tiles,
                                     const uint8_t* right, const Planes& plane, int first, int n, const float* factors,
                                     float* const* sums, int channel, int chunk_lanes) {
    alignas(64) int32_t dots[4][kRows][16];  // lower nibble under either plane, upper nibble under either plane
    Tiles::Zero<0>(), Tiles::Zero<1>(), Tiles::Zero<2>(), Tiles::Zero<3>();
    for (int k = 0; k < tiles; ++k, right += 2 * kTileSize) {
      if (bytes.tiles[k] == nullptr) continue;
      const int8_t* high = plane.high + first * tiles::kPlaneStride + k * kPageTokens;
      const int8_t* low = high + tiles::kSpanTokens;
      Tiles::Load<5>(right, 64);
      Tiles::Load<4>(high, tiles::kPlaneStride), Tiles::AddProduct<0, 4, 5>();
      Tiles::Load<4>(low, tiles::kPlaneStride), Tiles::AddProduct<1, 4, 5>();
      if (side.bits == 8) continue;
      Tiles::Load<5>(right + kTileSize, 64), Tiles::AddProduct<3, 4, 5>();
      Tiles::Load<4>(high, tiles::kPlaneStride), Tiles::AddProduct<2, 4, 5>();
    }
    Tiles::Store<0>(dots[0], 64), Tiles::Store<1>(dots[1], 64);
    if (side.bits == 4) Tiles::Store<2>(dots[2], 64), Tiles::Store<3>(dots[3], 64);
    const __mmask16 lanes = First(chunk_lanes);
    for (int i = 0; i < n; ++i) {
      const __m512i sum = _mm512_set1_epi32(plane.sums[first + i]);
      const __m512i offset = side.bits == 4 ? _mm512_slli_epi32(sum, 3) : _mm512_slli_epi32(sum, 7);
      const __m512 factor = _mm512_set1_ps(factors[i]);
      for (int half = 0; half < (side.bits == 4 ? 2 : 1); ++half) {
        // In the end at most 256 tokens * 32640 * 128 < 2^31; what wraps on the way wraps back.
        const __m512i upper = _mm512_slli_epi32(_mm512_load_si512(dots[2 * half][i]), 8);
        const __m512i dot = _mm512_sub_epi32(_mm512_add_epi32(upper, _mm512_load_si512(dots[2 * half + 1][i])), offset);
        float* at = sums[i] + channel + half * chunk_lanes;
        const __m512 grown = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(dot), _mm512_maskz_loadu_ps(lanes, at));
        _mm512_mask_storeu_ps(at, lanes, grown);
      }
    }
  }
};

// A tile product costs the same for one query as for 16.
void Attend(const AttendArgs& args) {
  const int group = args.step.num_heads / args.cache.format->kv_num_heads;
  if ((args.query_end - args.query_begin) * group <= avx512_vnni::Isa::kQueries)
    return tiles::TileAttention<avx512_vnni::Isa>(args).Run();
  const Tiles registers;
  tiles::TileAttention<Isa>(args).Run();
}

}  // namespace

std::string Reason() { return Tiles::Reason(); }

KernelTable Table() {
  KernelTable table = tiles::Table<avx512_vnni::Isa>("amx");
  table.attend = Attend;
  return table;
}

}  // namespace kvfuse::amx

#endif
