// Bytes as elements of GF(2^8), polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), generator 2: what parity is made of.
//
// Addition is XOR; a product by a constant is linear in the byte, so whole pages are code words byte by byte. Compiled
// for x86-64 baseline, AVX2, AVX-512 and AVX-512 with GFNI, chosen at run time as the kernels of rows.h are.
#pragma once
#include <cstddef>
#include <cstdint>

namespace everstep {

struct GfKernels {
  const char* name;
  void (*add)(uint8_t* dst, const uint8_t* src, size_t n);                 // dst ^= src
  void (*add_mul)(uint8_t* dst, const uint8_t* src, size_t n, uint8_t c);  // dst ^= c * src
  void (*mul)(uint8_t* dst, size_t n, uint8_t c);                          // dst = c * dst
};

// Products of one constant, made for all 256 when first needed.
struct GfTables {
  alignas(64) uint8_t nibble[256][32];  // [c][x] = c * x, [c][16 + x] = c * (x << 4), x < 16
  uint64_t matrix[256];                 // of the map x -> c * x, as vgf2p8affineqb wants it
  uint8_t inverse[256];                 // inverse[0] = 0
};
const GfTables& gf_tables();

static inline uint8_t gf_mul(const GfTables& t, uint8_t c, uint8_t x) {
  return uint8_t(t.nibble[c][x & 15] ^ t.nibble[c][16 + (x >> 4)]);
}

// The weight of member i in row 0 or 1 of a stripe: 1, or 2^i.
uint8_t gf_weight(int row, size_t member);

extern const GfKernels kGfBase;
#if defined(__x86_64__)
extern const GfKernels kGfAvx2;
extern const GfKernels kGfAvx512;
extern const GfKernels kGfGfni;
#endif

// The fastest that this machine runs; EVERSTEP_ISA=base|avx2|avx512|gfni narrows it.
const GfKernels& gf_kernels();

}  // namespace everstep
