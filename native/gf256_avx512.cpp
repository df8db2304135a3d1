#include <immintrin.h>

#include "gf256.h"

namespace everstep {
namespace {

struct Times {
  __m512i low, high;
  explicit Times(uint8_t c) {
    const uint8_t* nibble = gf_tables().nibble[c];
    low = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(nibble)));
    high = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(nibble + 16)));
  }
  __m512i operator()(__m512i x) const {
    const __m512i mask = _mm512_set1_epi8(15);
    return _mm512_xor_si512(_mm512_shuffle_epi8(low, _mm512_and_si512(x, mask)),
                            _mm512_shuffle_epi8(high, _mm512_and_si512(_mm512_srli_epi16(x, 4), mask)));
  }
};

}  // namespace
}  // namespace everstep

#include "gf256_wide.inc"
namespace everstep {
const GfKernels kGfAvx512 = {"avx512", add, add_mul, mul};
}
