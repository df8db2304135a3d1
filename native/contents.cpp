// What becomes of whole partitions: their contents for mirrors, images, hand-over, digests.
#include <algorithm>
#include <cstring>

#include "store.h"

namespace everstep {

namespace {

constexpr int64_t kMaxPages = int64_t(1) << 24;  // of one table in one partition: a wrong image must not cost gigabytes
constexpr uint64_t kMaxSlots = 0xff000000u;

// A blob with one part, in the outbox.
struct Contents {
  Outbox& outbox;
  Outbox::Slot entry;
  blob::Writer w{nullptr};

  Contents(Outbox& to, uint32_t b, const Partition& partition, blob::Kind kind, const blob::PartHeader& part,
           size_t record_bytes, int entry_kind)
      : outbox(to) {
    blob::Marks marks;
    marks.fingerprint = partition.fingerprint;
    marks.clock = partition.clock;
    entry = outbox.reserve(b, partition.seq, entry_kind,
                           sizeof(blob::Header) + marks.bytes() + blob::part_bytes(kind, part.n, 0, record_bytes));
    blob::Header head;
    head.kind = kind;
    head.partition = b;
    head.n_parts = 1;
    head.seq = partition.seq;
    head.marks_bytes = uint32_t(marks.bytes());
    w = blob::Writer(entry.at);
    w.put(head);
    w.put_marks(marks);
    w.put(part);
  }
  ~Contents() { outbox.commit(entry); }
};

// Sums over the items of a set: the order of the items does not matter, that of the words in an item does.
struct Digest {
  uint64_t a = 0, b = 0, item = 0, words = 0;

  void word(uint64_t w) { item += mix64(w + ++words * kGolden); }
  void end() {
    a += mix64(item ^ kGolden);
    b += mix64(item + mix64(kGolden));
    item = words = 0;
  }
};

}  // namespace

void Store::protect(const std::vector<int64_t>& partitions, bool on) {
  for (int64_t b : partitions) partition_at(b);
  for (int64_t b : partitions) {
    Partition& partition = partitions_[b];
    std::lock_guard<std::mutex> hold(partition.mutex);
    if (on && partition.phase != Phase::kOwned) throw NotOwned("partition " + std::to_string(b) + " is not owned here");
    if (!on) flush_locked(uint32_t(b), partition);
    partition.protect = on;
  }
}

int64_t Store::emit(int64_t b, int kind, uint32_t table, int64_t lo, int64_t hi) {
  if (kind != blob::kHeads && kind != blob::kBodies) throw Malformed("contents are heads (2) or bodies (3)");
  if (lo < 0 || hi <= lo || hi > int64_t(Rows::kNone)) throw Malformed("[lo, hi) is not a range of slots");
  const Table& t = table_of(table);
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  const Rows& rows = *readable(partition, b).rows[t.index];
  if (kind == blob::kBodies && rows.recovering())
    throw Recovering("partition " + std::to_string(b) + " is being rebuilt");
  flush_locked(uint32_t(b), partition);  // contents go on from the differences before them
  const bool last = size_t(hi) >= rows.end();
  const size_t to = std::min<size_t>(size_t(hi), rows.end());
  std::vector<uint32_t> slots;
  for (size_t s = rows.next_used(size_t(lo)); s < to; s = rows.next_used(s + 1)) slots.push_back(uint32_t(s));
  blob::PartHeader part;
  part.table = table;
  part.n = uint32_t(slots.size());
  part.lo = uint32_t(lo);
  part.hi = uint32_t(hi);
  part.flags = last ? blob::kLast : 0;
  Contents out(outbox_, uint32_t(b), partition, blob::Kind(kind), part, t.record_bytes, kind);
  for (uint32_t s : slots) out.w.put(s);
  for (uint32_t s : slots) {
    if (kind == blob::kHeads) {
      out.w.put(rows.key(s));
    } else {
      std::memcpy(out.w.skip(t.record_bytes), rows.record(s), t.record_bytes);
    }
  }
  rows.let_go(size_t(lo), to);
  return last ? -1 : hi;
}

void Store::emit_slots(int64_t b, uint32_t table, const uint32_t* slots, size_t n) {
  const Table& t = table_of(table);
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  const Rows& rows = *readable(partition, b).rows[t.index];
  for (size_t i = 0; i < n; ++i) {
    if (rows.absent(slots[i])) throw Recovering("partition " + std::to_string(b) + " is being rebuilt");
  }
  flush_locked(uint32_t(b), partition);
  blob::PartHeader part;
  part.table = table;
  part.n = uint32_t(n);
  Contents out(outbox_, uint32_t(b), partition, blob::kBodies, part, t.record_bytes, blob::kSome);
  if (n) std::memcpy(out.w.skip(n * 4), slots, n * 4);
  for (size_t i = 0; i < n; ++i) {
    uint8_t* to = out.w.skip(t.record_bytes);
    if (rows.used(slots[i])) {
      std::memcpy(to, rows.record(slots[i]), t.record_bytes);
    } else {
      std::memset(to, 0, t.record_bytes);
    }
  }
}

void Store::emit_marks(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  readable(partition, b);
  flush_locked(uint32_t(b), partition);
  const auto blob = blob::marks_blob(uint32_t(b), partition.seq, partition.marks());
  Outbox::Slot entry = outbox_.reserve(uint32_t(b), partition.seq, blob::kMarks, blob.size());
  std::memcpy(entry.at, blob.data(), blob.size());
  outbox_.commit(entry);
}

std::vector<uint8_t> Store::marks(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  return blob::marks_blob(uint32_t(b), partition.seq, readable(partition, b).marks());
}

int64_t Store::seq(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  return readable(partition, b).seq;
}

int64_t Store::hand_over(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  if (readable(partition, b).phase == Phase::kOwned) {
    flush_locked(uint32_t(b), partition);
    partition.owned = false;
    partition.phase = Phase::kHandedOver;
    for (auto& rows : partition.rows) rows->running.clear();
  }
  return partition.seq;
}

void Store::resume(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  if (readable(partition, b).phase == Phase::kHandedOver) own_locked(partition);
}

void Store::drop(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  drop_incoming(partition);
  partition.clear();
}

std::vector<std::pair<uint32_t, uint64_t>> Store::partition_rows(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  std::vector<std::pair<uint32_t, uint64_t>> out;
  for (auto& rows : readable(partition, b).rows) out.emplace_back(rows->table().id, rows->count());
  return out;
}

size_t Store::partition_bytes(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  size_t out = 0;
  for (auto& rows : partition.rows) out += rows->bytes();
  return out;
}

std::pair<uint64_t, uint64_t> Store::digest(int64_t b, bool by_key) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  Digest d;
  for (auto& r : readable(partition, b).rows) {
    const Rows& rows = *r;
    if (rows.recovering()) throw Recovering("partition " + std::to_string(b) + " is being rebuilt");
    for (size_t s = rows.next_used(0); s < rows.end(); s = rows.next_used(s + 1)) {
      d.word(1);
      d.word(rows.table().id);
      d.word(by_key ? 0 : s);
      d.word(uint64_t(rows.key(uint32_t(s))));
      const uint8_t* record = rows.record(uint32_t(s));
      for (size_t i = 0; i < rows.table().record_bytes; i += 4) d.word(blob::Part::read<uint32_t>(record + i));
      d.end();
    }
    rows.let_go(0, rows.end());
  }
  for (auto& [shard, mark] : partition.shards) {
    for (uint64_t w : {uint64_t(2), uint64_t(shard), uint64_t(mark.watermark), by_key ? 0 : uint64_t(mark.fence)})
      d.word(w);
    d.end();
  }
  for (uint64_t w :
       {uint64_t(3), by_key ? 0 : uint64_t(partition.seq), partition.fingerprint, uint64_t(partition.clock)})
    d.word(w);
  d.end();
  for (uint32_t table : partition.initialised) {
    d.word(4);
    d.word(table);
    d.end();
  }
  return {d.a, d.b};
}

