#include "store.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace everstep {

namespace {

constexpr size_t kAhead = 24;  // lookups whose index lines are on their way
constexpr size_t kChunk = 128;  // keys handled between two looks at the next bucket
constexpr size_t kBlock = 8;   // rows whose lines are fetched while those of the block before are used
constexpr int64_t kMaxBatch = int64_t(1) << 24;
constexpr size_t kBiasRows = 65536;
constexpr uint32_t kMaxBuckets = 4096;
constexpr size_t kMaxTables = 1024;

size_t align64(size_t x) { return (x + 63) & ~size_t(63); }

void late_bias(const Optimizer& o, double t, double* bias1, float* bias2) {
  *bias1 = 1.0 - std::pow(o.beta1, t);
  *bias2 = float(std::sqrt(1.0 - std::pow(o.beta2, t)));
}

void prefetch_row(const float* at, size_t floats) {
  const char* p = reinterpret_cast<const char*>(at);
  const size_t bytes = std::min<size_t>(floats * 4, 512);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
  __builtin_prefetch(p + bytes - 4);
}

void prefetch_row_write(float* at, size_t floats) {
  char* p = reinterpret_cast<char*>(at);
  const size_t bytes = std::min<size_t>(floats * 4, 1024);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 1);
  __builtin_prefetch(p + bytes - 4, 1);  // rows do not begin at a line's start
}

bool bit(const std::string& bitmap, uint32_t b) {
  return (b >> 3) < bitmap.size() && (uint8_t(bitmap[b >> 3]) >> (b & 7) & 1);
}

}  // namespace

uint64_t batch_fingerprint(int64_t shard, int64_t lo, int64_t hi) {
  const uint64_t epoch = mix64(uint64_t(shard) >> 32);
  uint64_t sum = 0;
  for (int64_t p = lo; p < hi; ++p) sum += mix64(epoch + uint64_t(p));
  return sum;
}

// ---------------------------------------------------------------- Table

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
  }
}

// ---------------------------------------------------------------- Rows

// Four entries fill a cache line and are compared without a branch between them: a miss of the branch predictor costs
// as much as the rest of a lookup. A group that has a free entry ends the search.
inline Rows::Entry* Rows::entry_of(int64_t key, uint64_t hash) const {
  Entry* entries = entries_.load(std::memory_order_relaxed);
  if (!entries) return nullptr;
  const uint64_t mask = mask_.load(std::memory_order_relaxed);
  for (uint64_t g = hash & mask;; g = (g + 1) & mask) {
    Entry* e = entries + g * kGroup;
    const unsigned hit = unsigned(e[0].key == key) | unsigned(e[1].key == key) << 1 | unsigned(e[2].key == key) << 2 |
                         unsigned(e[3].key == key) << 3;
    if (hit) {
      Entry* found = e + __builtin_ctz(hit);
      if (found->slot != kNone) return found;
      return nullptr;  // key 0 looks like the first free entry; it would stand before that one
    }
    if (e[kGroup - 1].slot == kNone) return nullptr;  // groups fill from the front
  }
}

inline uint32_t Rows::find(int64_t key, uint64_t hash) const {
  const Entry* entry = entry_of(key, hash);
  return entry ? entry->slot : kNone;
}

// The free entry where `hash` goes; there is one.
inline Rows::Entry* Rows::free_entry(Entry* entries, uint64_t mask, uint64_t hash) {
  for (uint64_t g = hash & mask;; g = (g + 1) & mask) {
    for (Entry* e = entries + g * kGroup; e != entries + (g + 1) * kGroup; ++e) {
      if (e->slot == kNone) return e;
    }
  }
}

void Rows::grow() {
  Entry* old = entries_.load(std::memory_order_relaxed);
  const uint64_t old_size = old ? (mask_.load(std::memory_order_relaxed) + 1) * kGroup : 0;
  const uint64_t size = old ? old_size * 2 : 16;
  const uint64_t mask = size / kGroup - 1;
  auto* fresh = reinterpret_cast<Entry*>(pool_.take(size * sizeof(Entry)));
  for (uint64_t i = 0; i < size; ++i) fresh[i] = Entry{0, kNone};
  for (uint64_t i = 0; i < old_size; ++i) {
    if (old[i].slot != kNone) *free_entry(fresh, mask, key_hash(old[i].key, table_.salt)) = old[i];
  }
  entries_.store(fresh, std::memory_order_relaxed);
  mask_.store(mask, std::memory_order_relaxed);
  if (old) pool_.give(reinterpret_cast<uint8_t*>(old), old_size * sizeof(Entry));
}

