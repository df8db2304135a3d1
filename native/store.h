// All partitions that one ps owns: rows, optimizer state, watermarks, fences, fingerprints; and the differences of
// those that are protected.
//
// A partition is one critical section: every method below takes a partition's mutex for what it does to that partition,
// and nothing else of it is shared. Lock order: open_mutex_, tables_mutex_ > a partition's mutex > the outbox's and the
// pool's mutex. Methods lie in store.cpp (what workers ask), push.cpp, lifecycle.cpp and contents.cpp (what becomes of
// whole partitions).
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "blob.h"
#include "partition.h"
#include "hash.h"
#include "outbox.h"
#include "pool.h"
#include "rows.h"

namespace everstep {

struct NotOwned : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// There is no memory for the rows that a request would make; it changed nothing.
struct Full : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Rows that a request needs are still being rebuilt: ask for them (`missing`), then try again.
struct Recovering : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Samples [lo, hi) of a shard, consumed by a push. `learnt`: they are in its gradients.
struct Span {
  int64_t shard = 0, lo = 0, hi = 0, lease = 0;
  bool learnt = true;
};

struct PushPart {
  uint32_t table = 0;
  const int64_t* keys = nullptr;
  const float* grads = nullptr;  // [n, dim]
  size_t n = 0, dim = 0;
  double lr = -1;
  bool has_options = false;  // other ones than the table's optimizer
  Options options;
};

struct PushOutcome {
  int applied = 0, repeats = 0;
  int64_t gap = -1;
  bool fenced = false;
  int64_t nonfinite = -1;
  std::string partitions;  // bitmap of those that applied; empty if none or all owned
  bool moved = false;      // a partition was handed over between the first look and its turn: ask its new owner
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

class Mirrors;

class Store {
 public:
  Store(uint32_t n_partitions, uint64_t seed);

  uint32_t n_partitions() const { return n_partitions_; }
  size_t dim_of(uint32_t table) const { return table_of(table).dim; }
  size_t state_of(uint32_t table) const { return table_of(table).state; }
  size_t n_tables() const;

  void own(const std::vector<int64_t>& partitions);
  std::vector<int32_t> owned() const;
  // False if the table was there. `candidates`: id of the table that counts keys without a row, if `life` admits late.
  bool declare(uint32_t id, size_t dim, const Optimizer& optimizer, const Init& init, const LifeCycle& life = {},
               uint32_t candidates = 0, bool dense = false);
  bool open(int64_t shard, int64_t start, int64_t lease, std::vector<int32_t>& partitions, std::vector<int64_t>& marks);
  // Rows as they are; those that no push or put has made yet, as they begin. Makes none.
  void pull(uint32_t table, const int64_t* keys, size_t n, float* out);
  // `step`: of which this is one push of several; -1: of none, it is applied by itself (running.h).
  // A partition takes all spans or none.
  PushOutcome push(const std::vector<Span>& spans, const std::string& partitions, const std::vector<PushPart>& parts,
                   uint32_t now_s = 0, int64_t step = -1);
  int64_t put_absent(uint32_t table, const int64_t* keys, const float* rows, size_t n, uint32_t now_s = 0);
  // Values of rows that exist are replaced; their state stays. How many. Recovering: some may have been.
  int64_t assign(uint32_t table, const int64_t* keys, const float* rows, size_t n);
  void locate(uint32_t table, const int64_t* keys, size_t n, int64_t* slots);
  void release(const std::vector<int64_t>& shards);
  bool watermarks(int64_t shard, std::vector<int32_t>& partitions, std::vector<int64_t>& marks);
  std::vector<int64_t> shards();
  // Copies up to `limit` rows; the buffers must hold them. Returns how many; next is -1 after the last one.
  size_t scan(uint32_t table, int64_t partition, int64_t slot, size_t limit, int64_t* keys, float* values, float* state,
              int64_t& next);
  size_t count(uint32_t table, int64_t partition);
  void fingerprints(uint64_t* out);

  // Tables whose first rows are all there, by somebody's word: in every owned partition.
  std::vector<uint32_t> initialised();
  void initialise(uint32_t table);

  std::vector<std::pair<uint32_t, uint64_t>> rows_by_table();
  size_t mapped_bytes() const { return pool_.mapped_bytes(); }
  uint64_t pushes() const { return pushes_.load(); }
  uint64_t pulls() const { return pulls_.load(); }

