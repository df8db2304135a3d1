// What random rows cost on this machine: the ceiling for any kernel, and our update kernel knowing where its rows are.
// Compiled by benchmarks/kernels.py together with native/rows*.cpp; rows of `stride` floats, values then state.
#include <cstddef>
#include <cstdint>

#include "rows.h"

using namespace everstep;

namespace {
void prefetch(const float* row, size_t floats, bool write) {
  const char* p = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < floats * 4; at += 64) write ? __builtin_prefetch(p + at, 1) : __builtin_prefetch(p + at);
}
constexpr size_t kAhead = 16, kRows = 4;
}  // namespace

extern "C" {

// Reads every row once and adds it up: nothing that reads random rows can be faster.
float ceiling_read(const float* rows, const uint32_t* at, size_t n, size_t dim, size_t stride) {
  float lanes[16] = {};
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch(rows + size_t(at[i + kAhead]) * stride, dim, false);
    const float* row = rows + size_t(at[i]) * stride;
    for (size_t j = 0; j + 16 <= dim; j += 16) {
      for (size_t l = 0; l < 16; ++l) lanes[l] += row[j + l];
    }
  }
  float sum = 0;
  for (float x : lanes) sum += x;
  return sum;
}

// Reads, changes and writes every row once.
void ceiling_update(float* rows, const uint32_t* at, size_t n, size_t dim, size_t stride) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch(rows + size_t(at[i + kAhead]) * stride, dim, true);
    float* row = rows + size_t(at[i]) * stride;
    for (size_t j = 0; j < dim; ++j) row[j] += 1.0f;
  }
}

// One step of the optimizer's kernel on rows whose places are known: no index, no lock, no ledger, no finite check.
void bare_update(int kind, float* rows, const uint32_t* at, const float* grads, size_t n, size_t dim, size_t stride) {
  Optimizer optimizer;
  optimizer.kind = kind;
  optimizer.lr = 0.01;
  optimizer.eps = 1e-8;
  const RowKernels& kernels = row_kernels();
  for (size_t i = 0; i < n && i < kAhead; ++i) prefetch(rows + size_t(at[i]) * stride, stride, true);
  for (size_t first = 0; first < n; first += kRows) {
    float *values[kRows], *state[kRows];
    const size_t m = n - first < kRows ? n - first : kRows;
    for (size_t k = 0; k < m; ++k) {
      values[k] = rows + size_t(at[first + k]) * stride;
      state[k] = values[k] + dim;
      if (first + k + kAhead < n) prefetch(rows + size_t(at[first + k + kAhead]) * stride, stride, true);
    }
    kernels.update(optimizer, 0.01, values, state, grads + first * dim, m, dim);
  }
}
}