uint32_t Rows::insert(int64_t key, uint64_t hash, const float* values) {
  const bool some = entries_.load(std::memory_order_relaxed) != nullptr;
  const uint64_t size = some ? (mask_.load(std::memory_order_relaxed) + 1) * kGroup : 0;
  if ((uint64_t(count_) + 1) * 10 > size * 7) grow();
  const uint32_t slot = count_;
  if (slot == kNone - 1) throw std::runtime_error("a bucket holds at most 2^32 - 2 rows of a table: use more buckets");
  if ((slot >> table_.page_bits) == pages_.size()) pages_.push_back(pool_.take(table_.page_bytes));
  reinterpret_cast<int64_t*>(page(slot))[in_page(slot)] = key;
  float* at = this->values(slot);
  if (values) {
    std::memcpy(at, values, table_.dim * sizeof(float));
  } else {
    table_.first_values(key, at);
  }
  table_.first_state(at, state(slot));
  *free_entry(entries_.load(std::memory_order_relaxed), mask_.load(std::memory_order_relaxed), hash) =
      Entry{key, slot};
  ++count_;
  return slot;
}

// ---------------------------------------------------------------- Store

Store::Store(uint32_t n_buckets, uint64_t seed) : n_buckets_(n_buckets), seed_(seed), kernels_(row_kernels()) {
  if (n_buckets == 0 || n_buckets > kMaxBuckets) throw Malformed("n_buckets must be in 1..4096");
  buckets_ = std::make_unique<Bucket[]>(n_buckets);
  // Never reallocated: each_run looks at another bucket's rows (to prefetch) without its mutex.
  for (uint32_t b = 0; b < n_buckets; ++b) buckets_[b].rows.reserve(kMaxTables);
}

void Store::own(const std::vector<int64_t>& buckets) {
  for (int64_t b : buckets) {
    if (b < 0 || b >= int64_t(n_buckets_)) throw Malformed("bucket " + std::to_string(b) + " does not exist");
  }
  for (int64_t b : buckets) {
    std::lock_guard<std::mutex> hold(buckets_[b].mutex);
    buckets_[b].owned = true;
  }
}

std::vector<int32_t> Store::owned() const {
  std::vector<int32_t> out;
  for (uint32_t b = 0; b < n_buckets_; ++b) {
    if (buckets_[b].owned) out.push_back(int32_t(b));
  }
  return out;
}

const Table& Store::table_of(uint32_t id) const {
  std::shared_lock<std::shared_mutex> hold(tables_mutex_);
  auto found = tables_.find(id);
  if (found == tables_.end()) throw Malformed("table " + std::to_string(id) + " was not declared");
  return *found->second;  // tables are never dropped
}

Bucket& Store::bucket_checked(int64_t bucket) {
  if (bucket < 0 || bucket >= int64_t(n_buckets_)) throw Malformed("bucket " + std::to_string(bucket) + " does not exist");
  if (!buckets_[bucket].owned) throw NotOwned("bucket " + std::to_string(bucket) + " is not owned here");
  return buckets_[bucket];
}

template <class Each>
void Store::each_owned(Each&& each) {
  for (uint32_t b = 0; b < n_buckets_; ++b) {
    Bucket& bucket = buckets_[b];
    if (!bucket.owned) continue;
    std::lock_guard<std::mutex> hold(bucket.mutex);
    each(b, bucket);
  }
}

