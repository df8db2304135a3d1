#include <immintrin.h>

#include "gf256.h"

namespace everstep {
namespace {

struct Times {
  __m512i matrix;
  explicit Times(uint8_t c) : matrix(_mm512_set1_epi64(int64_t(gf_tables().matrix[c]))) {}
  __m512i operator()(__m512i x) const { return _mm512_gf2p8affine_epi64_epi8(x, matrix, 0); }
};

}  // namespace
}  // namespace everstep

#include "gf256_wide.inc"
namespace everstep {
const GfKernels kGfGfni = {"gfni", add, add_mul, mul};
}
