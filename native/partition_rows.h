// The rows of one table in one partition: pages of slots, and an open-addressing index from key to slot.
//
// A slot never moves; a freed one is zeroed and used again. The next new row gets the lowest unused slot of the pages
// that have rows, else of the first page without: where rows go depends on the pages alone, not on how they came to be:
// an owner that got the pages goes on as the old one would have. Pages and index belong to the pool and go with it. Not
// thread-safe: under the partition's mutex, except `prefetch`.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "baseline.h"
#include "pool.h"
#include "prefetch.h"
#include "running.h"
#include "table.h"

namespace everstep {

class Rows {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  Rows(const Table& table, Pool& pool, uint64_t generation)
      : running(table, pool),
        baseline(table),
        table_(table),
        pool_(pool),
        generation_(generation),
        tracking_(generation > 1) {}
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  const Table& table() const { return table_; }
  uint32_t count() const { return count_; }
  // One past the highest slot that may be used.
  size_t end() const { return pages_.size() << table_.page_bits; }
  // Held by pages and index.
  size_t bytes() const { return page_bytes_ + index_bytes(); }
  // Unused slots of the pages that have rows.
  size_t free_slots() const { return page_bytes_ / table_.page_bytes * table_.slots() - count_; }
  // What `n` more rows will add to bytes().
  size_t bytes_for(size_t n) const;
  // Grows whenever slots that were looked up may be others' by now.
  uint64_t epoch() const { return epoch_; }

  // Four entries fill a cache line and are compared without a branch between them: a miss of the branch predictor
  // costs as much as the rest of a lookup. A group that has a free entry ends the search.
  uint32_t find(int64_t key, uint64_t hash) const {
    const Entry* entry = entry_of(key, hash);
    return entry ? entry->slot : kNone;
  }
  void prefetch(const uint64_t* hashes, size_t n) const {
    const Entry* entries = entries_.load(std::memory_order_relaxed);
    const uint64_t mask = mask_.load(std::memory_order_relaxed);
    for (size_t i = 0; entries && i < n; ++i) __builtin_prefetch(entries + (hashes[i] & mask) * kGroup);
  }

  // Brings a slot's key and record on their way; the slot may be free.
  void prefetch_row(uint32_t slot) const {
    const size_t p = slot >> table_.page_bits, i = in_page(slot);
    if (p >= pages_.size() || !pages_[p]) return;
    __builtin_prefetch(table_.keys(pages_[p]) + i);
    prefetch_lines<0>(table_.record(pages_[p], i), table_.record_bytes, 1024);
  }

  // Makes the row, from `values` or, if null, as it begins; meta is zero. The key must not be there. Throws
  // std::bad_alloc or std::runtime_error (too many rows) with nothing changed.
  uint32_t insert(int64_t key, uint64_t hash, const float* values);
  // Frees the row: its slot is zero bytes, a page without rows goes back to the pool.
  void erase(uint32_t slot);

  bool used(uint32_t slot) const {
    const size_t p = slot >> table_.page_bits, i = in_page(slot);
    return p < pages_.size() && pages_[p] && (Table::bitmap(pages_[p])[i >> 6] >> (i & 63) & 1);
  }
  // The next used slot from `slot` on, or end().
  size_t next_used(size_t slot) const;
  int64_t key(uint32_t slot) const { return table_.keys(page(slot))[in_page(slot)]; }
  uint8_t* record(uint32_t slot) const { return table_.record(page(slot), in_page(slot)); }
  float* values(uint32_t slot) const { return reinterpret_cast<float*>(record(slot)); }
  float* state(uint32_t slot) const { return values(slot) + table_.dim; }
  uint32_t* meta(uint32_t slot) const { return reinterpret_cast<uint32_t*>(values(slot) + table_.dim + table_.state); }

  // Before bytes of a slot's page change: marks the page as changed in this generation (nobody asks before the first
  // snapshot: it costs cache lines), and copies it aside first if a snapshot still has to read it (only then can it
  // throw std::bad_alloc).
  bool tracking() const { return tracking_; }
  void touch(uint32_t slot) {
    if (!tracking_) return;
    if (!touched_[slot >> table_.page_bits]) touch_page(slot >> table_.page_bits);
    changed_[slot >> 6] |= uint64_t(1) << (slot & 63);
  }