// ---------------------------------------------------------------- images

void Store::drop_incoming(Partition& partition) {
  for (auto& [table, pages] : partition.incoming) {
    for (uint8_t* page : pages) {
      if (page) pool_.give(page, table->page_bytes);
    }
  }
  partition.incoming.clear();
}

void Store::load_begin(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  if (partition.readable()) throw Malformed("partition " + std::to_string(b) + " is here already: drop it first");
  drop_incoming(partition);
  partition.clear();
  partition.phase = Phase::kLoading;
}

void Store::load_pages(int64_t b, uint32_t table, const int64_t* page_nos, size_t n, const uint8_t* pages) {
  const Table& t = table_of(table);
  Partition& partition = partition_at(b);
  for (size_t i = 0; i < n; ++i) {
    // (every slot of it has a number below that of no slot)
    if (page_nos[i] < 0 || page_nos[i] >= kMaxPages || uint64_t(page_nos[i] + 1) << t.page_bits > kMaxSlots)
      throw Malformed("page " + std::to_string(page_nos[i]) + " of table " + std::to_string(table) + " cannot be");
  }
  std::lock_guard<std::mutex> hold(partition.mutex);
  if (partition.phase != Phase::kLoading) throw Malformed("partition " + std::to_string(b) + " is not being loaded");
  std::vector<uint8_t*>* to = nullptr;
  for (auto& [known, have] : partition.incoming) {
    if (known == &t) to = &have;
  }
  if (!to) {
    partition.incoming.emplace_back(&t, std::vector<uint8_t*>());
    to = &partition.incoming.back().second;
  }
  for (size_t i = 0; i < n; ++i) {
    const size_t p = size_t(page_nos[i]);
    if (p >= to->size()) to->resize(p + 1, nullptr);
    if (!(*to)[p]) (*to)[p] = pool_.take_page(t.page_bytes);
    std::memcpy((*to)[p], pages + i * t.page_bytes, t.page_bytes);
  }
}

