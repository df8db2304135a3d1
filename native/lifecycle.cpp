// Rows that are freed: those that nobody pushes any more, and those that have to make room for others.
#include <algorithm>
#include <cstring>

#include "change.h"
#include "store.h"

namespace everstep {

void Store::set_limit(size_t bytes, bool evict) {
  limit_ = bytes;
  evict_ = evict;
}

void Store::full(const Table& table) const {
  throw Full("table " + std::to_string(table.id) + " cannot grow: " + std::to_string(pool_.used_bytes()) +
             " bytes are in use, the ceiling is " + std::to_string(limit_.load()) +
             ": raise it, add parameter servers, or let rows expire");
}

// Frees these rows (ascending) in one change.
void Store::free_rows(uint32_t b, Partition& partition, Rows& rows, const std::vector<uint32_t>& slots) {
  if (slots.empty()) return;
  const Table& table = rows.table();
  for (uint32_t slot : slots) rows.touch(slot);
  if (lags(partition)) {
    rows.baseline.reserve(slots.size(), rows.end());
    rows.baseline.reserve_freed(slots.size());
    for (uint32_t slot : slots) rows.baseline.freeing(slot, rows.key(slot), rows.record(slot));
    join_open(partition);
    for (uint32_t slot : slots) rows.erase(slot);
    return;
  }
  if (partition.protect) {
    blob::Marks marks;
    marks.fingerprint = partition.fingerprint;
    marks.clock = partition.clock;
    Change change(outbox_);
    change.lay_out(b, partition.seq + 1, marks, {Change::Shape{&table, slots.size(), slots.size()}});
    Change::Place& place = change.place(0);
    for (size_t i = 0; i < slots.size(); ++i) {
      change.row(place, i, slots[i], true, rows.key(slots[i]));
      std::memcpy(place.records + i * table.record_bytes, rows.record(slots[i]), table.record_bytes);
    }
    change.commit();
  }
  ++partition.seq;
  for (uint32_t slot : slots) rows.erase(slot);
}

size_t Store::expire(int64_t b, uint32_t now_s, size_t max_slots, bool& round) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  if (!partition.owned) throw NotOwned("partition " + std::to_string(b) + " is not owned here");
  size_t freed = 0;
  round = false;
  while (max_slots) {
    if (partition.expire_table >= partition.rows.size()) {
      partition.expire_table = partition.expire_slot = 0;
      round = true;
      break;
    }
    Rows& rows = *partition.rows[partition.expire_table];
    const LifeCycle& life = rows.table().life;
    if (!rows.table().meta || rows.recovering() || !(life.expire_batches || life.expire_s)) {
      ++partition.expire_table;
      partition.expire_slot = 0;
      continue;
    }
    const size_t end = std::min(rows.end(), partition.expire_slot + max_slots);
    std::vector<uint32_t> over;
    for (size_t s = rows.next_used(partition.expire_slot); s < end; s = rows.next_used(s + 1)) {
      const uint32_t* meta = rows.meta(uint32_t(s));
      const bool by_clock =
          life.expire_batches && uint32_t(partition.clock) - meta[kPushedClock] >= life.expire_batches;
      const bool by_time = life.expire_s && now_s > meta[kPushedAt] && now_s - meta[kPushedAt] >= life.expire_s;
      if (by_clock || by_time) over.push_back(uint32_t(s));
    }
    free_rows(uint32_t(b), partition, rows, over);
    freed += over.size();
    max_slots -= end - std::min(end, partition.expire_slot);
    partition.expire_slot = end;
    if (end == rows.end()) {
      ++partition.expire_table;
      partition.expire_slot = 0;
    }
  }
  return freed;
}

void Store::make_room(uint32_t b, Partition& partition, Rows& rows, size_t n, std::vector<uint32_t> keep) {
  const size_t have = rows.free_slots();
  // Rows that are not back yet look as if nobody had ever pushed them: a partition that is being rebuilt frees none.
  if (n <= have || !rows.table().meta || rows.recovering()) return;
  std::sort(keep.begin(), keep.end());
  std::vector<std::pair<uint32_t, uint32_t>> by_age;  // (pushes since, slot): the oldest first
  for (size_t s = rows.next_used(0); s < rows.end(); s = rows.next_used(s + 1)) {
    if (!std::binary_search(keep.begin(), keep.end(), uint32_t(s)))
      by_age.emplace_back(~(uint32_t(partition.clock) - rows.meta(uint32_t(s))[kPushedClock]), uint32_t(s));
  }
  // Some more than needed, so that not every push has to look at every row.
  const size_t count = std::min<size_t>(std::max<size_t>(n - have, rows.count() / 16), by_age.size());
  std::nth_element(by_age.begin(), by_age.begin() + std::ptrdiff_t(count), by_age.end());
  std::vector<uint32_t> slots;
  slots.reserve(count);
  for (size_t i = 0; i < count; ++i) slots.push_back(by_age[i].second);
  std::sort(slots.begin(), slots.end());
  free_rows(b, partition, rows, slots);
}

}  // namespace everstep