  // ---- life cycle (lifecycle.cpp)
  // Looks at up to `max_slots` slots of the partition, from where the last call ended, and frees rows that are over;
  // how many. `round`: the end was reached, the next call begins anew.
  size_t expire(int64_t partition, uint32_t now_s, size_t max_slots, bool& round);
  // A ceiling for all memory of the store (0: none). `evict`: a partition's rows that were pushed least recently make
  // room for new ones of the same table, if it has a life cycle. Else, and where that does not do, Full.
  void set_limit(size_t bytes, bool evict);
  // In memory: without rows that are on disk.
  size_t used_bytes() const { return pool_.used_bytes(); }

  // ---- rows on disk (cool.cpp)
  // Rows may go to a file in this folder. Before rows are made. Throws std::system_error.
  void begin_cold(const std::string& folder) { pool_.cold.begin(folder); }
  // Moves what was not used for longest to disk until all memory of the store is at most `target` bytes; how many bytes
  // went. Not with a partition's mutex held. `error` of cold_counts() is set where the disk takes no more.
  size_t cool(size_t target);
  // All rows in memory are older by one.
  void grow_older() { pool_.cold.grow_older(); }
  ColdCounts cold_counts() const { return pool_.cold.counts(); }

  // ---- differences and contents (contents.cpp)
  Outbox& outbox() { return outbox_; }
  void protect(const std::vector<int64_t>& partitions, bool on);
  // How far mirrors may be behind (lag.cpp). Off: every change is a difference at once. On: changes of a protected
  // partition stay open, and `flush` makes one difference of them. A push closes what is open by itself where that has
  // more than `bytes` of old records, more than `pushes`, or is older than `late_s`.
  void set_lag(bool on, size_t bytes, int64_t pushes, double late_s);
  // False: nothing was open.
  bool flush(int64_t partition);
  struct Lag {
    int64_t opened = 0;  // number of the newest change that was ever opened
    int64_t closed = 0;  // all up to this one are closed
    size_t partitions = 0, rows = 0, bytes = 0;
    double oldest_s = 0;
  };
  // Without `sizes`: no rows and bytes, which are many places in memory.
  Lag lag(bool sizes = true);
  // Closes what is open for longer, the oldest first, at most `most`. How many.
  size_t flush_older(double age_s, size_t most);
  // Contents of the slots [lo, hi) of one table, to the outbox; the next lo, or -1 after the last slot.
  int64_t emit(int64_t partition, int kind, uint32_t table, int64_t lo, int64_t hi);
  // Records of exactly these slots; unused ones as zeros.
  void emit_slots(int64_t partition, uint32_t table, const uint32_t* slots, size_t n);
  void emit_marks(int64_t partition);
  std::vector<uint8_t> marks(int64_t partition);
  int64_t seq(int64_t partition);
  // Not served from here on: later requests of it are NotOwned; its contents can still be read. The last seq.
  int64_t hand_over(int64_t partition);
  // Served again, as it was when it was handed over.
  void resume(int64_t partition);
  // Empty and not owned, whatever it was.
  void drop(int64_t partition);
  std::vector<std::pair<uint32_t, uint64_t>> partition_rows(int64_t partition);
  size_t partition_bytes(int64_t partition);
  // Equal iff (but for 2^-64) the same bit for bit; `by_key`: whatever the slots, seq and fences.
  std::pair<uint64_t, uint64_t> digest(int64_t partition, bool by_key);

  // ---- images
  void load_begin(int64_t partition);
  void load_pages(int64_t partition, uint32_t table, const int64_t* page_nos, size_t n, const uint8_t* pages);
  // Owned from here on. Malformed: empty and not owned.
  void load_end(int64_t partition, const uint8_t* marks, size_t marks_bytes);
  // The generation, and the marks as of now. `since`: as given by an earlier call for this partition; -1: all pages.
  int64_t snapshot_begin(int64_t partition, int64_t since, std::vector<uint8_t>& marks);
  struct ImagePage {
    uint32_t table, page;
  };
  // Pages as of snapshot_begin, of about `max_bytes`, at least one; none: that was all.
  void snapshot_next(int64_t partition, size_t max_bytes, std::vector<ImagePage>& pages, std::vector<uint8_t>& data);
  // Which slots of these pages of the snapshot changed since `since`: a bit each, slots / 8 bytes a page. False: not
  // known, all may have; it is known if `since` was the snapshot before this one.
  bool snapshot_slots(int64_t partition, uint32_t table, const std::vector<int64_t>& pages, std::vector<uint8_t>& bits);
  void snapshot_end(int64_t partition);