// Calls each(rows, hashes, first, count, left) for stretches of at most kChunk of the `left` keys that are left of one
// bucket. The index lines of the first kAhead of a bucket are on their way; `each` sees to the others. The bucket is owned; its mutex is held during the call.
template <class Each>
void Store::each_run(const Table& table, const int64_t* keys, size_t n, Each&& each) {
  thread_local std::vector<uint64_t> hashes;
  thread_local std::vector<uint32_t> in;
  hashes.resize(n);
  in.resize(n);
  kernels_.hash_keys(keys, n, table.salt, n_buckets_, hashes.data(), in.data());
  // Refuse before anything is made, so that a stale map changes nothing.
  for (size_t i = 0; i < n; ++i) {
    if ((i == 0 || in[i] != in[i - 1]) && !buckets_[in[i]].owned)
      throw NotOwned("bucket " + std::to_string(in[i]) + " of key " + std::to_string(keys[i]) + " is not owned here");
  }
  auto run_end = [&](size_t from) {
    size_t to = from + 1;
    while (to < n && in[to] == in[from]) ++to;
    return to;
  };
  size_t end = n ? run_end(0) : 0;
  for (size_t i = 0; i < n;) {
    Bucket& bucket = buckets_[in[i]];
    std::lock_guard<std::mutex> hold(bucket.mutex);
    Rows& rows = *bucket.rows[table.index];
    if (i == 0) rows.prefetch(hashes.data(), std::min(end, kAhead));
    for (; i < end; i += std::min(kChunk, end - i))
      each(rows, hashes.data() + i, i, std::min(kChunk, end - i), end - i);
    if (i == n) break;
    end = run_end(i);
    buckets_[in[i]].rows[table.index]->prefetch(hashes.data() + i, std::min(end - i, kAhead));
  }
}

bool Store::declare(uint32_t id, size_t dim, const Optimizer& optimizer, const Init& init) {
  if (dim == 0 || dim > 65536) throw Malformed("dim must be in 1..65536");
  if (optimizer.kind < 0 || optimizer.kind >= kOptimizerKinds) throw Malformed("unknown optimizer");
  if (init.kind < 0 || init.kind >= kInitKinds) throw Malformed("unknown init");
  std::unique_lock<std::shared_mutex> hold(tables_mutex_);
  if (tables_.count(id)) return false;  // the caller compares the specs
  if (tables_.size() == kMaxTables) throw Malformed("a job has at most 1024 tables");
  auto table = std::make_unique<Table>();
  Table& t = *table;
  t.id = id;
  t.index = tables_.size();
  t.dim = dim;
  t.optimizer = optimizer;
  t.init = init;
  t.salt = table_salt(id);
  t.row_seed = mix64(seed_ + kGolden * (uint64_t(id) + 1));
  switch (optimizer.kind) {
    case kSgd: t.state = optimizer.momentum > 0 ? dim : 0; break;
    case kAdagrad: t.state = dim; break;
    case kRowwiseAdagrad: t.state = 1; break;
    case kFtrl: t.state = 2 * dim; break;
    default: t.state = 2 * dim + 1;
  }
  const size_t record = sizeof(int64_t) + (t.dim + t.state) * sizeof(float);
  t.page_bits = 3;
  while (t.page_bits < 10 && (record << (t.page_bits + 1)) <= (size_t(32) << 10)) ++t.page_bits;
  const size_t slots = size_t(1) << t.page_bits;
  t.values_at = slots * sizeof(int64_t);
  t.page_bytes = t.values_at + align64(slots * (t.dim + t.state) * sizeof(float));
  if (optimizer.kind == kAdam || optimizer.kind == kAdamW) {
    for (size_t step = 0; step < kBiasRows; ++step) {
      double b1;
      float b2;
      late_bias(optimizer, double(step), &b1, &b2);
      t.bias1.push_back(b1);
      t.bias2.push_back(b2);
      if (step && b1 == 1.0 && b2 == 1.0f) break;
    }
    t.optimizer.bias1 = t.bias1.data();
    t.optimizer.bias2 = t.bias2.data();
    t.optimizer.bias_n = t.bias1.size();
    t.optimizer.bias_late = late_bias;
  }
  for (uint32_t b = 0; b < n_buckets_; ++b) {
    std::lock_guard<std::mutex> bucket_hold(buckets_[b].mutex);
    buckets_[b].rows.push_back(std::make_unique<Rows>(t, pool_));
  }
  tables_.emplace(id, std::move(table));
  return true;
}

bool Store::open(int64_t shard, int64_t start, int64_t lease, std::vector<int32_t>& buckets,
                 std::vector<int64_t>& marks) {
  if (shard < 0 || start < 0 || lease < 0) throw Malformed("shard, start and lease must not be negative");
  std::lock_guard<std::mutex> hold(open_mutex_);
  if (released_.has(shard)) return false;
  // Fences only rise, so a bucket that answers "later" says it for good: look first, then raise all.
  bool fenced = false;
  each_owned([&](uint32_t, Bucket& bucket) {
    auto found = bucket.shards.find(shard);
    fenced |= found != bucket.shards.end() && found->second.fence > lease;
  });
  if (fenced) return false;
  each_owned([&](uint32_t b, Bucket& bucket) {
    auto [at, made] = bucket.shards.try_emplace(shard, ShardMark{start, lease});
    if (!made) at->second.fence = std::max(at->second.fence, lease);
    buckets.push_back(int32_t(b));
    marks.push_back(at->second.watermark);
  });
  return true;
}

