#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_set>

#include "change.h"
#include "prefetch.h"
#include "store.h"

namespace everstep {

namespace {

constexpr size_t kAhead = 24;  // lookups whose index lines are on their way
constexpr size_t kBlock = 8;   // rows whose lines are fetched while those of the block before are used
constexpr int64_t kMaxBatch = int64_t(1) << 24;
constexpr size_t kMaxSpans = size_t(1) << 16;

bool bit(const std::string& bitmap, uint32_t b) {
  return (b >> 3) < bitmap.size() && (uint8_t(bitmap[b >> 3]) >> (b & 7) & 1);
}

void set_bit(std::string& bitmap, uint32_t b) { bitmap[b >> 3] = char(uint8_t(bitmap[b >> 3]) | 1u << (b & 7)); }

struct Run {
  uint32_t partition;
  size_t begin, end;
  uint64_t epoch;  // of the partition's rows when the slots were looked up
};

// All that a push consumes of one shard: its spans, which follow each other.
struct Whole {
  int64_t shard, lo, hi, lease;
};

// The spans of a push by shard, in the order of their first ones. Throws Malformed.
std::vector<Whole> by_shard(const std::vector<Span>& spans) {
  if (spans.empty() || spans.size() > kMaxSpans)
    throw Malformed("a push has 1 to " + std::to_string(kMaxSpans) + " spans");
  std::vector<Whole> out;
  for (const Span& s : spans) {
    if (s.shard < 0 || s.lease < 0) throw Malformed("shard and lease must not be negative");
    if (s.lo < 0 || s.hi <= s.lo || s.hi - s.lo > kMaxBatch)
      throw Malformed("[" + std::to_string(s.lo) + ", " + std::to_string(s.hi) +
                      ") is not a range of at most 2^24 samples");
    auto known = std::find_if(out.begin(), out.end(), [&](const Whole& w) { return w.shard == s.shard; });
    if (known == out.end()) {
      out.push_back(Whole{s.shard, s.lo, s.hi, s.lease});
    } else if (s.lo != known->hi || s.lease != known->lease) {
      throw Malformed("the spans of a shard do not follow each other under one lease");
    } else {
      known->hi = s.hi;
    }
  }
  return out;
}

// A key that has no row, and gets none in this push or one that it had to wait for.
struct Sighting {
  uint32_t i;        // place in `keys`
  uint32_t slot;     // among the candidates
  bool first, last;  // the candidate is made or freed
};

struct PartWork {
  const Table* table = nullptr;
  const PushPart* part = nullptr;
  double lr = 0;
  Optimizer other;                       // with the part's options
  const Optimizer* optimizer = nullptr;  // that, or the table's
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> partitions;
  std::vector<uint32_t> slots;
  std::vector<Run> runs;
  std::vector<uint32_t> made;       // places in `keys` of the rows made in the partition at hand
  Running* running = nullptr;       // of the partition at hand; null: the gradients are applied by themselves
  bool by_gradients = false;        // the change says which gradients were applied
  uint8_t* difference = nullptr;    // of the record of the key at the run's begin, for the partition at hand
  std::vector<Sighting> sightings;  // in the partition at hand, as are the next
  size_t updated = 0;
  size_t cursor = 0;
  size_t missing = 0;  // keys without a row yet

  Run at_hand{};  // of the partition at hand; empty if it has no rows of this part

