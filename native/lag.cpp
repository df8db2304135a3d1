// Mirrors that may be behind (protect: lag): the changes of a partition stay open until one difference is made of them.
//
// Every reader of a partition's stream sees what it would see without: an open change has its seq from the beginning,
// and whatever goes into the outbox for this partition (contents, marks), or ends its stream (hand over, protection
// ends), closes it first.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "change.h"
#include "prefetch.h"
#include "store.h"

namespace everstep {

namespace {

constexpr size_t kAhead = 8;  // rows whose lines are on their way

// How many entries of a difference tell of what is in the baseline, and how many of them toggle their slot.
void count_entries(const Rows& rows, size_t& n, size_t& toggled) {
  const Baseline& base = rows.baseline;
  n = base.count();
  toggled = 0;
  if (!base.toggles()) return;
  n = 0;
  for (size_t i = 0; i < base.count(); ++i) {
    const uint32_t slot = base.slot(i);
    const bool used = rows.used(slot);
    if (base.was_free(slot)) {
      n += used;
      toggled += used;
    } else if (base.was_freed(slot) && !used) {
      ++n;
      ++toggled;
    } else if (base.was_freed(slot) && rows.key(slot) != base.old_key(slot)) {
      n += 2;
      toggled += 2;
    } else {
      ++n;
    }
  }
}

// The entries of a table: what its rows were, XOR what they are. `order`: of the baseline.
void fill(Change& change, size_t part, const Rows& rows, const std::vector<uint32_t>& order) {
  const Baseline& base = rows.baseline;
  const size_t width = rows.table().record_bytes;
  Change::Place& place = change.place(part);
  size_t at = 0;
  auto put_change = [&](size_t i, uint32_t slot) {
    change.row(place, at, slot, false, 0);
    xor_of(place.records + at++ * width, base.old(i), rows.record(slot), width);
  };
  auto put_old = [&](size_t i, uint32_t slot) {
    change.row(place, at, slot, true, base.old_key(slot));
    std::memcpy(place.records + at++ * width, base.old(i), width);
  };
  auto put_new = [&](uint32_t slot) {
    change.row(place, at, slot, true, rows.key(slot));
    std::memcpy(place.records + at++ * width, rows.record(slot), width);
  };
  if (!base.toggles()) {
    for (size_t k = 0; k < order.size(); ++k) {
      if (k + kAhead < order.size()) {
        prefetch_lines<0>(rows.record(base.slot(order[k + kAhead])), width, 1024);
        prefetch_lines<0>(base.old(order[k + kAhead]), width, 1024);
      }
      put_change(order[k], base.slot(order[k]));
    }
    return;
  }
  for (size_t k = 0; k < order.size(); ++k) {
    if (k + kAhead < order.size()) {
      rows.prefetch_row(base.slot(order[k + kAhead]));
      if (order[k + kAhead] < base.kept()) prefetch_lines<0>(base.old(order[k + kAhead]), width, 1024);
    }
    const size_t i = order[k];
    const uint32_t slot = base.slot(i);
    const bool used = rows.used(slot);
    if (base.was_free(slot)) {
      if (used) put_new(slot);
    } else if (!base.was_freed(slot)) {
      put_change(i, slot);
    } else if (!used) {
      put_old(i, slot);
    } else if (rows.key(slot) == base.old_key(slot)) {
      put_change(i, slot);
    } else {  // another row now: the old one goes, and the new one comes
      put_old(i, slot);
      put_new(slot);
    }
  }
}

}  // namespace

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Store::set_lag(bool on, size_t bytes, int64_t pushes, double late_s) {
  if (on && (!bytes || pushes < 1 || !(late_s > 0) || late_s > 1e6))
    throw Malformed("a lag has bytes, pushes and seconds above 0");
  lag_bytes_ = bytes;
  lag_pushes_ = pushes;
  late_ns_ = int64_t(late_s * 1e9);
  lag_ = on;
}

void Store::join_open(Partition& partition) {
  if (partition.open.number) return;
  ++partition.seq;
  partition.open.since_ns = steady_ns();
  partition.open.pushes = 0;
  partition.open.number = opened_.fetch_add(1) + 1;
}

// Throws std::bad_alloc with nothing changed.
bool Store::flush_locked(uint32_t b, Partition& partition) {
  if (!partition.open.number) return false;
  blob::Marks marks;
  marks.fingerprint = partition.fingerprint;
  marks.clock = partition.clock;
  for (int64_t shard : partition.open.shards) {
    auto found = partition.shards.find(shard);
    if (found == partition.shards.end()) {
      marks.shards.push_back(blob::Mark{shard, -1, 0});
    } else {
      marks.shards.push_back(blob::Mark{shard, found->second.watermark, found->second.fence});
    }
  }
  marks.initialised.assign(partition.open.initialised.begin(), partition.open.initialised.end());
  std::vector<Change::Shape> shapes;
  std::vector<Rows*> changed;
  std::vector<std::vector<uint32_t>> orders;
  for (auto& rows : partition.rows) {
    if (rows->baseline.empty()) continue;
    changed.push_back(rows.get());
    rows->baseline.sort_keys();
    orders.push_back(rows->baseline.by_slot());
    Change::Shape shape{&rows->table(), 0, 0};
    count_entries(*rows, shape.n, shape.n_toggled);
    shapes.push_back(shape);
  }
  Change change(outbox_);
  change.lay_out(b, partition.seq, marks, shapes);
  for (size_t part = 0; part < changed.size(); ++part) {
    fill(change, part, *changed[part], orders[part]);
    changed[part]->baseline.clear();
  }
  change.commit();
  partition.open.number = 0;
  partition.open.shards.clear();
  partition.open.initialised.clear();
  return true;
}

void Store::flush_if_due(uint32_t b, Partition& partition, int64_t now_ns) {
  if (!partition.open.number) return;
  size_t bytes = 0;
  for (auto& rows : partition.rows) bytes += rows->baseline.count() * rows->table().record_bytes;
  if (bytes >= lag_bytes_ || partition.open.pushes >= lag_pushes_ || now_ns - partition.open.since_ns >= late_ns_)
    flush_locked(b, partition);
}

bool Store::flush(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  return flush_locked(uint32_t(b), partition);
}

Store::Lag Store::lag(bool sizes) {
  Lag out;
  // Read first: whoever opened one of these holds the partition's mutex until that can be seen.
  out.opened = out.closed = opened_.load();
  const int64_t now_ns = steady_ns();
  int64_t since_ns = now_ns;
  for (uint32_t b = 0; b < n_partitions_; ++b) {
    Partition& partition = partitions_[b];
    if (!partition.owned) continue;  // nothing is open where nothing is owned
    std::lock_guard<std::mutex> hold(partition.mutex);
    if (!partition.open.number) continue;
    out.closed = std::min(out.closed, partition.open.number - 1);
    ++out.partitions;
    since_ns = std::min(since_ns, partition.open.since_ns);
    for (size_t t = 0; sizes && t < partition.rows.size(); ++t) {
      const auto& rows = partition.rows[t];
      out.rows += rows->baseline.count();
      out.bytes += rows->baseline.count() * rows->table().record_bytes;
    }
  }
  out.oldest_s = double(now_ns - since_ns) * 1e-9;
  return out;
}

size_t Store::flush_older(double age_s, size_t most) {
  const int64_t before = steady_ns() - int64_t(age_s * 1e9);
  std::vector<std::pair<int64_t, uint32_t>> due;
  for (uint32_t b = 0; b < n_partitions_; ++b) {
    if (!partitions_[b].owned) continue;
    std::lock_guard<std::mutex> hold(partitions_[b].mutex);
    if (partitions_[b].open.number && partitions_[b].open.since_ns <= before)
      due.emplace_back(partitions_[b].open.since_ns, b);
  }
  std::sort(due.begin(), due.end());
  size_t done = 0;
  for (auto& [since, b] : due) {
    if (done >= most) break;
    std::lock_guard<std::mutex> hold(partitions_[b].mutex);
    done += flush_locked(b, partitions_[b]);
  }
  return done;
}

}  // namespace everstep
