// The eight tile registers of AMX, as far as amx.cc uses them: rows of 64 bytes, and a product that adds
// int8 x uint8 to int32. With KVFUSE_AMX_EMULATED they are arrays and loops, so that all of amx.cc but these
// instructions runs, and is tested, on any machine with AVX-512.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#if !defined(KVFUSE_AMX_EMULATED)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace kvfuse {
namespace {

// Tiles 0 to 3 are 16 x 16 int32 sums. A product takes 16 rows of up to 64 int8 and rows of 16 groups of four uint8,
// one row for four of those: tile 4 times tile 5 is 64 deep, tile 6 times tile 7 is 32 deep.
constexpr int kTileRows[8] = {16, 16, 16, 16, 16, 16, 16, 8};
constexpr int kTileBytes[8] = {64, 64, 64, 64, 64, 64, 32, 64};  // of a row

#if defined(KVFUSE_AMX_EMULATED)

struct Tiles {
  static std::string Reason() { return ""; }

  // For a scope in which tiles are used, on one thread.
  Tiles() { std::memset(registers, 0x55, sizeof registers); }

  template <int kTile>
  static void Zero() {
    std::memset(registers[kTile], 0, sizeof registers[kTile]);
  }
  template <int kTile>
  static void Load(const void* from, int64_t stride) {
    for (int row = 0; row < kTileRows[kTile]; ++row)
      std::memcpy(registers[kTile][row], static_cast<const char*>(from) + row * stride, kTileBytes[kTile]);
  }
  template <int kTile>
  static void Store(void* to, int64_t stride) {
    for (int row = 0; row < kTileRows[kTile]; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, registers[kTile][row], kTileBytes[kTile]);
  }
  template <int kSum, int kLeft, int kRight>
  static void AddProduct() {
    static_assert(kTileBytes[kLeft] == 4 * kTileRows[kRight], "depths differ");
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n) {
        int32_t sum;
        std::memcpy(&sum, &registers[kSum][m][4 * n], sizeof sum);
        for (int k = 0; k < kTileRows[kRight]; ++k)
          for (int i = 0; i < 4; ++i)
            sum += static_cast<int8_t>(registers[kLeft][m][4 * k + i]) * int32_t{registers[kRight][k][4 * n + i]};
        std::memcpy(&registers[kSum][m][4 * n], &sum, sizeof sum);
      }
  }

  static thread_local uint8_t registers[8][16][64];
};
thread_local uint8_t Tiles::registers[8][16][64];

#else

struct Tiles {
  static std::string Reason() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool tiles = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 24 & 1) != 0;  // AMX-TILE
    if (!tiles || (edx >> 25 & 1) == 0) return "this CPU lacks AMX-TILE or AMX-INT8";
#if defined(__linux__)
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return "the operating system does not save AMX tiles";
    // Linux wants to be asked, once in a process, before it makes room for them.
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0)
      return "the operating system does not permit AMX tiles";
    return "";
#else
    return "AMX is only used on Linux";
#endif
  }

  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = static_cast<uint16_t>(kTileBytes[i]);
    for (int i = 0; i < 8; ++i) config.rows[i] = static_cast<uint8_t>(kTileRows[i]);
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~Tiles() { asm volatile("tilerelease" : : : "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int kTile>
  static void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  static void Load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void Store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kSum, int kLeft, int kRight>
  static void AddProduct() {
    static_assert(kTileBytes[kLeft] == 4 * kTileRows[kRight], "depths differ");
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
  }
};

#endif

}  // namespace
}  // namespace kvfuse