  // ---- whole pages: null where no slot is used. page_bytes each, from the pool.
  const std::vector<uint8_t*>& pages() const { return pages_; }
  // Takes the pages (this must be empty) and builds the index. Malformed: pages that no store has made, e.g. a key of
  // another partition; then nothing is taken and the caller still owns them.
  void adopt(std::vector<uint8_t*>&& pages, uint32_t partition, uint32_t n_partitions);
  // Gives the pages away; this is empty then.
  std::vector<uint8_t*> give_up();
  void clear();

  // ---- rows that are not here yet (a partition that is being rebuilt)
  bool recovering() const { return !absent_.empty(); }
  bool absent(uint32_t slot) const { return (slot >> 6) < absent_.size() && (absent_[slot >> 6] >> (slot & 63) & 1); }
  // All used slots are absent from now on; `arrived` ends that for one, `recovered` for all.
  void expect_all();
  void arrived(uint32_t slot) { absent_[slot >> 6] &= ~(uint64_t(1) << (slot & 63)); }
  void recovered() { absent_.clear(); }

  // Pages of the slots [lo, hi) were read: what came from disk for that leaves memory again.
  void let_go(size_t lo, size_t hi) const;
  // A record is about to be used; whether it was on disk.
  bool touch_cold(const void* record) const {
    const auto* at = static_cast<const uint8_t*>(record);
    return pool_.cold.has(at) && pool_.cold.touch(at, table_.record_bytes);
  }

  // ---- snapshots: pages as of now, while rows go on changing
  // Pages changed after generation `since` (-1: all) are to be read; changes count as `next_generation` from now on.
  void snapshot_begin(int64_t since, uint64_t next_generation);
  // The next page to be read, or kNone.
  uint32_t snapshot_next() const;
  // Copies page `p` as of snapshot_begin; it is read then.
  void snapshot_read(uint32_t p, uint8_t* to);
  // Whether it is known which slots changed since `since` (only if that was the snapshot before this one); if so, their
  // bits, for the slots of page `p`.
  bool snapshot_knows_slots() const { return shot_known_; }
  void snapshot_slots(uint32_t p, uint8_t* to) const;
  // Pages that there were at snapshot_begin.
  size_t snapshot_pages() const { return pending_.size(); }
  void snapshot_end();

  // ---- the step that the rows are in the middle of; of those that are freed it forgets
  Running running;

  // ---- what mirrors that lag have of the rows that changed
  Baseline baseline;

 private:
  struct Entry {
    int64_t key;
    uint32_t slot;  // kNone: empty
  };
  static constexpr uint64_t kGroup = 4;

  Entry* entry_of(int64_t key, uint64_t hash) const {
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
  static Entry* free_entry(Entry* entries, uint64_t mask, uint64_t hash);
  void erase_entry(Entry* entry);
  void resize_index(uint64_t size);
  void free_index();
  size_t index_bytes() const {
    return entries_.load(std::memory_order_relaxed)
               ? (mask_.load(std::memory_order_relaxed) + 1) * kGroup * sizeof(Entry)
               : 0;
  }
  uint32_t free_slot();
  void touch_page(size_t p);
  uint8_t* page(uint32_t slot) const { return pages_[slot >> table_.page_bits]; }
  size_t in_page(uint32_t slot) const { return slot & (table_.slots() - 1); }

  const Table& table_;
  Pool& pool_;
  // Atomic only because other threads prefetch by them without the partition's mutex.
  std::atomic<Entry*> entries_{nullptr};
  std::atomic<uint64_t> mask_{0};  // groups - 1
  uint32_t count_ = 0;
  size_t page_bytes_ = 0;
  uint64_t epoch_ = 0;
  size_t first_free_ = 0;   // pages below have no unused slot, or no row
  size_t first_empty_ = 0;  // pages below have rows
  std::vector<uint8_t*> pages_;
  std::vector<uint16_t> used_;         // slots of each page
  std::vector<uint64_t> generations_;  // of each page's last change
  uint64_t generation_;
  bool tracking_;                  // there was a snapshot
  std::vector<uint64_t> changed_;  // slots changed in this generation
  bool changed_known_ = true;      // false: pages came in it
  std::vector<uint64_t> shot_;     // while a snapshot is read: `changed_` of the generation that it ended
  bool shot_known_ = false;
  std::vector<uint8_t> touched_;  // pages whose last change is of this generation: bytes, to stay in the cache
  std::vector<uint64_t> absent_;
  // While a snapshot is read: per page whether it still is to be, and its copy if it has changed since.
  std::vector<uint8_t> pending_;
  std::vector<uint8_t*> aside_;
  mutable uint32_t next_pending_ = 0;
};

}  // namespace everstep
