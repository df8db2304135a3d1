// What the rows of one table in one partition were when the mirrors' newest difference of the partition was made
// (protect: lag): the old record of each row that changed since, kept once, at the first change. So a row that a
// hundred pushes change costs one copy and one difference. Of a row that was made since, nothing is kept: it was zeros.
// Not part of a partition's contents. Under the partition's mutex.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "prefetch.h"
#include "table.h"

namespace everstep {

class Baseline {
 public:
  explicit Baseline(const Table& table) : table_(table) {}
  Baseline(const Baseline&) = delete;
  Baseline& operator=(const Baseline&) = delete;

  bool empty() const { return slots_.empty() && made_slots_.empty(); }
  size_t count() const { return slots_.size() + made_slots_.size(); }
  // Places below this one have an old record; the slots of the others were free.
  size_t kept() const { return slots_.size(); }
  // Slots that were made or freed since: for all others, the row is what it was, but for its record.
  size_t toggles() const { return toggles_; }
  uint32_t slot(size_t i) const { return i < slots_.size() ? slots_[i] : made_slots_[i - slots_.size()]; }
  const uint8_t* old(size_t i) const { return records_.get() + i * table_.record_bytes; }
  bool has(uint32_t slot) const { return bit(known_, slot); }
  // The slot was free; it was in use and the row was freed (its key: `old_key`).
  bool was_free(uint32_t slot) const { return bit(made_, slot); }
  bool was_freed(uint32_t slot) const { return bit(freed_, slot); }
  // After `sort_keys`.
  int64_t old_key(uint32_t slot) const {
    return std::lower_bound(keys_.begin(), keys_.end(), std::make_pair(slot, INT64_MIN))->second;
  }
  void sort_keys() { std::sort(keys_.begin(), keys_.end()); }
  // Places (for `slot` and `old`) by ascending slot: who reads the rows in this order comes to each page of memory
  // once. Throws std::bad_alloc.
  std::vector<uint32_t> by_slot() const {
    const size_t n = count();
    std::vector<uint32_t> slots(n), order(n), other;
    std::copy(made_slots_.begin(), made_slots_.end(), std::copy(slots_.begin(), slots_.end(), slots.begin()));
    for (size_t i = 0; i < n; ++i) order[i] = uint32_t(i);
    if (n < 32) {
      std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return slots[a] < slots[b]; });
      return order;
    }
    other.resize(n);
    uint32_t most = 0;
    for (uint32_t slot : slots) most = std::max(most, slot);
    // A table's few rows in one partition shall not pay for many digits.
    const uint32_t bits = n < 512 ? 6 : 11, digits = 1u << bits;
    for (uint32_t shift = 0; shift < 32 && (most >> shift); shift += bits) {
      uint32_t at[1u << 11];
      std::fill_n(at, digits, 0u);
      for (uint32_t slot : slots) ++at[(slot >> shift) & (digits - 1)];
      for (uint32_t d = 0, sum = 0; d < digits; ++d) {
        const uint32_t count = at[d];
        at[d] = sum;
        sum += count;
      }
      for (uint32_t i : order) other[at[(slots[i] >> shift) & (digits - 1)]++] = i;
      order.swap(other);
    }
    return order;
  }

  // After this, `n` calls of the next three for slots below `end` cannot fail. Throws std::bad_alloc.
  void reserve(size_t n, size_t end) {
    const size_t words = (end + 63) / 64;
    if (known_.size() < words) {
      const size_t grown = std::max(words, known_.size() * 2);
      known_.resize(grown);
      made_.resize(grown);
      freed_.resize(grown);
    }
    const size_t need = slots_.size() + n;
    grow(slots_, need);
    grow(made_slots_, made_slots_.size() + n);
    if (need > room_) {
      const size_t room = std::max(need, room_ * 2);
      std::unique_ptr<uint8_t[]> more(new uint8_t[room * table_.record_bytes + 1]);
      if (!slots_.empty()) std::memcpy(more.get(), records_.get(), slots_.size() * table_.record_bytes);
      records_ = std::move(more);
      room_ = room;
    }
  }
  // Before rows are freed: `freeing` notes their keys.
  void reserve_freed(size_t n) { grow(keys_, keys_.size() + n); }

  // The row is about to change. Whether this is its first change.
  bool keep(uint32_t slot, const void* record) {
    if (has(slot)) return false;
    uint8_t* to = records_.get() + slots_.size() * table_.record_bytes;
    prefetch_lines<1>(to + 4 * table_.record_bytes, table_.record_bytes, 256);  // nobody has been there for long
    std::memcpy(to, record, table_.record_bytes);
    slots_.push_back(slot);
    set(known_, slot);
    return true;
  }
  // A row was made in this slot.
  void made(uint32_t slot) {
    if (has(slot)) return;
    made_slots_.push_back(slot);
    set(known_, slot);
    set(made_, slot);
    ++toggles_;
  }
  // The row is about to be freed.
  void freeing(uint32_t slot, int64_t key, const void* record) {
    keep(slot, record);
    if (was_free(slot) || was_freed(slot)) return;
    set(freed_, slot);
    keys_.emplace_back(slot, key);
    ++toggles_;
  }

  void clear() {
    for (uint32_t slot : slots_) known_[slot >> 6] = 0;
    for (uint32_t slot : made_slots_) known_[slot >> 6] = made_[slot >> 6] = 0;
    for (auto& [slot, key] : keys_) freed_[slot >> 6] = 0;
    slots_.clear();
    made_slots_.clear();
    keys_.clear();
    toggles_ = 0;
  }

 private:
  static bool bit(const std::vector<uint64_t>& bits, uint32_t slot) {
    return (slot >> 6) < bits.size() && (bits[slot >> 6] >> (slot & 63) & 1);
  }
  static void set(std::vector<uint64_t>& bits, uint32_t slot) { bits[slot >> 6] |= uint64_t(1) << (slot & 63); }
  template <class T>
  static void grow(std::vector<T>& to, size_t need) {
    if (need > to.capacity()) to.reserve(std::max(need, to.capacity() * 2));
  }

  const Table& table_;
  std::vector<uint64_t> known_, made_, freed_;  // a bit per slot
  std::vector<uint32_t> slots_, made_slots_;
  std::unique_ptr<uint8_t[]> records_;              // of slots_
  size_t room_ = 0;                                 // records
  std::vector<std::pair<uint32_t, int64_t>> keys_;  // of rows that were freed
  size_t toggles_ = 0;
};

}  // namespace everstep
