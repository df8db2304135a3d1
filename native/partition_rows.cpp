#include "partition_rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace everstep {

// ---------------------------------------------------------------- index

// The free entry where `hash` goes; there is one.
inline Rows::Entry* Rows::free_entry(Entry* entries, uint64_t mask, uint64_t hash) {
  for (uint64_t g = hash & mask;; g = (g + 1) & mask) {
    for (Entry* e = entries + g * kGroup; e != entries + (g + 1) * kGroup; ++e) {
      if (e->slot == kNone) return e;
    }
  }
}

void Rows::free_index() {
  const size_t bytes = index_bytes();
  Entry* old = entries_.load(std::memory_order_relaxed);
  entries_.store(nullptr, std::memory_order_relaxed);
  mask_.store(0, std::memory_order_relaxed);
  if (old) pool_.give(reinterpret_cast<uint8_t*>(old), bytes);
}

void Rows::resize_index(uint64_t size) {
  Entry* old = entries_.load(std::memory_order_relaxed);
  const uint64_t old_size = index_bytes() / sizeof(Entry);
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

// Takes an entry out. A search passes only through full groups: where the hole makes a full group one that is not, the
// next entry whose search passes through here has to come back, and leaves a hole in its turn.
void Rows::erase_entry(Entry* entry) {
  Entry* entries = entries_.load(std::memory_order_relaxed);
  const uint64_t mask = mask_.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t group = uint64_t(entry - entries) / kGroup;
    Entry* first = entries + group * kGroup;
    Entry* back = nullptr;
    if (first[kGroup - 1].slot != kNone) {
      for (uint64_t g = (group + 1) & mask; !back && g != group; g = (g + 1) & mask) {
        Entry* e = entries + g * kGroup;
        for (uint64_t i = 0; i < kGroup && e[i].slot != kNone; ++i) {
          const uint64_t home = key_hash(e[i].key, table_.salt) & mask;
          if (((g - home) & mask) >= ((g - group) & mask)) {
            back = e + i;
            break;
          }
        }
        if (e[kGroup - 1].slot == kNone) break;
      }
    }
    if (back) {
      *entry = *back;
      entry = back;
      continue;
    }
    uint64_t last = kGroup - 1;
    while (first[last].slot == kNone) --last;
    *entry = first[last];
    first[last] = Entry{0, kNone};
    return;
  }
}

// ---------------------------------------------------------------- slots

uint32_t Rows::free_slot() {
  size_t p = first_free_;
  while (p < pages_.size() && (!pages_[p] || used_[p] == table_.slots())) ++p;
  first_free_ = p;
  if (p == pages_.size()) {
    size_t e = first_empty_;
    while (e < pages_.size() && pages_[e]) ++e;
    first_empty_ = e;
    return uint32_t(e << table_.page_bits);
  }
  const uint64_t* bits = Table::bitmap(pages_[p]);
  size_t word = 0;
  while (bits[word] == ~uint64_t(0)) ++word;
  return uint32_t((p << table_.page_bits) + word * 64 + size_t(__builtin_ctzll(~bits[word])));
}

size_t Rows::bytes_for(size_t n) const {
  const size_t have = free_slots();
  const size_t pages = n > have ? (n - have + table_.slots() - 1) >> table_.page_bits : 0;
  const uint64_t entries = index_bytes() / sizeof(Entry);
  uint64_t size = entries;
  while (n && (uint64_t(count_) + n) * 10 > size * 7) size = size ? size * 2 : 16;
  return pages * table_.page_bytes + (size - entries) * sizeof(Entry);
}

uint32_t Rows::insert(int64_t key, uint64_t hash, const float* values) {
  const uint64_t size = index_bytes() / sizeof(Entry);
  if ((uint64_t(count_) + 1) * 10 > size * 7) resize_index(size ? size * 2 : 16);
  if (count_ >= 0xff000000u)
    throw std::runtime_error("a partition holds at most 4278190080 rows of a table: use more partitions");
  const uint32_t slot = free_slot();
  const size_t p = slot >> table_.page_bits, i = in_page(slot);
  if (p == pages_.size()) {
    pages_.push_back(nullptr);
    used_.push_back(0);
    generations_.push_back(generation_);
    changed_.resize((end() + 63) / 64);
    touched_.push_back(1);
  }
  touch(slot);
  if (!pages_[p]) {
    pages_[p] = pool_.take_zeroed_page(table_.page_bytes);
    page_bytes_ += table_.page_bytes;
    first_free_ = std::min(first_free_, p);
  }
  touch_cold(record(slot));
  Table::bitmap(pages_[p])[i >> 6] |= uint64_t(1) << (i & 63);
  table_.keys(pages_[p])[i] = key;
  ++used_[p];
  if (table_.dim) {
    float* at = this->values(slot);
    if (values) {
      std::memcpy(at, values, table_.dim * sizeof(float));
    } else {
      table_.first_values(key, at);
    }
    table_.first_state(at, state(slot));
  }
  *free_entry(entries_.load(std::memory_order_relaxed), mask_.load(std::memory_order_relaxed), hash) = Entry{key, slot};
  ++count_;
  return slot;
}

