#include <immintrin.h>

#include "gf256.h"

namespace everstep {
namespace {

inline __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store(uint8_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }

struct Times {
  __m256i low, high;
  explicit Times(const uint8_t* nibble)
      : low(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(nibble)))),
        high(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(nibble + 16)))) {}
  __m256i operator()(__m256i x) const {
    const __m256i mask = _mm256_set1_epi8(15);
    return _mm256_xor_si256(_mm256_shuffle_epi8(low, _mm256_and_si256(x, mask)),
                            _mm256_shuffle_epi8(high, _mm256_and_si256(_mm256_srli_epi16(x, 4), mask)));
  }
};

void add(uint8_t* dst, const uint8_t* src, size_t n) {
  size_t i = 0;
  for (; i + 32 <= n; i += 32) store(dst + i, _mm256_xor_si256(load(dst + i), load(src + i)));
  for (; i < n; ++i) dst[i] ^= src[i];
}

void add_mul(uint8_t* dst, const uint8_t* src, size_t n, uint8_t c) {
  const GfTables& t = gf_tables();
  const Times times(t.nibble[c]);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) store(dst + i, _mm256_xor_si256(load(dst + i), times(load(src + i))));
  for (; i < n; ++i) dst[i] ^= gf_mul(t, c, src[i]);
}

void mul(uint8_t* dst, size_t n, uint8_t c) {
  const GfTables& t = gf_tables();
  const Times times(t.nibble[c]);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) store(dst + i, times(load(dst + i)));
  for (; i < n; ++i) dst[i] = gf_mul(t, c, dst[i]);
}

}  // namespace

const GfKernels kGfAvx2 = {"avx2", add, add_mul, mul};

}  // namespace everstep
