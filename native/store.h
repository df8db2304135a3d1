// All buckets that one ps owns: rows, optimizer state, watermarks, fences, fingerprints.
//
// A bucket is one critical section: every method below takes a bucket's mutex for what it does to that bucket, and
// nothing else of it is shared. Lock order: open_mutex_ > a bucket's mutex > the pool's mutex.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "hash.h"
#include "pool.h"
#include "rows.h"

namespace everstep {

struct Malformed : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
struct NotOwned : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum InitKind : int { kConstant = 0, kUniform, kNormal, kInitKinds };

struct Init {
  int kind = kConstant;
  double a = 0, b = 0;
};

struct Table {
  uint32_t id = 0;
  size_t index = 0;  // position in Bucket::rows
  size_t dim = 0, state = 0;
  uint64_t salt = 0, row_seed = 0;
  Optimizer optimizer;
  Init init;
  // A page holds 2^page_bits slots: their keys int64, then per slot values float32[dim] and state float32[state], side
  // by side: an update touches one place in memory instead of two.
  int page_bits = 0;
  size_t values_at = 0, page_bytes = 0;
  std::vector<double> bias1;
  std::vector<float> bias2;

  // The row of `key` as it is before any update: a pure function of (seed, table, key).
  void first_values(int64_t key, float* values) const;
  void first_state(const float* values, float* state) const;
};

// The rows of one table in one bucket: pages of slots (a slot never moves) and an open-addressing index.
class Rows {
 public:
  Rows(const Table& table, Pool& pool) : table_(table), pool_(pool) {}

  static constexpr uint32_t kNone = 0xffffffffu;

  uint32_t find(int64_t key, uint64_t hash) const;
  // Makes the row, from `values` or, if null, as it begins. The key must not be there.
  uint32_t insert(int64_t key, uint64_t hash, const float* values);
  void prefetch(const uint64_t* hashes, size_t n) const {
    const Entry* entries = entries_.load(std::memory_order_relaxed);
    const uint64_t mask = mask_.load(std::memory_order_relaxed);
    for (size_t i = 0; entries && i < n; ++i) __builtin_prefetch(entries + (hashes[i] & mask) * kGroup);
  }

  uint32_t count() const { return count_; }
  int64_t key(uint32_t slot) const { return reinterpret_cast<const int64_t*>(page(slot))[in_page(slot)]; }
  float* values(uint32_t slot) const {
    return reinterpret_cast<float*>(page(slot) + table_.values_at) + in_page(slot) * (table_.dim + table_.state);
  }
  float* state(uint32_t slot) const { return values(slot) + table_.dim; }

 private:
  struct Entry {
    int64_t key;
    uint32_t slot;  // kNone: empty
  };
  static constexpr uint64_t kGroup = 4;
  Entry* entry_of(int64_t key, uint64_t hash) const;
  static Entry* free_entry(Entry* entries, uint64_t mask, uint64_t hash);
  uint8_t* page(uint32_t slot) const { return pages_[slot >> table_.page_bits]; }
  size_t in_page(uint32_t slot) const { return slot & ((size_t(1) << table_.page_bits) - 1); }
  void grow();

