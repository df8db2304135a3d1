#include "change.h"
#include "prefetch.h"
#include "store.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_set>

namespace everstep {

namespace {

constexpr size_t kAhead = 24;   // lookups whose index lines are on their way
constexpr size_t kChunk = 128;  // keys handled between two looks at the next partition
constexpr size_t kBlock = 8;    // rows whose lines are fetched while those of the block before are used
constexpr size_t kBiasRows = 65536;
constexpr uint32_t kMaxPartitions = 4096;
constexpr size_t kMaxTables = 1024;

void late_bias(const Optimizer& o, double t, double* bias1, float* bias2) {
  *bias1 = 1.0 - std::pow(o.beta1, t);
  *bias2 = float(std::sqrt(1.0 - std::pow(o.beta2, t)));
}

auto no_end = [](uint32_t, Partition&, Rows&) {};

void check_here(const Rows& rows, const uint32_t* slots, size_t n) {
  for (size_t k = 0; k < n; ++k) {
    if (slots[k] != Rows::kNone && rows.absent(slots[k])) throw Recovering("rows that are pulled are being rebuilt");
  }
}

}  // namespace

Store::Store(uint32_t n_partitions, uint64_t seed) : n_partitions_(n_partitions), seed_(seed), kernels_(row_kernels()) {
  if (n_partitions == 0 || n_partitions > kMaxPartitions) throw Malformed("n_partitions must be in 1..4096");
  partitions_ = std::make_unique<Partition[]>(n_partitions);
  // Never reallocated: each_run looks at another partition's rows (to prefetch) without its mutex.
  for (uint32_t b = 0; b < n_partitions; ++b) partitions_[b].rows.reserve(kMaxTables);
}

void Store::own(const std::vector<int64_t>& partitions) {
  for (int64_t b : partitions) {
    if (b < 0 || b >= int64_t(n_partitions_)) throw Malformed("partition " + std::to_string(b) + " does not exist");
  }
  for (int64_t b : partitions) {
    std::lock_guard<std::mutex> hold(partitions_[b].mutex);
    if (partitions_[b].phase == Phase::kOwned) continue;
    if (partitions_[b].phase != Phase::kEmpty)
      throw Malformed("partition " + std::to_string(b) + " holds something else here: drop it first");
    own_locked(partitions_[b]);
  }
}

void Store::own_locked(Partition& partition) {
  partition.phase = Phase::kOwned;
  partition.owned = true;
}

std::vector<int32_t> Store::owned() const {
  std::vector<int32_t> out;
  for (uint32_t b = 0; b < n_partitions_; ++b) {
    if (partitions_[b].owned) out.push_back(int32_t(b));
  }
  return out;
}

size_t Store::n_tables() const {
  std::shared_lock<std::shared_mutex> hold(tables_mutex_);
  return tables_.size();
}

const Table& Store::table_of(uint32_t id) const {
  std::shared_lock<std::shared_mutex> hold(tables_mutex_);
  auto found = tables_.find(id);
  if (found == tables_.end()) throw Malformed("table " + std::to_string(id) + " was not declared");
  return *found->second;  // tables are never dropped
}

Partition& Store::partition_at(int64_t partition) {
  if (partition < 0 || partition >= int64_t(n_partitions_))
    throw Malformed("partition " + std::to_string(partition) + " does not exist");
  return partitions_[partition];
}

Partition& Store::readable(Partition& partition, int64_t b) const {
  if (!partition.readable()) throw NotOwned("partition " + std::to_string(b) + " is not here");
  return partition;
}

// A change of marks alone: `changed` has the shards and tables that changed.
void Store::log_marks(uint32_t b, Partition& partition, blob::Marks&& changed) {
  if (lags(partition)) {
    for (const blob::Mark& mark : changed.shards) partition.open.shards.insert(mark.shard);
    partition.open.initialised.insert(changed.initialised.begin(), changed.initialised.end());
    join_open(partition);
    return;
  }
  if (partition.protect) {
    changed.fingerprint = partition.fingerprint;
    changed.clock = partition.clock;
    const size_t bytes = sizeof(blob::Header) + changed.bytes();
    Outbox::Slot slot = outbox_.reserve(b, partition.seq + 1, blob::kChange, bytes);
    blob::Header head;
    head.kind = blob::kChange;
    head.partition = b;
    head.seq = partition.seq + 1;
    head.marks_bytes = uint32_t(changed.bytes());
    blob::Writer w(slot.at);
    w.put(head);
    w.put_marks(changed);
    outbox_.commit(slot);
  }
  ++partition.seq;
}

// Calls each(rows, hashes, first, count, left) for stretches of at most kChunk of the `left` keys that are left of one
// partition. The index lines of the first kAhead of a partition are on their way; `each` sees to the others. The
// partition is owned; its mutex is held during the call, and during end(partition, rows) after its last stretch.
template <class Each, class End>
void Store::each_run(const Table& table, const int64_t* keys, size_t n, Each&& each, End&& end_of) {
  thread_local std::vector<uint64_t> hashes;
  thread_local std::vector<uint32_t> in;
  hashes.resize(n);
  in.resize(n);
  kernels_.hash_keys(keys, n, table.salt, n_partitions_, hashes.data(), in.data());
  // Refuse before anything is made, so that a stale map changes nothing.
  for (size_t i = 0; i < n; ++i) {
    if ((i == 0 || in[i] != in[i - 1]) && !partitions_[in[i]].owned)
      throw NotOwned("partition " + std::to_string(in[i]) + " of key " + std::to_string(keys[i]) +
                     " is not owned here");
  }
  auto run_end = [&](size_t from) {
    size_t to = from + 1;
    while (to < n && in[to] == in[from]) ++to;
    return to;
  };
  size_t end = n ? run_end(0) : 0;
  for (size_t i = 0; i < n;) {
    Partition& partition = partitions_[in[i]];
    const uint32_t b = in[i];
    std::lock_guard<std::mutex> hold(partition.mutex);
    if (!partition.owned) throw NotOwned("partition " + std::to_string(b) + " is not owned here any more");
    Rows& rows = *partition.rows[table.index];
    if (i == 0) rows.prefetch(hashes.data(), std::min(end, kAhead));
    for (; i < end; i += std::min(kChunk, end - i))
      each(rows, hashes.data() + i, i, std::min(kChunk, end - i), end - i);
    end_of(b, partition, rows);
    if (i == n) break;
    end = run_end(i);
    partitions_[in[i]].rows[table.index]->prefetch(hashes.data() + i, std::min(end - i, kAhead));
  }
}

bool Store::declare(uint32_t id, size_t dim, const Optimizer& optimizer, const Init& init, const LifeCycle& life,
                    uint32_t candidates, bool dense) {
  if (dim == 0 || dim > 65536) throw Malformed("dim must be in 1..65536");
  if (optimizer.kind < 0 || optimizer.kind >= kOptimizerKinds) throw Malformed("unknown optimizer");
  if (init.kind < 0 || init.kind >= kInitKinds) throw Malformed("unknown init");
  std::unique_lock<std::shared_mutex> hold(tables_mutex_);
  if (tables_.count(id)) return false;  // the caller compares the specs
  if (tables_.size() + 2 > kMaxTables) throw Malformed("a job has at most 1024 tables");
  if (life.admit_after && (tables_.count(candidates) || candidates == id))
    throw Malformed("the id of the candidates of table " + std::to_string(id) + " is taken: give it another name");
  auto table = std::make_unique<Table>();
  Table& t = *table;
  t.id = id;
  t.index = tables_.size();
  t.dim = dim;
  t.optimizer = optimizer;
  t.init = init;
  t.dense = dense;
  t.salt = table_salt(id);
  t.row_seed = mix64(seed_ + kGolden * (uint64_t(id) + 1));
  switch (optimizer.kind) {
    case kSgd:
      t.state = optimizer.momentum > 0 ? dim : 0;
      break;
    case kAdagrad:
      t.state = dim + optimizer.counts;
      break;
    case kRowwiseAdagrad:
      t.state = 1;
      break;
    case kFtrl:
      t.state = 2 * dim;
      break;
    case kRmsprop:
      t.state = dim * (1 + size_t(optimizer.centered) + size_t(optimizer.momentum > 0)) + 1;
      break;
    case kNadam:
      t.state = 2 * dim + 2;
      break;
    default:
      t.state = dim * (2 + size_t(optimizer.amsgrad)) + 1;
  }
  t.life = life;
  t.meta = life.any() ? kSightings : 0;
  t.lay_out();
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
  auto give_to_all = [&](std::unique_ptr<Table> made) {
    for (uint32_t b = 0; b < n_partitions_; ++b) {
      std::lock_guard<std::mutex> partition_hold(partitions_[b].mutex);
      partitions_[b].rows.push_back(std::make_unique<Rows>(*made, pool_, partitions_[b].generation));
    }
    tables_.emplace(made->id, std::move(made));
  };
  std::unique_ptr<Table> counts;
  if (life.admit_after) {
    counts = std::make_unique<Table>();
    counts->id = candidates;
    counts->index = t.index + 1;
    counts->salt = t.salt;  // the partition of a key is that of its row
    counts->life = life;
    counts->meta = kCandidateMeta;
    counts->lay_out();
    t.candidates = counts.get();
  }
  give_to_all(std::move(table));
  if (counts) give_to_all(std::move(counts));
  return true;
}

bool Store::open(int64_t shard, int64_t start, int64_t lease, std::vector<int32_t>& partitions,
                 std::vector<int64_t>& marks) {
  if (shard < 0 || start < 0 || lease < 0) throw Malformed("shard, start and lease must not be negative");
  std::lock_guard<std::mutex> hold(open_mutex_);
  if (released_.has(shard)) return false;
  // Fences only rise, so a partition that answers "later" says it for good: look first, then raise all.
  bool fenced = false;
  each_owned([&](uint32_t, Partition& partition) {
    auto found = partition.shards.find(shard);
    fenced |= found != partition.shards.end() && found->second.fence > lease;
  });
  if (fenced) return false;
  each_owned([&](uint32_t b, Partition& partition) {
    auto [at, made] = partition.shards.try_emplace(shard, ShardMark{start, lease});
    if (made || at->second.fence < lease) {
      at->second.fence = std::max(at->second.fence, lease);
      log_mark(b, partition, shard, at->second);
    }
    partitions.push_back(int32_t(b));
    marks.push_back(at->second.watermark);
  });
  return true;
}

void Store::pull(uint32_t table, const int64_t* keys, size_t n, float* out) {
  const Table& t = table_of(table);
  pulls_.fetch_add(1, std::memory_order_relaxed);
  const bool stream = n * t.dim * sizeof(float) >= kStreamBytes && streamable(out, t.dim, t.dim);
  if (pool_.cold.any_out()) read_ahead(t, keys, n);
  const bool cold = pool_.cold.on();
  size_t missed = 0;
  each_run(
      t, keys, n,
      [&](Rows& rows, const uint64_t* hashes, size_t first, size_t m, size_t left) {
        uint32_t slots[kChunk];
        const float* from[kChunk];
        bool all = true;
        float* to = out + first * t.dim;
        size_t copied = 0;
        for (size_t k = 0; k < m; ++k) {
          if (k + kAhead < left) rows.prefetch(hashes + k + kAhead, 1);
          slots[k] = rows.find(keys[first + k], hashes[k]);
          all &= slots[k] != Rows::kNone;
          if (slots[k] != Rows::kNone) {
            from[k] = rows.values(slots[k]);
            if (cold) missed += rows.touch_cold(from[k]);
            prefetch_lines<0>(from[k], t.dim * 4, 512);
          }
          if (all && k + 1 == copied + 2 * kBlock) {
            kernels_.copy_rows(from + copied, to + copied * t.dim, kBlock, t.dim, stream);
            copied += kBlock;
          }
        }
        if (rows.recovering()) check_here(rows, slots, m);
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
      },
      no_end);
  if (cold) pool_.cold.count(n, missed);
  if (stream) kernels_.fence();
}

// Has the disk read all rows of a pull at once that are there, before the first one is waited for.
void Store::read_ahead(const Table& t, const int64_t* keys, size_t n) {
  each_run(
      t, keys, n,
      [&](Rows& rows, const uint64_t* hashes, size_t first, size_t m, size_t left) {
        for (size_t k = 0; k < m; ++k) {
          if (k + kAhead < left) rows.prefetch(hashes + k + kAhead, 1);
          const uint32_t slot = rows.find(keys[first + k], hashes[k]);
          if (slot == Rows::kNone) continue;
          const uint8_t* at = rows.record(slot);
          if (pool_.cold.has(at)) pool_.cold.fetch(at, t.record_bytes);
        }
      },
      no_end);
}

void Store::locate(uint32_t table, const int64_t* keys, size_t n, int64_t* slots) {
  each_run(
      table_of(table), keys, n,
      [&](Rows& rows, const uint64_t* hashes, size_t first, size_t m, size_t left) {
        for (size_t k = 0; k < m; ++k) {
          if (k + kAhead < left) rows.prefetch(hashes + k + kAhead, 1);
          const uint32_t slot = rows.find(keys[first + k], hashes[k]);
          slots[first + k] = slot == Rows::kNone ? -1 : int64_t(slot);
        }
      },
      no_end);
}

int64_t Store::put_absent(uint32_t table, const int64_t* keys, const float* values, size_t n, uint32_t now_s) {
  const Table& t = table_of(table);
  if (!kernels_.all_finite(values, n * t.dim)) throw Malformed("initial rows hold NaN or Inf");
  int64_t total = 0;
  if (const size_t limit = limit_.load(std::memory_order_relaxed)) make_cold_room(2 * n * (t.record_bytes + 24), limit);
  std::vector<uint32_t> made;  // in the partition at hand
  made.reserve(n);
  auto put = [&](Rows& rows, const uint64_t* hashes, size_t first, size_t m, size_t left) {
    try {
      for (size_t k = 0; k < m; ++k) {
        if (k + kAhead < left) rows.prefetch(hashes + k + kAhead, 1);
        if (rows.find(keys[first + k], hashes[k]) != Rows::kNone) continue;
        const size_t limit = limit_.load(std::memory_order_relaxed);
        if (limit && pool_.used_bytes() + rows.bytes_for(1) > refuse_above(limit)) full(t);
        made.push_back(rows.insert(keys[first + k], hashes[k], values + (first + k) * t.dim));
      }
    } catch (...) {
      for (uint32_t slot : made) rows.erase(slot);
      throw;
    }
  };
  auto log = [&](uint32_t b, Partition& partition, Rows& rows) {
    if (made.empty()) return;
    for (size_t i = 0; t.meta && i < made.size(); ++i) {
      rows.meta(made[i])[kPushedClock] = uint32_t(partition.clock);
      rows.meta(made[i])[kPushedAt] = t.life.expire_s ? now_s : 0;
    }
    try {
      log_rows(b, partition, rows, made);
    } catch (...) {
      for (uint32_t slot : made) rows.erase(slot);
      throw;
    }
    total += int64_t(made.size());
    made.clear();
  };
  each_run(t, keys, n, put, log);
  return total;
}

int64_t Store::assign(uint32_t table, const int64_t* keys, const float* values, size_t n) {
  const Table& t = table_of(table);
  if (!kernels_.all_finite(values, n * t.dim)) throw Malformed("assigned rows hold NaN or Inf");
  int64_t total = 0;
  std::vector<std::pair<uint32_t, size_t>> found;  // in the partition at hand: slot, place in `keys`
  auto look = [&](Rows& rows, const uint64_t* hashes, size_t first, size_t m, size_t) {
    for (size_t k = 0; k < m; ++k) {
      const uint32_t slot = rows.find(keys[first + k], hashes[k]);
      if (slot == Rows::kNone) continue;
      if (rows.recovering() && rows.absent(slot)) throw Recovering("rows that are assigned are being rebuilt");
      found.emplace_back(slot, first + k);
    }
  };
  auto write = [&](uint32_t b, Partition& partition, Rows& rows) {
    if (found.empty()) return;
    const bool lagging = lags(partition), direct = partition.protect && !lagging;
    Change change(outbox_);
    if (lagging) rows.baseline.reserve(found.size(), rows.end());
    if (direct) {
      blob::Marks marks;
      marks.fingerprint = partition.fingerprint;
      marks.clock = partition.clock;
      change.lay_out(b, partition.seq + 1, marks, {Change::Shape{&t, found.size(), 0}});
    }
    for (auto& [slot, i] : found) rows.touch(slot);
    rows.running.clear();
    for (size_t k = 0; k < found.size(); ++k) {
      const auto [slot, i] = found[k];
      uint8_t* record = rows.record(slot);
      rows.touch_cold(record);
      uint8_t* difference = nullptr;
      if (lagging) rows.baseline.keep(slot, record);
      if (direct) {
        Change::Place& place = change.place(0);
        change.row(place, k, slot, false, 0);
        difference = place.records + k * t.record_bytes;
        std::memcpy(difference, record, t.record_bytes);
      }
      std::memcpy(record, values + i * t.dim, t.dim * sizeof(float));
      if (difference) xor_bytes(difference, record, t.record_bytes);
    }
    if (direct) change.commit();
    if (lagging) {
      join_open(partition);
    } else {
      ++partition.seq;
    }
    total += int64_t(found.size());
    found.clear();
  };
  each_run(t, keys, n, look, write);
  return total;
}

void Store::release(const std::vector<int64_t>& shards) {
  std::lock_guard<std::mutex> hold(open_mutex_);
  for (int64_t shard : shards) {
    if (shard < 0) throw Malformed("shard must not be negative");
  }
  for (int64_t shard : shards) released_.add(shard);
  each_owned([&](uint32_t b, Partition& partition) {
    blob::Marks gone;
    for (int64_t shard : shards) {
      if (partition.shards.erase(shard)) gone.shards.push_back(blob::Mark{shard, -1, 0});
    }
    if (!gone.shards.empty()) log_marks(b, partition, std::move(gone));
  });
}

std::vector<uint32_t> Store::initialised() {
  std::unordered_map<uint32_t, size_t> in;
  size_t owned = 0;
  each_owned([&](uint32_t, Partition& partition) {
    ++owned;
    for (uint32_t table : partition.initialised) ++in[table];
  });
  std::vector<uint32_t> out;
  for (auto& [table, n] : in) {
    if (n == owned) out.push_back(table);
  }
  std::sort(out.begin(), out.end());
  return out;
}

void Store::initialise(uint32_t table) {
  table_of(table);
  each_owned([&](uint32_t b, Partition& partition) {
    auto at = std::lower_bound(partition.initialised.begin(), partition.initialised.end(), table);
    if (at != partition.initialised.end() && *at == table) return;
    partition.initialised.insert(at, table);
    blob::Marks changed;
    changed.initialised.push_back(table);
    log_marks(b, partition, std::move(changed));
  });
}

bool Store::watermarks(int64_t shard, std::vector<int32_t>& partitions, std::vector<int64_t>& marks) {
  each_owned([&](uint32_t b, Partition& partition) {
    auto found = partition.shards.find(shard);
    if (found == partition.shards.end()) return;
    partitions.push_back(int32_t(b));
    marks.push_back(found->second.watermark);
  });
  return !partitions.empty();
}

std::vector<int64_t> Store::shards() {
  std::unordered_set<int64_t> all;
  each_owned([&](uint32_t, Partition& partition) {
    for (auto& [shard, mark] : partition.shards) all.insert(shard);
  });
  std::vector<int64_t> out(all.begin(), all.end());
  std::sort(out.begin(), out.end());
  return out;
}

size_t Store::count(uint32_t table, int64_t partition) {
  const Table& t = table_of(table);
  Partition& b = partition_at(partition);
  std::lock_guard<std::mutex> hold(b.mutex);
  return readable(b, partition).rows[t.index]->count();
}

size_t Store::scan(uint32_t table, int64_t partition, int64_t slot, size_t limit, int64_t* keys, float* values,
                   float* state, int64_t& next) {
  const Table& t = table_of(table);
  Partition& b = partition_at(partition);
  if (slot < 0 || limit == 0) throw Malformed("slot must not be negative, limit must be positive");
  std::lock_guard<std::mutex> hold(b.mutex);
  const Rows& rows = *readable(b, partition).rows[t.index];
  if (rows.recovering()) throw Recovering("partition " + std::to_string(partition) + " is being rebuilt");
  size_t n = 0, s = rows.next_used(size_t(slot));
  for (; s < rows.end() && n < limit; s = rows.next_used(s + 1), ++n) {
    keys[n] = rows.key(uint32_t(s));
    std::memcpy(values + n * t.dim, rows.values(uint32_t(s)), t.dim * sizeof(float));
    if (state && t.state) std::memcpy(state + n * t.state, rows.state(uint32_t(s)), t.state * sizeof(float));
  }
  next = s < rows.end() ? int64_t(s) : -1;
  return n;
}

void Store::fingerprints(uint64_t* out) {
  std::fill(out, out + n_partitions_, 0);
  each_owned([&](uint32_t b, Partition& partition) { out[b] = partition.fingerprint; });
}

std::vector<std::pair<uint32_t, uint64_t>> Store::rows_by_table() {
  std::vector<std::pair<uint32_t, size_t>> tables;
  {
    std::shared_lock<std::shared_mutex> hold(tables_mutex_);
    for (auto& [id, table] : tables_) tables.emplace_back(id, table->index);
  }
  std::vector<std::pair<uint32_t, uint64_t>> out;
  out.reserve(tables.size());
  for (auto& [id, index] : tables) out.emplace_back(id, 0);
  each_owned([&](uint32_t, Partition& partition) {
    for (size_t i = 0; i < tables.size(); ++i) out[i].second += partition.rows[tables[i].second]->count();
  });
  return out;
}

}  // namespace everstep