void Rows::erase(uint32_t slot) {
  touch(slot);
  running.forget(slot);
  const size_t p = slot >> table_.page_bits, i = in_page(slot);
  const int64_t key = this->key(slot);
  erase_entry(entry_of(key, key_hash(key, table_.salt)));
  Table::bitmap(pages_[p])[i >> 6] &= ~(uint64_t(1) << (i & 63));
  table_.keys(pages_[p])[i] = 0;
  std::memset(record(slot), 0, table_.record_bytes);
  --count_;
  ++epoch_;
  first_free_ = std::min(first_free_, p);
  if (--used_[p] == 0) {
    first_empty_ = std::min(first_empty_, p);
    pool_.give(pages_[p], table_.page_bytes);
    pages_[p] = nullptr;
    page_bytes_ -= table_.page_bytes;
  }
}

size_t Rows::next_used(size_t slot) const {
  const size_t slots = table_.slots();
  for (size_t p = slot >> table_.page_bits; p < pages_.size(); ++p, slot = p << table_.page_bits) {
    if (!pages_[p]) continue;
    const uint64_t* bits = Table::bitmap(pages_[p]);
    for (size_t i = slot & (slots - 1); i < slots; i = (i | 63) + 1) {
      const uint64_t word = bits[i >> 6] >> (i & 63);
      if (word) return (p << table_.page_bits) + i + size_t(__builtin_ctzll(word));
    }
  }
  return end();
}

void Rows::let_go(size_t lo, size_t hi) const {
  if (!pool_.cold.any_out()) return;
  for (size_t p = lo >> table_.page_bits; p < pages_.size() && p << table_.page_bits < hi; ++p) {
    if (pages_[p]) pool_.cold.let_go(pages_[p], table_.page_bytes);
  }
}

// ---------------------------------------------------------------- whole pages

void Rows::clear() {
  snapshot_end();
  running.clear();
  baseline.clear();
  free_index();
  for (uint8_t* page : pages_) {
    if (page) pool_.give(page, table_.page_bytes);
  }
  pages_ = {};
  used_ = {};
  generations_ = {};
  changed_ = {};
  changed_known_ = false;
  touched_ = {};
  absent_ = {};
  count_ = 0;
  ++epoch_;
  page_bytes_ = first_free_ = first_empty_ = 0;
}

std::vector<uint8_t*> Rows::give_up() {
  std::vector<uint8_t*> out = std::move(pages_);
  pages_ = {};
  clear();
  return out;
}