  // ---- for mirrors, which become partitions (mirror.cpp)
  Partition& partition(uint32_t b) { return partitions_[b]; }
  const Table& table_of(uint32_t id) const;
  Pool& pool() { return pool_; }
  using TablePages = std::pair<const Table*, std::vector<uint8_t*>>;
  // Pages of the store's pool become the rows of a partition that is empty here, which is owned then, with these marks.
  // On Malformed the partition is empty and the pages are back in the pool. `absent`: only their heads are there yet.
  void adopt(uint32_t partition, std::vector<TablePages>&& pages, const blob::Marks& marks, int64_t seq,
             bool absent = false);

 private:
  Partition& partition_at(int64_t partition);
  Partition& readable(Partition& partition, int64_t b) const;
  void own_locked(Partition& partition);
  void drop_incoming(Partition& partition);
  void adopt_locked(uint32_t b, Partition& partition, std::vector<TablePages>&& pages, const blob::Marks& marks,
                    int64_t seq, bool absent);
  // Each of these is one change: seq grows by one, and the difference goes to the outbox if the partition is protected.
  void log_marks(uint32_t b, Partition& partition, blob::Marks&& changed);
  void log_mark(uint32_t b, Partition& partition, int64_t shard, const ShardMark& mark) {
    blob::Marks changed;
    changed.shards.push_back(blob::Mark{shard, mark.watermark, mark.fence});
    log_marks(b, partition, std::move(changed));
  }
  void free_rows(uint32_t b, Partition& partition, Rows& rows, const std::vector<uint32_t>& slots);
  bool lags(const Partition& partition) const { return partition.protect && lag_.load(std::memory_order_relaxed); }
  // A change of a partition that lags: joins the open one.
  void join_open(Partition& partition);
  bool flush_locked(uint32_t b, Partition& partition);
  void flush_if_due(uint32_t b, Partition& partition, int64_t now_ns);
  // Rows that are being rebuilt and indexes cannot go to disk: while the disk takes rows, the limit may be passed by a
  // quarter before a request is refused.
  size_t refuse_above(size_t limit) const {
    return pool_.cold.on() && !pool_.cold.counts().error ? limit + limit / 4 : limit;
  }
  size_t cool_partition(Partition& partition, int age, size_t bytes);
  // Before a request that makes rows of so many bytes takes a lock: rows go to disk if they do not fit.
  void make_cold_room(size_t bytes, size_t limit) {
    if (pool_.cold.on() && pool_.used_bytes() + bytes > limit) cool(limit - std::min(limit, bytes + limit / 16));
  }
  [[noreturn]] void full(const Table& table) const;
  // Before `n` rows are made: frees some if the ceiling demands it, none of `keep`.
  void make_room(uint32_t b, Partition& partition, Rows& rows, size_t n, std::vector<uint32_t> keep);
  void log_rows(uint32_t b, Partition& partition, Rows& rows, const std::vector<uint32_t>& made);
  void read_ahead(const Table& table, const int64_t* keys, size_t n);
  template <class Each, class End>
  void each_run(const Table& table, const int64_t* keys, size_t n, Each&& each, End&& end_of);
  template <class Each>
  void each_owned(Each&& each) {
    for (uint32_t b = 0; b < n_partitions_; ++b) {
      Partition& partition = partitions_[b];
      if (!partition.owned) continue;
      std::lock_guard<std::mutex> hold(partition.mutex);
      if (partition.owned) each(b, partition);
    }
  }

  const uint32_t n_partitions_;
  const uint64_t seed_;
  const RowKernels& kernels_;
  Pool pool_;
  Outbox outbox_;
  mutable std::shared_mutex tables_mutex_;
  std::unordered_map<uint32_t, std::unique_ptr<Table>> tables_;
  std::unique_ptr<Partition[]> partitions_;
  std::mutex cool_mutex_;  // one thread at a time moves rows to disk
  uint32_t cool_next_ = 0;  // the partition where it goes on
  std::mutex open_mutex_;  // open and release: a shard cannot be opened while it is being released
  ShardSet released_;
  std::atomic<uint64_t> pushes_{0}, pulls_{0};
  std::atomic<size_t> limit_{0};
  std::atomic<bool> evict_{false};
  std::atomic<bool> lag_{false};
  std::atomic<int64_t> opened_{0};
  std::atomic<size_t> lag_bytes_{0};
  std::atomic<int64_t> lag_pushes_{0}, late_ns_{0};

 public:
  // Mirrors of partitions that are elsewhere (mirror.h), in pages of this store's pool. Lock order: a mirror's > a
  // partition's.
  std::shared_ptr<Mirrors> mirrors;
};

int64_t steady_ns();
uint64_t batch_fingerprint(int64_t shard, int64_t lo, int64_t hi);

}  // namespace everstep