void Store::pull(uint32_t table, const int64_t* keys, size_t n, float* out, bool create) {
  const Table& t = table_of(table);
  pulls_.fetch_add(1, std::memory_order_relaxed);
  const bool stream = n * t.dim * sizeof(float) >= kStreamBytes && streamable(out, t.dim, t.dim);
  each_run(t, keys, n, [&](Rows& rows, const uint64_t* hashes, size_t first, size_t m, size_t left) {
    uint32_t slots[kChunk];
    const float* from[kChunk];
    bool all = true;
    float* to = out + first * t.dim;
    size_t copied = 0;
    for (size_t k = 0; k < m; ++k) {
      if (k + kAhead < left) rows.prefetch(hashes + k + kAhead, 1);
      slots[k] = rows.find(keys[first + k], hashes[k]);
      if (slots[k] == Rows::kNone) {
        if (create) slots[k] = rows.insert(keys[first + k], hashes[k], nullptr);
        all &= create;
      }
      if (slots[k] != Rows::kNone) {
        from[k] = rows.values(slots[k]);
        prefetch_row(from[k], t.dim);
      }
      if (all && k + 1 == copied + 2 * kBlock) {
        kernels_.copy_rows(from + copied, to + copied * t.dim, kBlock, t.dim, stream);
        copied += kBlock;
      }
    }
    if (all) {
      kernels_.copy_rows(from + copied, to + copied * t.dim, m - copied, t.dim, stream);
      return;
    }
    for (size_t k = 0; k < m; ++k) {
      if (slots[k] == Rows::kNone) {
        t.first_values(keys[first + k], to + k * t.dim);
      } else {
        std::memcpy(to + k * t.dim, from[k], t.dim * sizeof(float));
      }
    }
  });
  if (stream) kernels_.fence();
}

void Store::locate(uint32_t table, const int64_t* keys, size_t n, int64_t* slots) {
  each_run(table_of(table), keys, n, [&](Rows& rows, const uint64_t* hashes, size_t first, size_t m, size_t left) {
    for (size_t k = 0; k < m; ++k) {
      if (k + kAhead < left) rows.prefetch(hashes + k + kAhead, 1);
      const uint32_t slot = rows.find(keys[first + k], hashes[k]);
      slots[first + k] = slot == Rows::kNone ? -1 : int64_t(slot);
    }
  });
}

int64_t Store::put_absent(uint32_t table, const int64_t* keys, const float* values, size_t n) {
  const Table& t = table_of(table);
  if (!kernels_.all_finite(values, n * t.dim)) throw Malformed("initial rows hold NaN or Inf");
  int64_t made = 0;
  each_run(t, keys, n, [&](Rows& rows, const uint64_t* hashes, size_t first, size_t m, size_t left) {
    for (size_t k = 0; k < m; ++k) {
      if (k + kAhead < left) rows.prefetch(hashes + k + kAhead, 1);
      if (rows.find(keys[first + k], hashes[k]) != Rows::kNone) continue;
      rows.insert(keys[first + k], hashes[k], values + (first + k) * t.dim);
      ++made;
    }
  });
  return made;
}

namespace {

struct Run {
  uint32_t bucket;
  size_t begin, end;
};

struct PartWork {
  const Table* table = nullptr;
  const PushPart* part = nullptr;
  double lr = 0;
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> buckets;
  std::vector<uint32_t> slots;
  std::vector<Run> runs;
  size_t cursor = 0;
  size_t missing = 0;  // keys without a row yet