void Store::load_end(int64_t b, const uint8_t* marks, size_t marks_bytes) {
  Partition& partition = partition_at(b);
  std::vector<TablePages> pages;
  {
    std::lock_guard<std::mutex> hold(partition.mutex);
    if (partition.phase != Phase::kLoading) throw Malformed("partition " + std::to_string(b) + " is not being loaded");
    try {
      const blob::Blob blob = blob::parse_marks(marks, marks_bytes);
      if (blob.head.partition != uint32_t(b))
        throw Malformed("these are not the marks of partition " + std::to_string(b));
      pages.swap(partition.incoming);
      adopt_locked(uint32_t(b), partition, std::move(pages), blob.marks, blob.head.seq, false);
    } catch (...) {
      drop_incoming(partition);
      partition.clear();
      throw;
    }
  }
}

void Store::adopt(uint32_t b, std::vector<TablePages>&& pages, const blob::Marks& marks, int64_t seq, bool absent) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  if (partition.phase != Phase::kEmpty)
    throw Malformed("partition " + std::to_string(b) + " is here already: drop it first");
  adopt_locked(b, partition, std::move(pages), marks, seq, absent);
}

void Store::adopt_locked(uint32_t b, Partition& partition, std::vector<TablePages>&& pages, const blob::Marks& marks,
                         int64_t seq, bool absent) {
  try {
    for (auto& [table, of] : pages) {
      Rows& rows = *partition.rows[table->index];
      rows.adopt(std::move(of), b, n_partitions_);
      of.clear();
      if (absent) rows.expect_all();
    }
    partition.set_marks(marks, seq);
  } catch (...) {
    for (auto& [table, of] : pages) {
      for (uint8_t* page : of) {
        if (page) pool_.give(page, table->page_bytes);
      }
    }
    partition.clear();
    throw;
  }
  own_locked(partition);
}

// ---------------------------------------------------------------- snapshots

int64_t Store::snapshot_begin(int64_t b, int64_t since, std::vector<uint8_t>& marks) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  readable(partition, b);
  if (partition.snapshot) throw Malformed("a snapshot of partition " + std::to_string(b) + " is being read already");
  if (since >= int64_t(partition.generation) || since < -1)
    throw Malformed("partition " + std::to_string(b) + " had no snapshot " + std::to_string(since) + " here");
  for (auto& rows : partition.rows) {
    if (rows->recovering()) throw Recovering("partition " + std::to_string(b) + " is being rebuilt");
  }
  flush_locked(uint32_t(b), partition);
  marks = blob::marks_blob(uint32_t(b), partition.seq, partition.marks());
  partition.snapshot = true;
  const int64_t generation = int64_t(partition.generation++);
  for (auto& rows : partition.rows) rows->snapshot_begin(since, partition.generation);
  return generation;
}

void Store::snapshot_next(int64_t b, size_t max_bytes, std::vector<ImagePage>& pages, std::vector<uint8_t>& data) {
  Partition& partition = partition_at(b);
  for (size_t index = 0;; ++index) {
    const Table* table;
    for (;;) {
      // One page at a time, so that a push waits for one copy at most.
      std::unique_lock<std::mutex> hold(partition.mutex);
      if (!partition.snapshot) throw Malformed("no snapshot of partition " + std::to_string(b) + " is being read");
      if (index >= partition.rows.size()) return;
      Rows& rows = *partition.rows[index];
      table = &rows.table();
      const uint32_t p = rows.snapshot_next();
      if (p == Rows::kNone) break;
      if (!pages.empty() && data.size() + table->page_bytes > max_bytes) return;
      if (data.capacity() < data.size() + table->page_bytes) {
        hold.unlock();
        data.reserve(std::max(data.size() + table->page_bytes, std::min(max_bytes, size_t(64) << 20)));
        continue;
      }
      data.resize(data.size() + table->page_bytes);
      rows.snapshot_read(p, data.data() + data.size() - table->page_bytes);
      pages.push_back(ImagePage{table->id, p});
    }
  }
}

bool Store::snapshot_slots(int64_t b, uint32_t table, const std::vector<int64_t>& pages, std::vector<uint8_t>& bits) {
  const Table& t = table_of(table);
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  if (!partition.snapshot) throw Malformed("no snapshot of partition " + std::to_string(b) + " is being read");
  if (t.index >= partition.rows.size()) return false;
  const Rows& rows = *partition.rows[t.index];
  if (!rows.snapshot_knows_slots()) return false;
  const size_t n = t.slots() / 8;
  bits.resize(pages.size() * n);
  for (size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] < 0 || size_t(pages[i]) >= rows.snapshot_pages())
      throw Malformed("page " + std::to_string(pages[i]) + " is not in the snapshot of partition " + std::to_string(b));
    rows.snapshot_slots(uint32_t(pages[i]), bits.data() + i * n);
  }
  return true;
}

void Store::snapshot_end(int64_t b) {
  Partition& partition = partition_at(b);
  std::lock_guard<std::mutex> hold(partition.mutex);
  partition.snapshot = false;
  for (auto& rows : partition.rows) rows->snapshot_end();
}

}  // namespace everstep
