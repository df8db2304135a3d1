// Loops over rows of float32, compiled three times (x86-64 baseline, AVX2, AVX-512) and chosen at run time.
//
// Every lane does the same IEEE operations in the same order whatever the width (no FMA contraction, sums in 16
// fixed lanes), so all three give the same bits, and so does the NumPy twin.
#pragma once
#include <cstddef>
#include <cstdint>

namespace everstep {

enum OptimizerKind : int {
  kSgd = 0,
  kAdagrad,
  kRowwiseAdagrad,
  kAdam,
  kAdamW,
  kFtrl,
  kRmsprop,
  kAdadelta,
  kAdamax,
  kNadam,
  kRadam,
  kOptimizerKinds
};

// What a push may say otherwise than the table's optimizer: TRAVELLING of model/table.py, in its order.
struct Options {
  double eps = 0, beta1 = 0, beta2 = 0, momentum = 0, dampening = 0, weight_decay = 0, alpha = 0, lr_decay = 0,
         momentum_decay = 0;
};
inline constexpr size_t kOptions = sizeof(Options) / sizeof(double);

struct Optimizer : Options {
  int kind = kSgd;
  bool nesterov = false, amsgrad = false, centered = false, decoupled = false;
  bool counts = false;  // Adagrad: a row counts its steps, for lr_decay
  double lr = 0, initial_accumulator = 0, l1 = 0, l2 = 0, beta = 0;
  // Adam: 1 - beta1^t and sqrt(1 - beta2^t) for t < bias_n; later ones by `bias_late`.
  const double* bias1 = nullptr;
  const float* bias2 = nullptr;
  size_t bias_n = 0;
  void (*bias_late)(const Optimizer&, double t, double* bias1, float* bias2) = nullptr;
};

struct RowKernels {
  const char* name;
  bool (*all_finite)(const float* x, size_t n);
  // hashes[i] = key_hash(keys[i], salt), partitions[i] = partition_of(hashes[i], n_partitions)
  void (*hash_keys)(const int64_t* keys, size_t n, uint64_t salt, uint32_t n_partitions, uint64_t* hashes,
                    uint32_t* partitions);
  // dst[i * dim ..] = src[i][0..dim). `stream`: past the caches (then `streamable` must hold; call `fence` at last).
  void (*copy_rows)(const float* const* src, float* dst, size_t n, size_t dim, bool stream);
  // One optimizer step on n rows; grads is [n, dim] without gaps.
  void (*update)(const Optimizer& opt, double lr, float* const* values, float* const* state, const float* grads,
                 size_t n, size_t dim);
  void (*fence)();
  void (*gather)(const float* rows, const int32_t* inverse, size_t n, size_t dim, float* out, size_t out_stride);
  // offsets: [b + 1], or null: every id is its own bag. weights: [n] or null.
  void (*bag_forward)(const float* rows, const int32_t* inverse, const int64_t* offsets, size_t b, size_t dim,
                      bool mean, const float* weights, float* out, size_t out_stride);
  // `add`: to what `out` has, otherwise over it.
  void (*bag_backward)(const float* grad, size_t grad_stride, const int32_t* inverse, const int64_t* offsets, size_t b,
                       size_t dim, bool mean, const float* weights, float* out, size_t u, bool add);
};

// Stores past the caches pay, as in memcpy, when what is written does not fit into them.
inline constexpr size_t kStreamBytes = size_t(16) << 20;
static inline bool streamable(const float* dst, size_t dim, size_t stride) {
  return dim % 16 == 0 && stride % 16 == 0 && (reinterpret_cast<uintptr_t>(dst) & 63) == 0;
}

extern const RowKernels kRowsBase;
#if defined(__x86_64__)
extern const RowKernels kRowsAvx2;
extern const RowKernels kRowsAvx512;
#endif

// The widest that this machine runs; EVERSTEP_ISA=base|avx2|avx512 narrows it.
const RowKernels& row_kernels();

}  // namespace everstep