  const Run* at(uint32_t bucket) {
    while (cursor < runs.size() && runs[cursor].bucket < bucket) ++cursor;
    return cursor < runs.size() && runs[cursor].bucket == bucket ? &runs[cursor] : nullptr;
  }
};

// Rows of one part in one bucket: looked up or updated while the next piece's lines are on their way.
struct Piece {
  size_t part, begin, end;
};

void cut_pieces(std::vector<PartWork>& works, size_t n_parts, uint32_t bucket, size_t size,
                std::vector<Piece>& pieces) {
  pieces.clear();
  for (size_t p = 0; p < n_parts; ++p) {
    const Run* run = works[p].at(bucket);
    if (!run) continue;
    for (size_t at = run->begin; at < run->end; at += size)
      pieces.push_back(Piece{p, at, std::min(run->end, at + size)});
  }
}

void check_missing_unique(const PartWork& work) {
  if (work.missing < 2) return;
  std::vector<int64_t> missing;
  for (size_t i = 0; i < work.part->n; ++i) {
    if (work.slots[i] == Rows::kNone) missing.push_back(work.part->keys[i]);
  }
  std::sort(missing.begin(), missing.end());
  auto twice = std::adjacent_find(missing.begin(), missing.end());
  if (twice != missing.end()) throw Malformed("key " + std::to_string(*twice) + " stands twice in one push");
}

}  // namespace

