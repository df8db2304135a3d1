// What a table is: its rows' shape, how they begin, and how a page of them lies in memory, on the wire and in images.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "hash.h"
#include "rows.h"

namespace everstep {

struct Malformed : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

enum InitKind : int { kConstant = 0, kUniform, kNormal, kInitKinds };

struct Init {
  int kind = kConstant;
  double a = 0, b = 0;
};

// When rows are made and freed. 0: off.
struct LifeCycle {
  uint32_t admit_after = 0;     // pushes of a key that only count it, before its row is made
  uint32_t expire_batches = 0;  // pushes of its partition without it after which a row may be freed
  uint32_t expire_s = 0;        // the same in seconds

  bool any() const { return admit_after || expire_batches || expire_s; }
};

// The meta words of a record: that of a table with a life cycle has the first two, that of a candidate all.
enum Meta : int { kPushedClock = 0, kPushedAt, kSightings, kCandidateMeta };

// A page holds 2^page_bits slots: the head = bitmap of used slots (padded to 64 bytes) and their keys int64; then the
// body = records, each float32 values[dim], float32 state[state], uint32 meta[meta]: an update touches one place in
// memory. Whatever is not used is zero bytes, so that pages XOR. page_bits follows from the record's size alone.
struct Table {
  uint32_t id = 0;
  size_t index = 0;  // position in Partition::rows
  size_t dim = 0, state = 0, meta = 0;
  uint64_t salt = 0, row_seed = 0;
  Optimizer optimizer;
  Init init;
  // All its rows change at every push: mirrors make the update once more, each on a copy of its own, instead of summing
  // differences that would be as long as values and state (docs/decisions/0017).
  bool dense = false;
  LifeCycle life;
  // Counts the pushes of keys that have no row yet: records of meta alone, in the partitions of this table's keys.
  // Null: every key is admitted at once.
  const Table* candidates = nullptr;
  int page_bits = 0;
  size_t record_bytes = 0, keys_at = 0, head_bytes = 0, page_bytes = 0;
  std::vector<double> bias1;
  std::vector<float> bias2;

  // Sets page_bits and the sizes from dim, state and meta.
  void lay_out();
  size_t slots() const { return size_t(1) << page_bits; }

  static uint64_t* bitmap(uint8_t* page) { return reinterpret_cast<uint64_t*>(page); }
  static const uint64_t* bitmap(const uint8_t* page) { return reinterpret_cast<const uint64_t*>(page); }
  size_t bitmap_words() const { return (slots() + 63) / 64; }
  int64_t* keys(uint8_t* page) const { return reinterpret_cast<int64_t*>(page + keys_at); }
  const int64_t* keys(const uint8_t* page) const { return reinterpret_cast<const int64_t*>(page + keys_at); }
  uint8_t* record(uint8_t* page, size_t i) const { return page + head_bytes + i * record_bytes; }
  const uint8_t* record(const uint8_t* page, size_t i) const { return page + head_bytes + i * record_bytes; }

  // The row of `key` as it is before any update: a pure function of (seed, table, key).
  void first_values(int64_t key, float* values) const;
  void first_state(const float* values, float* state) const;
};

// The optimizer with other options. Throws Malformed where it cannot go by them: no number that can be, or one that the
// state of its rows was not made for.
Optimizer with_options(const Optimizer& of, const Options& options);

// dst ^= src. Both may be unaligned.
static inline void xor_bytes(uint8_t* __restrict dst, const uint8_t* __restrict src, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t a, b;
    std::memcpy(&a, dst + i, 8);
    std::memcpy(&b, src + i, 8);
    a ^= b;
    std::memcpy(dst + i, &a, 8);
  }
  for (; i < n; ++i) dst[i] ^= src[i];
}

// dst = a ^ b, in one go. All may be unaligned; dst is apart from both.
static inline void xor_of(uint8_t* __restrict dst, const uint8_t* __restrict a, const uint8_t* __restrict b, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t x, y;
    std::memcpy(&x, a + i, 8);
    std::memcpy(&y, b + i, 8);
    x ^= y;
    std::memcpy(dst + i, &x, 8);
  }
  for (; i < n; ++i) dst[i] = a[i] ^ b[i];
}

}  // namespace everstep
