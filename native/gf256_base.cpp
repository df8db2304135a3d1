#include <string.h>

#include "gf256.h"

namespace everstep {
namespace {

void add(uint8_t* dst, const uint8_t* src, size_t n) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    uint64_t a[2], b[2];
    memcpy(a, dst + i, 16);
    memcpy(b, src + i, 16);
    a[0] ^= b[0];
    a[1] ^= b[1];
    memcpy(dst + i, a, 16);
  }
  for (; i < n; ++i) dst[i] ^= src[i];
}

// Eight bytes at a time: c * x is the sum over the bits of c of x doubled so many times.
uint64_t times(uint64_t x, uint8_t c) {
  uint64_t out = 0;
  for (; c; c >>= 1) {
    out ^= x & (0 - uint64_t(c & 1));
    const uint64_t carry = (x >> 7) & 0x0101010101010101ULL;
    x = ((x & 0x7f7f7f7f7f7f7f7fULL) << 1) ^ (carry * 0x1d);
  }
  return out;
}

void add_mul(uint8_t* dst, const uint8_t* src, size_t n, uint8_t c) {
  const GfTables& t = gf_tables();
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t a, b;
    memcpy(&a, dst + i, 8);
    memcpy(&b, src + i, 8);
    a ^= times(b, c);
    memcpy(dst + i, &a, 8);
  }
  for (; i < n; ++i) dst[i] ^= gf_mul(t, c, src[i]);
}

void mul(uint8_t* dst, size_t n, uint8_t c) {
  const GfTables& t = gf_tables();
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t a;
    memcpy(&a, dst + i, 8);
    a = times(a, c);
    memcpy(dst + i, &a, 8);
  }
  for (; i < n; ++i) dst[i] = gf_mul(t, c, dst[i]);
}

}  // namespace

const GfKernels kGfBase = {"base", add, add_mul, mul};

}  // namespace everstep