PushOutcome Store::push(int64_t shard, int64_t lo, int64_t hi, int64_t lease, const std::string& addressed,
                        const std::vector<PushPart>& parts, bool skipped) {
  if (shard < 0 || lease < 0) throw Malformed("shard and lease must not be negative");
  if (lo < 0 || hi <= lo || hi - lo > kMaxBatch)
    throw Malformed("[" + std::to_string(lo) + ", " + std::to_string(hi) + ") is not a range of at most 2^24 samples");
  if (skipped && !parts.empty()) throw Malformed("a skipped range has no rows");
  if (!addressed.empty()) {
    if (addressed.size() != (n_buckets_ + 7) / 8) throw Malformed("the bitmap of buckets has the wrong length");
    for (uint32_t b = 0; b < addressed.size() * 8; ++b) {
      if (!bit(addressed, b)) continue;
      if (b >= n_buckets_) throw Malformed("bucket " + std::to_string(b) + " does not exist");
      if (!buckets_[b].owned) throw NotOwned("bucket " + std::to_string(b) + " is not owned here");
    }
  }
  auto is_addressed = [&](uint32_t b) { return buckets_[b].owned && (addressed.empty() || bit(addressed, b)); };

  // 1. Everything that can be wrong with the request, before anything changes.
  PushOutcome out;
  thread_local std::vector<PartWork> works;
  if (works.size() < parts.size()) works.resize(parts.size());
  std::unordered_set<uint32_t> seen;
  for (size_t p = 0; p < parts.size(); ++p) {
    const PushPart& part = parts[p];
    PartWork& work = works[p];
    if (!seen.insert(part.table).second) throw Malformed("table " + std::to_string(part.table) + " stands twice in one push");
    work.table = &table_of(part.table);
    work.part = &part;
    work.lr = part.lr < 0 ? work.table->optimizer.lr : part.lr;
    work.cursor = work.missing = 0;
    work.runs.clear();
    if (!std::isfinite(part.lr)) throw Malformed("the learning rate is not finite");
    if (work.table->optimizer.kind == kFtrl && work.lr == 0) throw Malformed("FTRL needs a learning rate above 0");
    if (work.table->dim != part.dim) throw Malformed("rows of " + std::to_string(part.dim) + " floats for a table of dim " +
                                                     std::to_string(work.table->dim));
    work.hashes.resize(part.n);
    work.buckets.resize(part.n);
    work.slots.resize(part.n);
    kernels_.hash_keys(part.keys, part.n, work.table->salt, n_buckets_, work.hashes.data(), work.buckets.data());
    for (size_t i = 0; i < part.n; ++i) {
      const uint32_t b = work.buckets[i];
      if (work.runs.empty() || work.runs.back().bucket != b) {
        if (!work.runs.empty() && work.runs.back().bucket > b) throw Malformed("keys are not grouped by ascending bucket");
        if (!buckets_[b].owned) throw NotOwned("bucket " + std::to_string(b) + " is not owned here");
        if (!is_addressed(b)) throw Malformed("a key's bucket is not among those addressed");
        work.runs.push_back(Run{b, i, i + 1});
      } else {
        work.runs.back().end = i + 1;
      }
    }
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    if (!kernels_.all_finite(parts[p].grads, parts[p].n * parts[p].dim)) {
      out.nonfinite = parts[p].table;
      return out;
    }
  }
  // Where the rows are; a slot never moves, so this holds when the bucket is locked again below.
  thread_local std::vector<Piece> pieces;
  thread_local std::vector<uint64_t> seen_slots;
  for (uint32_t b = 0; b < n_buckets_; ++b) {
    cut_pieces(works, parts.size(), b, size_t(1) << 40, pieces);
    if (pieces.empty()) continue;
    Bucket& bucket = buckets_[b];
    auto prefetch = [&](const Piece& piece) {
      const PartWork& work = works[piece.part];
      bucket.rows[work.table->index]->prefetch(work.hashes.data() + piece.begin,
                                             std::min(kAhead, piece.end - piece.begin));
    };
    prefetch(pieces[0]);
    std::lock_guard<std::mutex> hold(bucket.mutex);
    bool twice = false;
    for (size_t q = 0; q < pieces.size(); ++q) {
      if (q + 1 < pieces.size()) prefetch(pieces[q + 1]);
      PartWork& work = works[pieces[q].part];
      Rows& rows = *bucket.rows[work.table->index];
      // Slots seen in this run: finds duplicate keys. All zero between runs, so that nothing but what was set is cleared.
      if (seen_slots.size() * 64 < rows.count()) seen_slots.resize(rows.count() / 64 + 1);
      for (size_t i = pieces[q].begin; i < pieces[q].end; ++i) {
        if (i + kAhead < pieces[q].end) rows.prefetch(work.hashes.data() + i + kAhead, 1);
        const uint32_t slot = work.slots[i] = rows.find(work.part->keys[i], work.hashes[i]);
        if (slot == Rows::kNone) {
          ++work.missing;
          continue;
        }
        const uint64_t bit = uint64_t(1) << (slot & 63);
        twice |= (seen_slots[slot >> 6] & bit) != 0;
        seen_slots[slot >> 6] |= bit;
      }
      for (size_t i = pieces[q].begin; i < pieces[q].end; ++i) {
        if (work.slots[i] != Rows::kNone) seen_slots[work.slots[i] >> 6] = 0;
      }
    }
    if (twice) throw Malformed("a key stands twice in one push");
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    works[p].cursor = 0;
    check_missing_unique(works[p]);
  }

  // 2. Bucket by bucket: fence, watermark, rows, fingerprint in one critical section.
  pushes_.fetch_add(1, std::memory_order_relaxed);
  const uint64_t fingerprint = skipped ? 0 : batch_fingerprint(shard, lo, hi);
  std::string applied((n_buckets_ + 7) / 8, '\0');
  int owned = 0;
  for (uint32_t b = 0; b < n_buckets_; ++b) {
    Bucket& bucket = buckets_[b];
    owned += bucket.owned ? 1 : 0;
    if (!is_addressed(b)) continue;
    std::lock_guard<std::mutex> hold(bucket.mutex);
    auto found = bucket.shards.find(shard);
    if (found == bucket.shards.end() || found->second.fence > lease) {
      out.fenced = true;
      continue;
    }
    ShardMark& mark = found->second;
    mark.fence = lease;  // a later lease than the one that opened here fences it as well
    if (hi <= mark.watermark) {
      ++out.repeats;
      continue;
    }
    if (lo != mark.watermark) {
      out.gap = out.gap < 0 ? mark.watermark : std::min(out.gap, mark.watermark);
      continue;
    }
    cut_pieces(works, parts.size(), b, kBlock, pieces);
    // What can fail (memory for new rows) comes before the first update: a bucket has all of a batch or nothing.
    for (const Piece& piece : pieces) {
      PartWork& work = works[piece.part];
      if (!work.missing) continue;
      Rows& rows = *bucket.rows[work.table->index];
      for (size_t i = piece.begin; i < piece.end; ++i) {
        uint32_t& slot = work.slots[i];
        if (slot == Rows::kNone) slot = rows.find(work.part->keys[i], work.hashes[i]);
        if (slot == Rows::kNone) slot = rows.insert(work.part->keys[i], work.hashes[i], nullptr);
      }
    }
    float* values[2][kBlock];
    float* state[2][kBlock];
    auto fetch = [&](size_t q) {
      const Piece& piece = pieces[q];
      const PartWork& work = works[piece.part];
      const Table& table = *work.table;
      const Rows& rows = *bucket.rows[table.index];
      for (size_t k = 0; k < piece.end - piece.begin; ++k) {
        const uint32_t slot = work.slots[piece.begin + k];
        values[q & 1][k] = rows.values(slot);
        state[q & 1][k] = rows.state(slot);
        prefetch_row_write(values[q & 1][k], table.dim + table.state);
      }
    };
    if (!pieces.empty()) fetch(0);
    for (size_t q = 0; q < pieces.size(); ++q) {
      if (q + 1 < pieces.size()) fetch(q + 1);
      const PartWork& work = works[pieces[q].part];
      const Table& table = *work.table;
      kernels_.update(table.optimizer, work.lr, values[q & 1], state[q & 1],
                      work.part->grads + pieces[q].begin * table.dim, pieces[q].end - pieces[q].begin, table.dim);
    }
    bucket.fingerprint += fingerprint;
    mark.watermark = hi;
    ++out.applied;
    applied[b >> 3] = char(uint8_t(applied[b >> 3]) | 1u << (b & 7));
  }
  if (out.applied && out.applied != owned) out.buckets = std::move(applied);
  return out;
}

