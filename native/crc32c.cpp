#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <nmmintrin.h>
#define EVERSTEP_CRC_X86 1
#endif

namespace everstep {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reversed

using Table = std::array<std::array<uint32_t, 256>, 8>;

const Table& table() {
  static const Table made = [] {
    Table t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = c & 1 ? c >> 1 ^ kPolynomial : c >> 1;
      t[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; ++i) {
      for (size_t k = 1; k < 8; ++k) t[k][i] = t[k - 1][i] >> 8 ^ t[0][t[k - 1][i] & 255];
    }
    return t;
  }();
  return made;
}

// Eight bytes a step; `crc` is inverted already, as in the next ones.
uint32_t by_table(const uint8_t* p, size_t n, uint32_t crc) {
  const Table& t = table();
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t w;
    std::memcpy(&w, p, 8);
    w ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= t[7 - k][w >> 8 * k & 255];
  }
  for (; n; --n) crc = crc >> 8 ^ t[0][(crc ^ *p++) & 255];
  return crc;
}

#ifdef EVERSTEP_CRC_X86

constexpr size_t kStretch =
    1024;  // bytes of each of three streams: the instruction takes three cycles, one can begin in each

// What `kStretch` bytes of zeros make of a crc: linear, so four tables of a byte each.
using Shift = std::array<std::array<uint32_t, 256>, 4>;

const Shift& shift() {
  static const Shift made = [] {
    Shift s{};
    const uint8_t zeros[kStretch] = {};
    for (size_t k = 0; k < 4; ++k) {
      for (uint32_t i = 0; i < 256; ++i) s[k][i] = by_table(zeros, kStretch, i << 8 * k);
    }
    return s;
  }();
  return made;
}

inline uint32_t behind(const Shift& s, uint32_t crc) {
  return s[0][crc & 255] ^ s[1][crc >> 8 & 255] ^ s[2][crc >> 16 & 255] ^ s[3][crc >> 24];
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t* p, size_t n, uint32_t crc) {
  auto word = [](const uint8_t* at) {
    uint64_t w;
    std::memcpy(&w, at, 8);
    return w;
  };
  if (n >= 3 * kStretch) {
    const Shift& s = shift();
    for (; n >= 3 * kStretch; p += 3 * kStretch, n -= 3 * kStretch) {
      uint64_t a = crc, b = 0, c = 0;
      for (size_t i = 0; i < kStretch; i += 8) {
        a = _mm_crc32_u64(a, word(p + i));
        b = _mm_crc32_u64(b, word(p + kStretch + i));
        c = _mm_crc32_u64(c, word(p + 2 * kStretch + i));
      }
      crc = behind(s, behind(s, uint32_t(a)) ^ uint32_t(b)) ^ uint32_t(c);
    }
  }
  uint64_t a = crc;
  for (; n >= 8; p += 8, n -= 8) a = _mm_crc32_u64(a, word(p));
  crc = uint32_t(a);
  for (; n; --n) crc = _mm_crc32_u8(crc, *p++);
  return crc;
}

bool has_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}

#endif

}  // namespace

uint32_t crc32c(const void* data, size_t n, uint32_t crc) {
  const auto* p = static_cast<const uint8_t*>(data);
#ifdef EVERSTEP_CRC_X86
  if (has_instruction()) return ~by_instruction(p, n, ~crc);
#endif
  return ~by_table(p, n, ~crc);
}

const char* crc32c_isa() {
#ifdef EVERSTEP_CRC_X86
  if (has_instruction()) return "sse4.2";
#endif
  return "base";
}

}  // namespace everstep
