#include "gf256.h"

#include <cstdlib>
#include <cstring>

namespace everstep {

namespace {

uint8_t slow_mul(uint8_t a, uint8_t b) {
  unsigned out = 0, x = a;
  for (int bit = 0; bit < 8; ++bit) {
    if (b >> bit & 1) out ^= x << bit;
  }
  for (int bit = 14; bit >= 8; --bit) {
    if (out >> bit & 1) out ^= 0x11du << (bit - 8);
  }
  return uint8_t(out);
}

GfTables make_tables() {
  GfTables t{};
  for (int c = 0; c < 256; ++c) {
    for (int x = 0; x < 16; ++x) {
      t.nibble[c][x] = slow_mul(uint8_t(c), uint8_t(x));
      t.nibble[c][16 + x] = slow_mul(uint8_t(c), uint8_t(x << 4));
    }
    // Byte 7 - i of the matrix says which bits of x make bit i of the product.
    for (int i = 0; i < 8; ++i) {
      uint64_t row = 0;
      for (int j = 0; j < 8; ++j) row |= uint64_t(slow_mul(uint8_t(c), uint8_t(1 << j)) >> i & 1) << j;
      t.matrix[c] |= row << (8 * (7 - i));
    }
    for (int x = 1; x < 256; ++x) {
      if (slow_mul(uint8_t(c), uint8_t(x)) == 1) t.inverse[c] = uint8_t(x);
    }
  }
  return t;
}

const GfKernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool gfni = avx512 && __builtin_cpu_supports("gfni");
  const char* asked = std::getenv("EVERSTEP_ISA");
  auto only = [&](const char* name) { return asked && !std::strcmp(asked, name); };
  if (only("base")) return kGfBase;
  if (only("avx2") && avx2) return kGfAvx2;
  if (only("avx512") && avx512) return kGfAvx512;
  if (gfni) return kGfGfni;
  if (avx512) return kGfAvx512;
  if (avx2) return kGfAvx2;
#endif
  return kGfBase;
}

}  // namespace

const GfTables& gf_tables() {
  static const GfTables tables = make_tables();
  return tables;
}

uint8_t gf_weight(int row, size_t member) {
  uint8_t weight = 1;
  for (size_t i = 0; row && i < member; ++i) weight = slow_mul(weight, 2);
  return weight;
}

const GfKernels& gf_kernels() {
  static const GfKernels& chosen = choose();
  return chosen;
}

}  // namespace everstep