void Store::release(const std::vector<int64_t>& shards) {
  std::lock_guard<std::mutex> hold(open_mutex_);
  for (int64_t shard : shards) {
    if (shard < 0) throw Malformed("shard must not be negative");
  }
  for (int64_t shard : shards) released_.add(shard);
  each_owned([&](uint32_t, Bucket& bucket) {
    for (int64_t shard : shards) bucket.shards.erase(shard);
  });
}

bool Store::watermarks(int64_t shard, std::vector<int32_t>& buckets, std::vector<int64_t>& marks) {
  each_owned([&](uint32_t b, Bucket& bucket) {
    auto found = bucket.shards.find(shard);
    if (found == bucket.shards.end()) return;
    buckets.push_back(int32_t(b));
    marks.push_back(found->second.watermark);
  });
  return !buckets.empty();
}

std::vector<int64_t> Store::shards() {
  std::unordered_set<int64_t> all;
  each_owned([&](uint32_t, Bucket& bucket) {
    for (auto& [shard, mark] : bucket.shards) all.insert(shard);
  });
  std::vector<int64_t> out(all.begin(), all.end());
  std::sort(out.begin(), out.end());
  return out;
}

size_t Store::count(uint32_t table, int64_t bucket) {
  const Table& t = table_of(table);
  Bucket& b = bucket_checked(bucket);
  std::lock_guard<std::mutex> hold(b.mutex);
  return b.rows[t.index]->count();
}

size_t Store::scan(uint32_t table, int64_t bucket, int64_t slot, size_t limit, int64_t* keys, float* values,
                   float* state, int64_t& next) {
  const Table& t = table_of(table);
  Bucket& b = bucket_checked(bucket);
  if (slot < 0 || limit == 0) throw Malformed("slot must not be negative, limit must be positive");
  std::lock_guard<std::mutex> hold(b.mutex);
  const Rows& rows = *b.rows[t.index];
  const int64_t end = std::min<int64_t>(rows.count(), slot + int64_t(limit));
  size_t n = 0;
  for (int64_t s = slot; s < end; ++s, ++n) {
    keys[n] = rows.key(uint32_t(s));
    std::memcpy(values + n * t.dim, rows.values(uint32_t(s)), t.dim * sizeof(float));
    if (state && t.state) std::memcpy(state + n * t.state, rows.state(uint32_t(s)), t.state * sizeof(float));
  }
  next = end < int64_t(rows.count()) && n ? end : -1;
  return n;
}

void Store::fingerprints(uint64_t* out) {
  std::fill(out, out + n_buckets_, 0);
  each_owned([&](uint32_t b, Bucket& bucket) { out[b] = bucket.fingerprint; });
}

std::vector<std::pair<uint32_t, uint64_t>> Store::rows_by_table() {
  std::vector<std::pair<uint32_t, size_t>> tables;
  {
    std::shared_lock<std::shared_mutex> hold(tables_mutex_);
    for (auto& [id, table] : tables_) tables.emplace_back(id, table->index);
  }
  std::vector<std::pair<uint32_t, uint64_t>> out;
  for (auto& [id, index] : tables) out.emplace_back(id, 0);
  each_owned([&](uint32_t, Bucket& bucket) {
    for (size_t i = 0; i < tables.size(); ++i) out[i].second += bucket.rows[tables[i].second]->count();
  });
  return out;
}

}  // namespace everstep