  Run* at(uint32_t partition) {
    while (cursor < runs.size() && runs[cursor].partition < partition) ++cursor;
    return cursor < runs.size() && runs[cursor].partition == partition ? &runs[cursor] : nullptr;
  }
};

// Rows of one part in one partition: looked up or updated while the next piece's lines are on their way. `nth`: of
// those that are updated.
struct Piece {
  size_t part, begin, end, nth;
};

void turn_to(std::vector<PartWork>& works, size_t n_parts, uint32_t partition) {
  for (size_t p = 0; p < n_parts; ++p) {
    const Run* run = works[p].at(partition);
    works[p].at_hand = run ? *run : Run{partition, 0, 0, 0};
  }
}

void cut_pieces(const std::vector<PartWork>& works, size_t n_parts, size_t size, bool only_rows,
                std::vector<Piece>& pieces) {
  pieces.clear();
  for (size_t p = 0; p < n_parts; ++p) {
    const PartWork& work = works[p];
    const size_t end = work.at_hand.end;
    if (!only_rows || !work.table->candidates) {
      for (size_t at = work.at_hand.begin; at < end; at += size)
        pieces.push_back(Piece{p, at, std::min(end, at + size), at - work.at_hand.begin});
      continue;
    }
    size_t nth = 0;
    for (size_t at = work.at_hand.begin; at < end;) {
      if (work.slots[at] == Rows::kNone) {
        ++at;
        continue;
      }
      size_t to = at + 1;
      while (to < end && to - at < size && work.slots[to] != Rows::kNone) ++to;
      pieces.push_back(Piece{p, at, to, nth});
      nth += to - at;
      at = to;
    }
  }
}

// Rows say when they were pushed last.
void pushed(const Table& table, float* const* values, size_t n, int64_t clock, uint32_t now_s) {
  for (size_t k = 0; k < n; ++k) {
    auto* meta = reinterpret_cast<uint32_t*>(values[k] + table.dim + table.state);
    meta[kPushedClock] = uint32_t(clock);
    meta[kPushedAt] = table.life.expire_s ? now_s : 0;
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

// False: rows of these keys, or what was counted of them, are being rebuilt.
bool all_here(const PartWork& work, const Partition& partition, size_t begin, size_t end) {
  const Rows& rows = *partition.rows[work.table->index];
  const Rows* waiting = work.table->candidates ? partition.rows[work.table->candidates->index].get() : nullptr;
  for (size_t i = begin; rows.recovering() && i < end; ++i) {
    if (work.slots[i] != Rows::kNone && rows.absent(work.slots[i])) return false;
  }
  for (size_t i = begin; waiting && waiting->recovering() && i < end; ++i) {
    if (work.slots[i] != Rows::kNone) continue;
    const uint32_t slot = waiting->find(work.part->keys[i], work.hashes[i]);
    if (slot != Rows::kNone && waiting->absent(slot)) return false;
  }
  return true;
}

// How many of the missing keys of the run at hand get a row, and how many become candidates.
void count_new(const PartWork& work, const Partition& partition, size_t& rows, size_t& candidates) {
  rows = candidates = 0;
  for (size_t i = work.at_hand.begin; work.missing && i < work.at_hand.end; ++i) {
    if (work.slots[i] != Rows::kNone) continue;
    if (!work.table->candidates) {
      ++rows;
      continue;
    }
    const Rows& waiting = *partition.rows[work.table->candidates->index];
    const uint32_t slot = waiting.find(work.part->keys[i], work.hashes[i]);
    if (slot == Rows::kNone) {
      ++candidates;
    } else if (waiting.meta(slot)[kSightings] >= work.table->life.admit_after) {
      ++rows;
    }
  }
}

// Looks the keys of the run at hand up again where others may have made or freed rows since the first time. False: rows
// are being rebuilt.
bool look_again(PartWork& work, const Partition& partition) {
  const Rows& rows = *partition.rows[work.table->index];
  const bool all = rows.epoch() != work.at_hand.epoch;
  for (size_t i = work.at_hand.begin; (all || work.missing) && i < work.at_hand.end; ++i) {
    if (!all && work.slots[i] != Rows::kNone) continue;
    work.slots[i] = rows.find(work.part->keys[i], work.hashes[i]);
    work.missing += work.slots[i] == Rows::kNone;
  }
  return !all || all_here(work, partition, work.at_hand.begin, work.at_hand.end);
}

// What can fail (memory for rows, their difference, copies for a snapshot) comes before the first update: a partition
// has all of a batch or nothing. Makes the rows that are missing and admitted, counts the others, and lays the
// difference out.
void prepare(std::vector<PartWork>& works, size_t n_parts, uint32_t b, Partition& partition, uint32_t now_s,
             int64_t step, blob::Marks& marks, Change& change, bool direct) {
  const bool lagging = partition.protect && !direct;
  for (size_t p = 0; p < n_parts; ++p) {
    works[p].made.clear();
    works[p].sightings.clear();
  }
  thread_local std::vector<Change::Shape> shapes;
  shapes.clear();
  try {
    for (size_t p = 0; p < n_parts; ++p) {
      PartWork& work = works[p];
      const size_t begin = work.at_hand.begin, end = work.at_hand.end;
      if (begin == end) continue;
      Rows& rows = *partition.rows[work.table->index];
      Rows* waiting = work.table->candidates ? partition.rows[work.table->candidates->index].get() : nullptr;
      work.updated = end - begin;
      for (size_t i = begin; work.missing && i < end; ++i) {
        if (work.slots[i] != Rows::kNone) continue;
        const int64_t key = work.part->keys[i];
        if (waiting) {
          uint32_t slot = waiting->find(key, work.hashes[i]);
          const bool first = slot == Rows::kNone;
          const bool last = !first && waiting->meta(slot)[kSightings] >= work.table->life.admit_after;
          if (first) {
            work.sightings.push_back(Sighting{uint32_t(i), Rows::kNone, true, false});
            work.sightings.back().slot = waiting->insert(key, work.hashes[i], nullptr);
          } else {
            waiting->touch(slot);
            work.sightings.push_back(Sighting{uint32_t(i), slot, false, last});
          }
          if (!last) {
            --work.updated;
            continue;
          }
        }
        work.made.push_back(uint32_t(i));
        work.slots[i] = rows.insert(key, work.hashes[i], nullptr);
      }
      if (partition.snapshot) {
        for (size_t i = begin; i < end; ++i) {
          if (work.slots[i] != Rows::kNone) rows.touch(work.slots[i]);
        }
      }
      bool first = true;  // nothing of the step is in any of these rows
      work.running = step >= 0 && Running::needed(*work.optimizer) ? &rows.running : nullptr;
      if (work.running) {
        first = work.running->begin(step, work.slots.data() + begin, end - begin) == work.updated;
      } else if (!rows.running.empty()) {
        rows.running.clear();
      }
      work.by_gradients = !lagging && work.table->dense && !work.table->meta && work.made.empty() && first;
      if (lagging) {
        rows.baseline.reserve(work.updated, rows.end());
        if (waiting) {
          waiting->baseline.reserve(work.sightings.size(), waiting->end());
          waiting->baseline.reserve_freed(work.sightings.size());
        }
      }
      if (work.updated)
        shapes.push_back(
            Change::Shape{work.table, work.updated, work.made.size(), work.by_gradients, work.part->has_options});
      size_t toggled = 0;
      for (const Sighting& s : work.sightings) toggled += s.first || s.last;
      if (!work.sightings.empty())
        shapes.push_back(Change::Shape{work.table->candidates, work.sightings.size(), toggled});
    }
    if (lagging) {
      for (const blob::Mark& mark : marks.shards) partition.open.shards.insert(mark.shard);
    }
    if (direct) change.lay_out(b, partition.seq + 1, marks, shapes);
  } catch (...) {
    for (size_t p = 0; p < n_parts; ++p) {
      for (uint32_t i : works[p].made) {
        if (works[p].slots[i] != Rows::kNone) partition.rows[works[p].table->index]->erase(works[p].slots[i]);
      }
      for (const Sighting& s : works[p].sightings) {
        if (s.first && s.slot != Rows::kNone) partition.rows[works[p].table->candidates->index]->erase(s.slot);
      }
    }
    throw;
  }

  // From here on nothing fails.
  size_t place_no = 0;
  for (size_t p = 0; p < n_parts; ++p) {
    PartWork& work = works[p];
    const size_t begin = work.at_hand.begin, end = work.at_hand.end;
    if (begin == end) continue;
    Rows& rows = *partition.rows[work.table->index];
    for (size_t k = 0; lagging && k < work.made.size(); ++k) rows.baseline.made(work.slots[work.made[k]]);
    if (work.updated && direct) {
      Change::Place& place = change.place(place_no++);
      work.difference = place.records;
      if (work.updated == end - begin) {
        std::memcpy(place.slots, work.slots.data() + begin, work.updated * 4);
        for (uint32_t i : work.made) change.row(place, i - begin, work.slots[i], true, work.part->keys[i]);
      } else {
        auto made = work.made.begin();
        for (size_t i = begin, nth = 0; i < end; ++i) {
          if (work.slots[i] == Rows::kNone) continue;
          const bool is_made = made != work.made.end() && *made == i;
          change.row(place, nth++, work.slots[i], is_made, work.part->keys[i]);
          if (is_made) ++made;
        }
      }
      if (work.by_gradients)
        change.gradients(place, work.lr, work.part->has_options ? &work.part->options : nullptr,
                         work.part->grads + begin * work.table->dim, work.updated, *work.table);
    }
    if (work.sightings.empty()) continue;
    Rows& waiting = *partition.rows[work.table->candidates->index];
    const size_t width = work.table->candidates->record_bytes;
    Change::Place* place = direct ? &change.place(place_no++) : nullptr;
    for (size_t k = 0; k < work.sightings.size(); ++k) {
      const Sighting& s = work.sightings[k];
      uint8_t* record = waiting.record(s.slot);
      if (lagging && s.first) {
        waiting.baseline.made(s.slot);
      } else if (lagging && s.last) {
        waiting.baseline.freeing(s.slot, work.part->keys[s.i], record);
      } else if (lagging) {
        waiting.baseline.keep(s.slot, record);
      }
      if (place) {
        change.row(*place, k, s.slot, s.first || s.last, work.part->keys[s.i]);
        std::memcpy(place->records + k * width, record, width);  // zero for a first sighting
      }
      if (s.last) {
        waiting.erase(s.slot);
        continue;
      }
      uint32_t* meta = waiting.meta(s.slot);
      meta[kPushedClock] = uint32_t(marks.clock);
      meta[kPushedAt] = work.table->life.expire_s ? now_s : 0;
      ++meta[kSightings];
      if (place) xor_bytes(place->records + k * width, record, width);
    }
  }
}

}  // namespace

uint64_t batch_fingerprint(int64_t shard, int64_t lo, int64_t hi) {
  const uint64_t epoch = mix64(uint64_t(shard) >> 32);
  uint64_t sum = 0;
  for (int64_t p = lo; p < hi; ++p) sum += mix64(epoch + uint64_t(p));
  return sum;
}

PushOutcome Store::push(const std::vector<Span>& spans, const std::string& addressed,
                        const std::vector<PushPart>& parts, uint32_t now_s, int64_t step) {
  const std::vector<Whole> wholes = by_shard(spans);
  const bool learnt = std::any_of(spans.begin(), spans.end(), [](const Span& s) { return s.learnt; });
  if (!learnt && !parts.empty()) throw Malformed("a skipped range has no rows");
  if (!addressed.empty()) {
    if (addressed.size() != (n_partitions_ + 7) / 8) throw Malformed("the bitmap of partitions has the wrong length");
    for (uint32_t b = 0; b < addressed.size() * 8; ++b) {
      if (!bit(addressed, b)) continue;
      if (b >= n_partitions_) throw Malformed("partition " + std::to_string(b) + " does not exist");
      if (!partitions_[b].owned) throw NotOwned("partition " + std::to_string(b) + " is not owned here");
    }
  }
  // Looked at once, so that a partition that comes or goes meanwhile is not half of it.
  std::string todo((n_partitions_ + 7) / 8, '\0');
  int owned = 0;
  for (uint32_t b = 0; b < n_partitions_; ++b) {
    if (!partitions_[b].owned) continue;
    ++owned;
    if (addressed.empty() || bit(addressed, b)) set_bit(todo, b);
  }
  auto is_addressed = [&](uint32_t b) { return bit(todo, b); };

  // 1. Everything that can be wrong with the request, before anything changes.
  PushOutcome out;
  thread_local std::vector<PartWork> works;
  if (works.size() < parts.size()) works.resize(parts.size());
  std::unordered_set<uint32_t> seen;
  for (size_t p = 0; p < parts.size(); ++p) {
    const PushPart& part = parts[p];
    PartWork& work = works[p];
    if (!seen.insert(part.table).second)
      throw Malformed("table " + std::to_string(part.table) + " stands twice in one push");
    work.table = &table_of(part.table);
    work.part = &part;
    work.lr = part.lr < 0 ? work.table->optimizer.lr : part.lr;
    work.optimizer = &work.table->optimizer;
    if (part.has_options) {
      work.other = with_options(work.table->optimizer, part.options);
      work.optimizer = &work.other;
    }
    work.cursor = work.missing = 0;
    work.runs.clear();
    if (!std::isfinite(part.lr)) throw Malformed("the learning rate is not finite");
    if (work.table->optimizer.kind == kFtrl && work.lr == 0) throw Malformed("FTRL needs a learning rate above 0");
    if (work.table->dim != part.dim)
      throw Malformed("rows of " + std::to_string(part.dim) + " floats for a table of dim " +
                      std::to_string(work.table->dim));
    work.hashes.resize(part.n);
    work.partitions.resize(part.n);
    work.slots.resize(part.n);
    kernels_.hash_keys(part.keys, part.n, work.table->salt, n_partitions_, work.hashes.data(), work.partitions.data());
    for (size_t i = 0; i < part.n; ++i) {
      const uint32_t b = work.partitions[i];
      if (work.runs.empty() || work.runs.back().partition != b) {
        if (!work.runs.empty() && work.runs.back().partition > b)
          throw Malformed("keys are not grouped by ascending partition");
        if (!partitions_[b].owned) throw NotOwned("partition " + std::to_string(b) + " is not owned here");
        if (!is_addressed(b)) throw Malformed("a key's partition is not among those addressed");
        work.runs.push_back(Run{b, i, i + 1, 0});
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
  // Where the rows are; a slot never moves, so this holds when the partition is locked again below.
  thread_local std::vector<Piece> pieces;
  thread_local std::vector<float> sums;  // of the gradients of a piece's rows
  thread_local std::vector<uint64_t> seen_slots;
  size_t widest = 0;
  for (size_t p = 0; step >= 0 && p < parts.size(); ++p) widest = std::max(widest, parts[p].dim);
  if (sums.size() < kBlock * widest) sums.resize(kBlock * widest);
  Change change(outbox_);
  const size_t limit = limit_.load(std::memory_order_relaxed);
  size_t more = 0;  // bytes that the new rows need
  const Table* cannot_grow = nullptr;
  for (uint32_t b = 0; b < n_partitions_; ++b) {
    turn_to(works, parts.size(), b);
    cut_pieces(works, parts.size(), size_t(1) << 40, false, pieces);
    if (pieces.empty()) continue;
    Partition& partition = partitions_[b];
    auto prefetch = [&](const Piece& piece) {
      const PartWork& work = works[piece.part];
      partition.rows[work.table->index]->prefetch(work.hashes.data() + piece.begin,
                                                  std::min(kAhead, piece.end - piece.begin));
    };
    prefetch(pieces[0]);
    std::lock_guard<std::mutex> hold(partition.mutex);
    bool twice = false;
    for (size_t q = 0; q < pieces.size(); ++q) {
      if (q + 1 < pieces.size()) prefetch(pieces[q + 1]);
      PartWork& work = works[pieces[q].part];
      Rows& rows = *partition.rows[work.table->index];
      work.at(b)->epoch = rows.epoch();
      // Slots seen in this run: finds duplicate keys. All zero between runs, so that nothing but what was set is
      // cleared.
      if (seen_slots.size() * 64 < rows.end()) seen_slots.resize(rows.end() / 64 + 1);
      bool here = true;
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
      here &= all_here(work, partition, pieces[q].begin, pieces[q].end);
      for (size_t i = pieces[q].begin; i < pieces[q].end; ++i) {
        if (work.slots[i] != Rows::kNone) seen_slots[work.slots[i] >> 6] = 0;
      }
      if (!here) throw Recovering("rows of partition " + std::to_string(b) + " that are pushed are being rebuilt");
    }
    if (twice) throw Malformed("a key stands twice in one push");
    for (size_t q = 0; limit && q < pieces.size(); ++q) {
      const PartWork& work = works[pieces[q].part];
      size_t counts[2];
      count_new(work, partition, counts[0], counts[1]);
      const Table* tables[2] = {work.table, work.table->candidates};
      const size_t n = work.at_hand.end - work.at_hand.begin;
      for (int k = 0; k < 2; ++k) {
        if (!counts[k]) continue;
        const Rows& rows = *partition.rows[tables[k]->index];
        more += rows.bytes_for(counts[k]);
        // Even if all rows but those of this push made room.
        if (counts[k] > rows.free_slots() && (!tables[k]->meta || rows.count() + rows.free_slots() < counts[k] + n))
          cannot_grow = tables[k];
      }
    }
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    works[p].cursor = 0;
    check_missing_unique(works[p]);
  }
  if (limit && more) make_cold_room(more, limit);
  if (limit && more && pool_.used_bytes() + more > refuse_above(limit)) {
    if (!evict_ || cannot_grow) full(cannot_grow ? *cannot_grow : *works[0].table);
  }

  const bool cold = pool_.cold.on();
  // 2. Partition by partition: fence, watermark, rows, fingerprint in one critical section.
  pushes_.fetch_add(1, std::memory_order_relaxed);
  const int64_t now_ns = lag_.load(std::memory_order_relaxed) ? steady_ns() : 0;
  uint64_t fingerprint = 0;
  for (const Span& s : spans) {
    if (s.learnt) fingerprint += batch_fingerprint(s.shard, s.lo, s.hi);
  }
  std::vector<ShardMark*> at(wholes.size());  // of the partition at hand
  std::string applied((n_partitions_ + 7) / 8, '\0');
  for (uint32_t b = 0; b < n_partitions_; ++b) {
    if (!is_addressed(b)) continue;
    Partition& partition = partitions_[b];
    std::lock_guard<std::mutex> hold(partition.mutex);
    if (!partition.owned) {
      out.moved = true;
      continue;
    }
    bool fenced = false;
    size_t repeats = 0, fitting = 0;
    int64_t lowest = -1;
    for (size_t w = 0; w < wholes.size(); ++w) {
      auto found = partition.shards.find(wholes[w].shard);
      if (found == partition.shards.end() || found->second.fence > wholes[w].lease) {
        fenced = true;
        break;
      }
      at[w] = &found->second;
      const int64_t watermark = found->second.watermark;
      repeats += wholes[w].hi <= watermark;
      fitting += wholes[w].lo == watermark;
      lowest = lowest < 0 ? watermark : std::min(lowest, watermark);
    }
    if (fenced) {
      out.fenced = true;
      continue;
    }
    if (fitting < wholes.size()) {
      for (size_t w = 0; w < wholes.size(); ++w) {
        if (at[w]->fence == wholes[w].lease) continue;
        at[w]->fence = wholes[w].lease;  // a later lease than the one that opened here fences it as well
        log_mark(b, partition, wholes[w].shard, *at[w]);
      }
      if (repeats == wholes.size()) {
        ++out.repeats;
      } else {
        out.gap = out.gap < 0 ? lowest : std::min(out.gap, lowest);
      }
      continue;
    }
    turn_to(works, parts.size(), b);
    bool here = true;
    for (size_t p = 0; p < parts.size(); ++p) here &= look_again(works[p], partition);
    if (!here) {
      out.moved = true;  // it went and came back meanwhile
      continue;
    }
    if (limit && evict_) {
      auto each_growing = [&](auto&& call) {
        for (size_t p = 0; p < parts.size(); ++p) {
          size_t counts[2];
          count_new(works[p], partition, counts[0], counts[1]);
          const Table* tables[2] = {works[p].table, works[p].table->candidates};
          for (int k = 0; k < 2; ++k) {
            if (counts[k]) call(works[p], *partition.rows[tables[k]->index], counts[k]);
          }
        }
      };
      size_t need = 0;
      each_growing([&](const PartWork&, Rows& rows, size_t n) { need += rows.bytes_for(n); });
      if (need && pool_.used_bytes() + need > limit) {
        each_growing([&](const PartWork& work, Rows& rows, size_t n) {
          std::vector<uint32_t> keep;
          for (size_t i = work.at_hand.begin; i < work.at_hand.end; ++i) {
            const bool candidate = &rows.table() != work.table;
            const uint32_t slot = candidate ? rows.find(work.part->keys[i], work.hashes[i]) : work.slots[i];
            if (slot != Rows::kNone) keep.push_back(slot);
          }
          make_room(b, partition, rows, n, std::move(keep));
        });
      }
    }
    blob::Marks marks;
    marks.fingerprint = partition.fingerprint + fingerprint;
    marks.clock = partition.clock + 1;
    marks.shards.clear();
    for (const Whole& w : wholes) marks.shards.push_back(blob::Mark{w.shard, w.hi, w.lease});
    const bool lagging = lags(partition), direct = partition.protect && !lagging;
    if (lagging) flush_if_due(b, partition, now_ns);
    prepare(works, parts.size(), b, partition, now_s, step, marks, change, direct);
    cut_pieces(works, parts.size(), kBlock, true, pieces);
    float* values[2][kBlock];
    float* state[2][kBlock];
    auto fetch = [&](size_t q) {
      const Piece& piece = pieces[q];
      const PartWork& work = works[piece.part];
      const Table& table = *work.table;
      Rows& rows = *partition.rows[table.index];
      const uint32_t* slots = work.slots.data() + piece.begin;
      const size_t n = piece.end - piece.begin, dim = table.dim, floats = table.dim + table.state;
      for (size_t k = 0; rows.tracking() && k < n; ++k) rows.touch(slots[k]);
      for (size_t k = 0; k < n; ++k) {
        float* at = rows.values(slots[k]);
        if (cold) rows.touch_cold(at);
        values[q & 1][k] = at;
        state[q & 1][k] = at + dim;
        prefetch_lines<1>(at, floats * 4, 1024);
      }
    };
    if (!pieces.empty()) fetch(0);
    for (size_t q = 0; q < pieces.size(); ++q) {
      if (q + 1 < pieces.size()) fetch(q + 1);
      const Piece& piece = pieces[q];
      const PartWork& work = works[piece.part];
      const Table& table = *work.table;
      const size_t n = piece.end - piece.begin;
      const float* grads = work.part->grads + piece.begin * table.dim;
      // What the row is before the step, and the gradient of the step so far.
      auto sum_up = [&] {
        if (!work.running) return;
        for (size_t k = 0, at = 0; k < n; ++k, at += table.dim)
          work.running->add(work.slots[piece.begin + k], values[q & 1][k], grads + at, sums.data() + at);
        grads = sums.data();
      };
      if (lagging) {
        Baseline& baseline = partition.rows[table.index]->baseline;
        for (size_t k = 0; k < n; ++k) baseline.keep(work.slots[piece.begin + k], values[q & 1][k]);
      }
      if (!direct || work.by_gradients) {
        sum_up();
        kernels_.update(*work.optimizer, work.lr, values[q & 1], state[q & 1], grads, n, table.dim);
        if (table.meta) pushed(table, values[q & 1], n, marks.clock, now_s);
        continue;
      }
      // The old record waits where its difference will be; both are in the cache still when the new one is there.
      uint8_t* difference = work.difference + piece.nth * table.record_bytes;
      for (size_t k = 0; k < n; ++k)
        std::memcpy(difference + k * table.record_bytes, values[q & 1][k], table.record_bytes);
      for (auto at = std::lower_bound(work.made.begin(), work.made.end(), piece.begin);
           at != work.made.end() && *at < piece.end; ++at)
        std::memset(difference + (*at - piece.begin) * table.record_bytes, 0, table.record_bytes);
      sum_up();
      kernels_.update(*work.optimizer, work.lr, values[q & 1], state[q & 1], grads, n, table.dim);
      if (table.meta) pushed(table, values[q & 1], n, marks.clock, now_s);
      for (size_t k = 0; k < n; ++k)
        xor_bytes(difference + k * table.record_bytes, reinterpret_cast<uint8_t*>(values[q & 1][k]),
                  table.record_bytes);
    }
    partition.fingerprint = marks.fingerprint;
    partition.clock = marks.clock;
    for (size_t w = 0; w < wholes.size(); ++w) *at[w] = ShardMark{wholes[w].hi, wholes[w].lease};
    if (lagging) {
      join_open(partition);
      ++partition.open.pushes;
    } else {
      ++partition.seq;
    }
    if (direct) change.commit();
    ++out.applied;
    set_bit(applied, b);
  }
  if (out.applied && out.applied != owned) out.partitions = std::move(applied);
  return out;
}

// Rows that are made whole, as they are now: a difference to zero bytes.
void Store::log_rows(uint32_t b, Partition& partition, Rows& rows, const std::vector<uint32_t>& made) {
  if (lags(partition)) {
    rows.baseline.reserve(made.size(), rows.end());
    for (uint32_t slot : made) rows.baseline.made(slot);
    join_open(partition);
    return;
  }
  if (partition.protect) {
    const Table& table = rows.table();
    blob::Marks marks;
    marks.fingerprint = partition.fingerprint;
    marks.clock = partition.clock;
    Change change(outbox_);
    change.lay_out(b, partition.seq + 1, marks, {Change::Shape{&table, made.size(), made.size()}});
    Change::Place& place = change.place(0);
    for (size_t i = 0; i < made.size(); ++i) {
      change.row(place, i, made[i], true, rows.key(made[i]));
      std::memcpy(place.records + i * table.record_bytes, rows.record(made[i]), table.record_bytes);
    }
    change.commit();
  }
  ++partition.seq;
}

}  // namespace everstep