  const Table& table_;
  Pool& pool_;
  // Atomic only because other threads prefetch by them without the bucket's mutex.
  std::atomic<Entry*> entries_{nullptr};
  std::atomic<uint64_t> mask_{0};  // groups - 1
  uint32_t count_ = 0;
  std::vector<uint8_t*> pages_;
};

struct ShardMark {
  int64_t watermark = 0;
  int64_t fence = 0;
};

struct alignas(64) Bucket {
  std::mutex mutex;
  std::atomic<bool> owned{false};
  uint64_t fingerprint = 0;
  std::unordered_map<int64_t, ShardMark> shards;
  std::vector<std::unique_ptr<Rows>> rows;  // by Table::index
};

struct PushPart {
  uint32_t table = 0;
  const int64_t* keys = nullptr;
  const float* grads = nullptr;  // [n, dim]
  size_t n = 0, dim = 0;
  double lr = -1;
};

struct PushOutcome {
  int applied = 0, repeats = 0;
  int64_t gap = -1;
  bool fenced = false;
  int64_t nonfinite = -1;
  std::string buckets;  // bitmap of those that applied; empty if none or all owned
};

// Shards that are over for ever: one bit a shard, in blocks of 4096, so that 10^5 shards cost 12 kB.
class ShardSet {
 public:
  void add(int64_t shard) {
    auto& block = blocks_[uint64_t(shard) >> 12];
    if (block.empty()) block.resize(64);
    block[(uint64_t(shard) >> 6) & 63] |= uint64_t(1) << (shard & 63);
  }
  bool has(int64_t shard) const {
    auto found = blocks_.find(uint64_t(shard) >> 12);
    return found != blocks_.end() && (found->second[(uint64_t(shard) >> 6) & 63] >> (shard & 63) & 1);
  }

 private:
  std::unordered_map<uint64_t, std::vector<uint64_t>> blocks_;
};

class Store {
 public:
  Store(uint32_t n_buckets, uint64_t seed);

  uint32_t n_buckets() const { return n_buckets_; }
  size_t dim_of(uint32_t table) const { return table_of(table).dim; }
  size_t state_of(uint32_t table) const { return table_of(table).state; }

  void own(const std::vector<int64_t>& buckets);
  std::vector<int32_t> owned() const;
  // False if the table was there.
  bool declare(uint32_t id, size_t dim, const Optimizer& optimizer, const Init& init);
  bool open(int64_t shard, int64_t start, int64_t lease, std::vector<int32_t>& buckets, std::vector<int64_t>& marks);
  void pull(uint32_t table, const int64_t* keys, size_t n, float* out, bool create);
  PushOutcome push(int64_t shard, int64_t lo, int64_t hi, int64_t lease, const std::string& buckets,
                   const std::vector<PushPart>& parts, bool skipped);
  int64_t put_absent(uint32_t table, const int64_t* keys, const float* rows, size_t n);
  void locate(uint32_t table, const int64_t* keys, size_t n, int64_t* slots);
  void release(const std::vector<int64_t>& shards);
  bool watermarks(int64_t shard, std::vector<int32_t>& buckets, std::vector<int64_t>& marks);
  std::vector<int64_t> shards();
  // Copies up to `limit` rows; the buffers must hold them. Returns how many; next is -1 after the last one.
  size_t scan(uint32_t table, int64_t bucket, int64_t slot, size_t limit, int64_t* keys, float* values, float* state,
              int64_t& next);
  size_t count(uint32_t table, int64_t bucket);
  void fingerprints(uint64_t* out);

  std::vector<std::pair<uint32_t, uint64_t>> rows_by_table();
  size_t mapped_bytes() const { return pool_.mapped_bytes(); }
  uint64_t pushes() const { return pushes_.load(); }
  uint64_t pulls() const { return pulls_.load(); }

 private:
  const Table& table_of(uint32_t id) const;
  Bucket& bucket_checked(int64_t bucket);
  template <class Each>
  void each_run(const Table& table, const int64_t* keys, size_t n, Each&& each);
  template <class Each>
  void each_owned(Each&& each);

  const uint32_t n_buckets_;
  const uint64_t seed_;
  const RowKernels& kernels_;
  Pool pool_;
  std::unique_ptr<Bucket[]> buckets_;
  mutable std::shared_mutex tables_mutex_;
  std::unordered_map<uint32_t, std::unique_ptr<Table>> tables_;
  std::mutex open_mutex_;  // open and release: a shard cannot be opened while it is being released
  ShardSet released_;
  std::atomic<uint64_t> pushes_{0}, pulls_{0};
};

uint64_t batch_fingerprint(int64_t shard, int64_t lo, int64_t hi);

}  // namespace everstep