void Rows::adopt(std::vector<uint8_t*>&& pages, uint32_t partition, uint32_t n_partitions) {
  if (count_ || !pages_.empty()) throw Malformed("a partition that has rows cannot take pages");
  const size_t slots = table_.slots();
  const std::string where = "table " + std::to_string(table_.id) + " of partition " + std::to_string(partition) + ": ";
  std::vector<uint16_t> used(pages.size());
  uint64_t count = 0;
  std::vector<uint8_t> zeros(table_.record_bytes);
  for (size_t p = 0; p < pages.size(); ++p) {
    if (!pages[p]) continue;
    const uint64_t* bits = Table::bitmap(pages[p]);
    const int64_t* keys = table_.keys(pages[p]);
    for (size_t i = 0; i < slots; ++i) {
      if (bits[i >> 6] >> (i & 63) & 1) {
        ++used[p];
        if (partition_of(key_hash(keys[i], table_.salt), n_partitions) != partition)
          throw Malformed(where + "key " + std::to_string(keys[i]) + " belongs to another partition");
      } else if (keys[i] || std::memcmp(table_.record(pages[p], i), zeros.data(), zeros.size()) != 0) {
        throw Malformed(where + "a slot that is not used is not zero");
      }
    }
    const size_t tail = table_.head_bytes + slots * table_.record_bytes;
    auto zero = [&](size_t from, size_t to) {
      return std::all_of(pages[p] + from, pages[p] + to, [](uint8_t x) { return x == 0; });
    };
    if (!zero((slots + 7) / 8, table_.keys_at) || !zero(tail, table_.page_bytes))
      throw Malformed(where + "a page's padding is not zero");
    count += used[p];
  }
  if (count >= 0xff000000u) throw Malformed(where + "too many rows");
  uint64_t size = 16;
  while (count * 10 > size * 7) size *= 2;
  try {
    if (count) resize_index(size);
    Entry* entries = entries_.load(std::memory_order_relaxed);
    const uint64_t mask = mask_.load(std::memory_order_relaxed);
    for (size_t p = 0; p < pages.size(); ++p) {
      if (!used[p]) continue;
      const uint64_t* bits = Table::bitmap(pages[p]);
      const int64_t* keys = table_.keys(pages[p]);
      for (size_t i = 0; i < slots; ++i) {
        if (!(bits[i >> 6] >> (i & 63) & 1)) continue;
        const uint64_t hash = key_hash(keys[i], table_.salt);
        if (entry_of(keys[i], hash)) throw Malformed(where + "key " + std::to_string(keys[i]) + " stands twice");
        *free_entry(entries, mask, hash) = Entry{keys[i], uint32_t((p << table_.page_bits) + i)};
      }
    }
    generations_.assign(pages.size(), generation_);
    touched_.assign(pages.size(), 1);
  } catch (...) {
    free_index();
    throw;
  }
  changed_.assign(((pages.size() << table_.page_bits) + 63) / 64, 0);
  changed_known_ = false;
  pages_ = std::move(pages);
  used_ = std::move(used);
  let_go(0, end());
  count_ = uint32_t(count);
  for (size_t p = 0; p < pages_.size(); ++p) {
    if (!pages_[p]) continue;
    if (used_[p]) {
      page_bytes_ += table_.page_bytes;
    } else {
      pool_.give(pages_[p], table_.page_bytes);
      pages_[p] = nullptr;
    }
  }
}

void Rows::expect_all() {
  absent_.assign((end() + 63) / 64 + 1, 0);
  for (size_t s = next_used(0); s < end(); s = next_used(s + 1)) absent_[s >> 6] |= uint64_t(1) << (s & 63);
}

// ---------------------------------------------------------------- snapshots

void Rows::touch_page(size_t p) {
  if (p < pending_.size() && pending_[p] && pages_[p] && !aside_[p]) {
    aside_[p] = pool_.take(table_.page_bytes);
    std::memcpy(aside_[p], pages_[p], table_.page_bytes);
  } else if (p < pending_.size() && pending_[p] && !pages_[p] && !aside_[p]) {
    aside_[p] = pool_.take_zeroed(table_.page_bytes);
  }
  generations_[p] = generation_;
  touched_[p] = 1;
}

void Rows::snapshot_begin(int64_t since, uint64_t next_generation) {
  pending_.assign(pages_.size(), 0);
  aside_.assign(pages_.size(), nullptr);
  next_pending_ = 0;
  // A page that lost its rows since then is to be read too: zeros over what the earlier image has there.
  for (size_t p = 0; p < pages_.size(); ++p)
    pending_[p] = since < 0 ? pages_[p] != nullptr : generations_[p] > uint64_t(since);
  shot_known_ = changed_known_ && since >= 0 && uint64_t(since) + 1 == generation_;
  shot_.assign(changed_.size(), 0);
  shot_.swap(changed_);
  changed_known_ = true;
  generation_ = next_generation;
  tracking_ = true;
  std::fill(touched_.begin(), touched_.end(), uint8_t(0));
}

uint32_t Rows::snapshot_next() const {
  while (next_pending_ < pending_.size() && !pending_[next_pending_]) ++next_pending_;
  return next_pending_ < pending_.size() ? next_pending_ : kNone;
}

void Rows::snapshot_read(uint32_t p, uint8_t* to) {
  if (const uint8_t* from = aside_[p] ? aside_[p] : pages_[p]) {
    std::memcpy(to, from, table_.page_bytes);
  } else {
    std::memset(to, 0, table_.page_bytes);
  }
  if (pages_[p]) pool_.cold.let_go(pages_[p], table_.page_bytes);
  if (aside_[p]) pool_.give(aside_[p], table_.page_bytes);
  aside_[p] = nullptr;
  pending_[p] = 0;
}

void Rows::snapshot_slots(uint32_t p, uint8_t* to) const {
  const size_t n = table_.slots() / 8, at = size_t(p) * n;
  std::memcpy(to, reinterpret_cast<const uint8_t*>(shot_.data()) + at, n);
}

void Rows::snapshot_end() {
  for (uint8_t* page : aside_) {
    if (page) pool_.give(page, table_.page_bytes);
  }
  pending_ = {};
  aside_ = {};
  shot_ = {};
  shot_known_ = false;
}

}  // namespace everstep
