#include "table.h"

#include <cmath>

namespace everstep {

Optimizer with_options(const Optimizer& of, const Options& options) {
  const double* all[] = {&options.eps,      &options.beta1,     &options.beta2,
                         &options.momentum, &options.dampening, &options.weight_decay,
                         &options.alpha,    &options.lr_decay,  &options.momentum_decay};
  static_assert(sizeof(all) / sizeof(all[0]) == kOptions, "all of them");
  for (const double* x : all) {
    if (!std::isfinite(*x) || *x < 0) throw Malformed("an option of an optimizer is not a finite number >= 0");
  }
  if (options.beta1 >= 1 || options.beta2 >= 1 || options.alpha > 1)
    throw Malformed("an option of an optimizer is beyond what it can be");
  if ((options.momentum > 0 && of.momentum == 0) || (options.lr_decay > 0 && of.lr_decay == 0) ||
      (options.dampening > 0 && of.dampening == 0) || (options.weight_decay > 0 && of.kind == kFtrl))
    throw Malformed("an option of an optimizer is one that the rows' state was not made for");
  Optimizer out = of;
  static_cast<Options&>(out) = options;
  if (of.beta1 != options.beta1 || of.beta2 != options.beta2) out.bias_n = 0;  // the table is of other betas
  return out;
}

void Table::lay_out() {
  auto align64 = [](size_t x) { return (x + 63) & ~size_t(63); };
  record_bytes = (dim + state + meta) * 4;
  page_bits = 3;
  while (page_bits < 10 && ((record_bytes + 8) << (page_bits + 1)) <= (size_t(32) << 10)) ++page_bits;
  keys_at = align64((slots() + 7) / 8);
  head_bytes = keys_at + slots() * 8;
  page_bytes = head_bytes + align64(slots() * record_bytes);
}

void Table::first_values(int64_t key, float* values) const {
  if (init.kind == kConstant) {
    const float a = float(init.a);
    for (size_t j = 0; j < dim; ++j) values[j] = a;
    return;
  }
  const uint64_t seed = mix64(row_seed ^ uint64_t(key));
  if (init.kind == kUniform) {
    const float top = float(init.b), below = std::nextafter(top, float(init.a));
    for (size_t j = 0; j < dim; ++j) {
      const double u = double(mix64(seed + (uint64_t(j) + 1) * kGolden) >> 40) * 0x1p-24;
      const float x = float(init.a + (init.b - init.a) * u);
      values[j] = x == top ? below : x;  // rounding to float32 must not reach the open end
    }
    return;
  }
  // Eight uniform 16-bit numbers: mean 8 * 65535 / 2, variance 8 * (65536^2 - 1) / 12. Their sum is exact.
  const double scale = 1.0 / std::sqrt(8.0 * (65536.0 * 65536.0 - 1.0) / 12.0);
  for (size_t j = 0; j < dim; ++j) {
    int64_t sum = 0;
    for (uint64_t half = 1; half <= 2; ++half) {
      const uint64_t w = mix64(seed + (2 * uint64_t(j) + half) * kGolden);
      sum += int64_t((w & 0xffff) + (w >> 16 & 0xffff) + (w >> 32 & 0xffff) + (w >> 48));
    }
    values[j] = float(init.a + init.b * (double(sum - 262140) * scale));
  }
}

void Table::first_state(const float* values, float* s) const {
  switch (optimizer.kind) {
    case kSgd:
      for (size_t j = 0; j < state; ++j) s[j] = 0.0f;
      if (state && optimizer.dampening != 0.0) s[0] = std::nanf("");  // see sgd() in rows.inc
      return;
    case kAdagrad:
    case kRowwiseAdagrad:
      for (size_t j = 0; j < state; ++j) s[j] = float(optimizer.initial_accumulator);
      if (optimizer.counts) s[dim] = 0.0f;
      return;
    case kFtrl: {
      // FTRL computes a weight from z alone: z begins where its closed form gives the row's first values.
      const float pull = float(optimizer.beta / optimizer.lr + optimizer.l2), l1 = float(optimizer.l1);
      for (size_t j = 0; j < dim; ++j) {
        const float w = values[j];
        s[j] = w == 0.0f ? 0.0f : -w * pull - (w > 0.0f ? l1 : -l1);
        s[dim + j] = 0.0f;
      }
      return;
    }
    default:
      for (size_t j = 0; j < state; ++j) s[j] = 0.0f;
      if (optimizer.kind == kNadam) s[2 * dim + 1] = 1.0f;  // mu_product
  }
}

}  // namespace everstep
