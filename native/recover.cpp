// How lost members of a mirror come back (see mirror.h).
#include <algorithm>
#include <cstring>

#include "mirror.h"
#include "store.h"

namespace everstep {

using blob::Blob;
using blob::Part;

namespace {

constexpr uint64_t kStretch = 1024;  // slots installed between two chances for a push

bool bit(const std::vector<uint64_t>& bits, uint64_t i) { return bits[i >> 6] >> (i & 63) & 1; }

// Contents of R, for the mirror of the other row. HEADS: n whole pages' heads from slot lo on. BODIES: the records of n
// slots; those of [lo, hi) that are not listed are zero.
struct RemainderHeader {
  uint32_t magic = 0x52535645;  // "EVSR"
  uint16_t version = 2, kind = 0;
  uint32_t row = 0, table = 0, lo = 0, hi = 0, flags = 0, n = 0;
  uint32_t crc = 0;  // crc32c of all but this field
};
static_assert(sizeof(RemainderHeader) == 36, "packed");
constexpr uint32_t kListed = 2;  // exactly these slots

}  // namespace

// ---------------------------------------------------------------- Remainder

Remainder::Remainder(const PageSet& from, Pool& pool)
    : table_(from.table()), from_(from), pool_(pool), pages_(from.n_pages()) {}

Remainder::~Remainder() {
  drop_heads();
  for (size_t p = 0; p < pages_.size(); ++p) drop_body(p);
}

const uint8_t* Remainder::head(size_t page) const {
  const Page& at = pages_[page];
  return at.head_state == kShared ? from_.page(page) : at.head;
}

const uint8_t* Remainder::body(size_t page) const {
  const Page& at = pages_[page];
  return at.body_state == kShared ? from_.page(page) : at.body;
}

void Remainder::keep(uint64_t slot, bool head) {
  const size_t p = number(slot);
  Page& at = pages_[p];
  const uint8_t* now = from_.page(p);
  if (head && at.head_state == kShared) {
    if (now) own_head(slot);
    at.head_state = kOwn;
  }
  if (at.body_state == kShared) {
    if (now) own_body(slot);
    at.body_state = kOwn;
  }
}

void Remainder::own_head(uint64_t slot) {
  const size_t p = number(slot);
  Page& at = pages_[p];
  if (at.head || at.head_state == kGone) return;
  const uint8_t* now = head(p);
  at.head = now ? pool_.take(table_.head_bytes) : pool_.take_zeroed(table_.head_bytes);
  if (now) std::memcpy(at.head, now, table_.head_bytes);
  at.head_state = kOwn;
  bytes_ += table_.head_bytes;
}

// A block of a whole page, though the head in it is not used: such blocks can become pages again.
void Remainder::own_body(uint64_t slot) {
  const size_t p = number(slot);
  Page& at = pages_[p];
  if (at.body || at.body_state == kGone) return;
  const uint8_t* now = body(p);
  at.body = now ? pool_.take(table_.page_bytes) : pool_.take_zeroed(table_.page_bytes);
  const size_t head = table_.head_bytes;
  if (now) std::memcpy(at.body + head, now + head, table_.page_bytes - head);
  at.body_state = kOwn;
  bytes_ += table_.page_bytes;
}

void Remainder::drop_heads() {
  for (Page& at : pages_) {
    if (at.head) {
      pool_.give(at.head, table_.head_bytes);
      bytes_ -= table_.head_bytes;
    }
    at.head = nullptr;
    at.head_state = kGone;
  }
}

void Remainder::drop_body(size_t page) {
  Page& at = pages_[page];
  if (at.body) {
    pool_.give(at.body, table_.page_bytes);
    bytes_ -= table_.page_bytes;
  }
  at.body = nullptr;
  at.body_state = kGone;
}

// ---------------------------------------------------------------- Mirror

Mirror::RecoverTable::RecoverTable(const PageSet& pages, Pool& pool, size_t members)
    : table(pages.table()),
      r(pages, pool),
      other(pages.table(), pool),
      slots(pages.slots()),
      heads(members, 0),
      bodies(slots, 0),
      seen(members, 0),
      left(members, 0) {}

size_t Mirror::RecoverTable::bytes() const {
  return r.bytes() + other.bytes() + bodies.size() * sizeof(uint16_t) + wanted.size() * sizeof(uint64_t);
}

Mirror::Recovery& Mirror::recovering() {
  if (!recovery_) throw Malformed("mirror " + std::to_string(id_) + " recovers nothing");
  return *recovery_;
}

// How to get a lost member from R, and, of two, from the other row's.
Mirror::Lost Mirror::solve(const std::vector<size_t>& lost, size_t member) const {
  const GfTables& t = gf_tables();
  Lost out;
  out.member = member;
  if (lost.size() == 1) {
    out.of_r = t.inverse[gf_weight(row_, member)];
    return out;
  }
  // a * mine + b * his = R, c * mine + d * his = other
  const size_t his = lost[0] == member ? lost[1] : lost[0];
  const uint8_t a = gf_weight(row_, member), b = gf_weight(row_, his);
  const uint8_t c = gf_weight(1 - row_, member), d = gf_weight(1 - row_, his);
  const uint8_t inverse = t.inverse[gf_mul(t, a, d) ^ gf_mul(t, b, c)];
  out.of_r = gf_mul(t, inverse, d);
  out.of_other = gf_mul(t, inverse, b);
  return out;
}

void Mirror::recover_begin(const std::vector<uint32_t>& lost, const std::vector<uint32_t>& here) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (recovery_) throw Malformed("mirror " + std::to_string(id_) + " recovers already");
  if (lost.empty() || lost.size() > 2)
    throw Malformed("one or two members can be recovered, not " + std::to_string(lost.size()));
  auto made = std::make_unique<Recovery>();
  Recovery& rec = *made;
  for (uint32_t partition : lost) {
    size_t index = 0;
    if (!member(partition, &index))
      throw Malformed("partition " + std::to_string(partition) + " is no member of mirror " + std::to_string(id_));
    if (std::count(lost.begin(), lost.end(), partition) > 1)
      throw Malformed("partition " + std::to_string(partition) + " is lost twice");
    rec.lost.push_back(index);
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].stage != kComplete)
      throw Malformed("mirror " + std::to_string(id_) + " does not have all of partition " +
                      std::to_string(members_[i].partition));
    if (std::find(rec.lost.begin(), rec.lost.end(), i) == rec.lost.end()) rec.survivors |= uint16_t(1u << i);
  }
  rec.full = rec.survivors;
  if (lost.size() == 2) rec.full |= uint16_t(1u << rec.lost[0]);
  for (uint32_t partition : here) {
    auto at = std::find(lost.begin(), lost.end(), partition);
    if (at == lost.end())
      throw Malformed("partition " + std::to_string(partition) + " is to live here, but is not lost");
    if (store_.partition(partition).owned)
      throw Malformed("partition " + std::to_string(partition) + " is owned here already");
    rec.here.push_back(solve(rec.lost, rec.lost[size_t(at - lost.begin())]));
  }
  for (auto& [id, pages] : pages_) {
    if (!pages->table().dense) rec.tables.try_emplace(pages->table().id, *pages, store_.pool(), members_.size());
  }
  recovery_ = std::move(made);
  heads_if_ready();
}

// Pages of the mirror are about to change: R, which shares them, does not.
void Mirror::keep_remainder(const Blob& b) {
  for (const Part& part : b.parts) {
    auto found = recovery_->tables.find(part.table->id);
    if (found == recovery_->tables.end()) continue;
    RecoverTable& table = found->second;
    for (uint32_t i = 0; i < part.head.n; ++i) {
      if (part.slot(i) < table.slots) table.r.keep(part.slot(i), part.is_toggled(i));
    }
  }
}

// R follows a survivor where the survivor's contents have not been folded out of it yet. Differences of lost members do
// not concern it: they are those of the partition that was made of it.
void Mirror::follow(size_t index, const Blob& b) {
  Recovery& rec = *recovery_;
  if (!(rec.survivors >> index & 1)) return;
  const uint8_t weight = members_[index].weight;
  for (const Part& part : b.parts) {
    auto found = rec.tables.find(part.table->id);
    if (found == rec.tables.end()) continue;
    RecoverTable& table = found->second;
    for (uint32_t i = 0; i < part.head.n; ++i) {  // memory first
      if (part.slot(i) >= table.slots) continue;
      if (part.is_toggled(i) && part.slot(i) >= table.heads[index]) table.r.own_head(part.slot(i));
      if (!(table.bodies[part.slot(i)] >> index & 1)) table.r.own_body(part.slot(i));
    }
  }
  for (const Part& part : b.parts) {
    auto found = rec.tables.find(part.table->id);
    if (found == rec.tables.end()) continue;
    RecoverTable& table = found->second;
    for (uint32_t i = 0, key = 0; i < part.head.n; ++i) {
      const uint32_t slot = part.slot(i);
      const bool toggled = part.is_toggled(i);
      if (slot < table.slots) {
        if (toggled && slot >= table.heads[index]) {
          add_head(table.table, table.r.head_to_write(slot), table.other.in_page(slot), part.keys + size_t(key) * 8,
                   weight);
          table.left[index] = 1;
        }
        if (!(table.bodies[slot] >> index & 1)) {
          add_weighted(gf_, table.r.record_to_write(slot), part.record(i), part.table->record_bytes, weight);
          table.left[index] = 1;
        }
      }
      key += toggled;
    }
  }
}

ApplyResult Mirror::recover_fold(const uint8_t* data, size_t size) {
  const Blob b = blob::parse(data, size, [&](uint32_t id) { return &store_.table_of(id); });
  std::lock_guard<std::mutex> hold(mutex_);
  Recovery& rec = recovering();
  size_t index = 0;
  if (!member(b.head.partition, &index) || !(rec.survivors >> index & 1)) return kNotMember;
  check_slots(index, b);
  switch (b.head.kind) {
    case blob::kHeads:
      return fold_heads(index, b);
    case blob::kBodies:
      return fold_bodies(index, b);
    case blob::kMarks:
      return fold_marks(index, b);
    default:
      throw Malformed("a difference goes to the mirror, not into its recovery");
  }
}

ApplyResult Mirror::fold_heads(size_t index, const Blob& b) {
  Recovery& rec = *recovery_;
  bool fresh = false;
  for (const Part& part : b.parts) {
    auto found = rec.tables.find(part.table->id);
    if (found == rec.tables.end()) continue;
    if (part.head.lo > found->second.heads[index]) return kGap;
    fresh |= end_of(part) > found->second.heads[index];
  }
  if (!fresh) return kRepeat;
  if (b.head.seq != members_[index].seq) return kGap;
  for (const Part& part : b.parts) {
    auto found = rec.tables.find(part.table->id);
    if (found == rec.tables.end()) continue;
    RecoverTable& table = found->second;
    auto counts = [&](uint32_t slot) { return slot >= table.heads[index] && slot < table.slots; };
    for (uint32_t i = 0; i < part.head.n; ++i) {
      if (counts(part.slot(i))) table.r.own_head(part.slot(i));
    }
    for (uint32_t i = 0; i < part.head.n; ++i) {
      const uint32_t slot = part.slot(i);
      if (counts(slot))
        add_head(table.table, table.r.head_to_write(slot), table.other.in_page(slot), part.keys + size_t(i) * 8,
                 members_[index].weight);
    }
    table.heads[index] = std::max(table.heads[index], end_of(part));
  }
  heads_if_ready();
  return kApplied;
}

ApplyResult Mirror::fold_bodies(size_t index, const Blob& b) {
  Recovery& rec = *recovery_;
  const uint16_t mine = uint16_t(1u << index);
  // Slots that it gave already may come again, in whatever state they are now.
  bool fresh = false;
  for (const Part& part : b.parts) {
    auto found = rec.tables.find(part.table->id);
    if (found == rec.tables.end()) continue;
    const RecoverTable& table = found->second;
    if (is_listed(part)) {
      for (uint32_t i = 0; i < part.head.n; ++i)
        fresh |= part.slot(i) < table.slots && !(table.bodies[part.slot(i)] & mine);
    } else {
      for (uint64_t s = part.head.lo; s < std::min(end_of(part), table.slots); ++s) fresh |= !(table.bodies[s] & mine);
    }
  }
  if (!fresh) return kRepeat;
  if (b.head.seq != members_[index].seq) return kGap;
  for (const Part& part : b.parts) {
    auto found = rec.tables.find(part.table->id);
    if (found == rec.tables.end()) continue;
    RecoverTable& table = found->second;
    for (uint32_t i = 0; i < part.head.n; ++i) {
      if (part.slot(i) < table.slots && !(table.bodies[part.slot(i)] & mine)) table.r.own_body(part.slot(i));
    }
    std::vector<uint32_t> slots;
    for (uint32_t i = 0; i < part.head.n; ++i) {
      const uint32_t slot = part.slot(i);
      if (slot >= table.slots || (table.bodies[slot] & mine)) continue;
      add_weighted(gf_, table.r.record_to_write(slot), part.record(i), part.table->record_bytes,
                   members_[index].weight);
      if (!is_listed(part)) continue;
      table.bodies[slot] |= mine;
      slots.push_back(slot);
    }
    table.seen[index] = 1;
    if (is_listed(part)) {
      install(table, 0, 0, &slots);
    } else {
      const uint64_t end = std::min(end_of(part), table.slots);
      for (uint64_t s = part.head.lo; s < end; ++s) table.bodies[s] |= mine;
      install(table, part.head.lo, end, nullptr);
    }
  }
  return kApplied;
}

// The survivor has no more: a table that it did not speak of has no rows there.
ApplyResult Mirror::fold_marks(size_t index, const Blob& b) {
  Recovery& rec = *recovery_;
  for (auto& [id, table] : rec.tables) {
    if (table.heads[index] == kNoLimit) continue;
    if (table.heads[index] || table.seen[index] || table.left[index]) return kGap;
    if (b.head.seq != members_[index].seq) return kGap;
  }
  for (auto& [id, table] : rec.tables) {
    if (table.heads[index] == kNoLimit) continue;
    table.heads[index] = kNoLimit;
    for (uint16_t& mask : table.bodies) mask |= uint16_t(1u << index);
    install(table, 0, table.slots, nullptr);
  }
  heads_if_ready();
  return kApplied;
}

ApplyResult Mirror::recover_other(const uint8_t* data, size_t size) {
  RemainderHeader h;
  auto wrong = [](const char* what) { throw Malformed(std::string("contents of a mirror ") + what); };
  if (size < sizeof(h)) wrong("end too early");
  std::memcpy(&h, data, sizeof(h));
  if (h.magic != RemainderHeader().magic || h.version != RemainderHeader().version) wrong("do not begin as such");
  blob::check_seal(data, size, offsetof(RemainderHeader, crc));
  if (h.kind != blob::kHeads && h.kind != blob::kBodies) wrong("are of no known kind");
  const bool heads = h.kind == blob::kHeads, listed = h.flags & kListed, last = h.flags & blob::kLast;
  if (h.flags & ~(kListed | blob::kLast) || h.lo > h.hi || (listed && (heads || last))) wrong("have a wrong range");
  const Table& t = store_.table_of(h.table);
  const uint64_t each = heads ? t.head_bytes : 4 + t.record_bytes;
  if (size - sizeof(h) != uint64_t(h.n) * each) wrong("have another size than they say");
  if (heads && (h.lo % t.slots() || h.hi != h.lo + uint64_t(h.n) * t.slots())) wrong("have half a page");
  const uint8_t* slot_data = data + sizeof(h);
  const uint8_t* records = slot_data + (heads ? 0 : size_t(h.n) * 4);
  auto slot_at = [&](size_t i) { return Part::read<uint32_t>(slot_data + i * 4); };
  for (uint32_t i = 0; !heads && !listed && i < h.n; ++i) {
    if (slot_at(i) < h.lo || slot_at(i) >= h.hi) wrong("have a slot outside of their range");
  }

  std::lock_guard<std::mutex> hold(mutex_);
  Recovery& rec = recovering();
  if (rec.lost.size() != 2) return kNotMember;
  if (h.row != uint32_t(1 - row_)) wrong("are of the same row: two lost members need both rows");
  const size_t index = rec.lost[0];  // its place stands for the other row
  const uint16_t mine = uint16_t(1u << index);
  auto found = rec.tables.find(h.table);
  if (found == rec.tables.end()) return kRepeat;
  RecoverTable& table = found->second;
  const uint64_t end = last ? kNoLimit : h.hi;
  if (heads) {
    if (h.lo > table.heads[index]) return kGap;
    if (end <= table.heads[index]) return kRepeat;
    for (uint32_t p = 0; p < h.n; ++p) {
      const uint64_t slot = h.lo + uint64_t(p) * t.slots();
      if (slot < table.heads[index] || slot >= table.slots) continue;
      std::memcpy(table.other.make(size_t(slot >> t.page_bits)), records + p * t.head_bytes, t.head_bytes);
    }
    table.heads[index] = end;
    heads_if_ready();
    return kApplied;
  }
  std::vector<uint32_t> slots;
  for (uint32_t i = 0; i < h.n; ++i) {
    const uint32_t slot = slot_at(i);
    if (slot >= table.slots || (table.bodies[slot] & mine)) continue;
    table.other.make_for(slot);
    std::memcpy(table.other.record(slot), records + size_t(i) * t.record_bytes, t.record_bytes);
    slots.push_back(slot);
  }
  if (listed) {
    for (uint32_t slot : slots) table.bodies[slot] |= mine;
    install(table, 0, 0, &slots);
    return slots.empty() ? kRepeat : kApplied;
  }
  bool fresh = false;
  for (uint64_t s = h.lo; s < std::min(end, table.slots); ++s) {
    fresh |= !(table.bodies[s] & mine);
    table.bodies[s] |= mine;
  }
  install(table, h.lo, std::min(end, table.slots), nullptr);
  return fresh ? kApplied : kRepeat;
}

// Once all heads are folded: which rows the lost partitions have. From here on they are owned.
void Mirror::heads_if_ready() {
  Recovery& rec = *recovery_;
  if (rec.heads_done) return;
  for (auto& [id, table] : rec.tables) {
    for (size_t i = 0; i < members_.size(); ++i) {
      if ((rec.full >> i & 1) && table.heads[i] != kNoLimit) return;
    }
  }
  // Also of a lost partition that is made elsewhere: its rows are wanted of R by the other row.
  for (size_t index : rec.lost) {
    auto at = std::find_if(rec.here.begin(), rec.here.end(), [&](const Lost& l) { return l.member == index; });
    const Lost lost = at == rec.here.end() ? solve(rec.lost, index) : *at;
    if (lost.heads_done) continue;
    std::map<uint32_t, PageSet> made;
    uint64_t total = 0;
    for (auto& [id, table] : rec.tables) {
      const Table& t = table.table;
      PageSet& to = made.try_emplace(id, t, store_.pool()).first->second;
      table.wanted.resize(size_t((table.slots + 63) / 64), 0);
      std::vector<uint8_t> head(t.head_bytes);
      for (size_t p = 0; p < table.r.n_pages(); ++p) {
        std::fill(head.begin(), head.end(), uint8_t(0));
        if (const uint8_t* page = table.r.head(p)) gf_.add_mul(head.data(), page, t.head_bytes, lost.of_r);
        if (const uint8_t* page = table.other.page(p)) gf_.add_mul(head.data(), page, t.head_bytes, lost.of_other);
        if (std::all_of(head.begin(), head.end(), [](uint8_t x) { return x == 0; })) continue;
        for (size_t i = 0; i < t.slots(); ++i) {
          if (!(head[i >> 3] >> (i & 7) & 1)) continue;
          const uint64_t slot = (uint64_t(p) << t.page_bits) + i;
          table.wanted[slot >> 6] |= uint64_t(1) << (slot & 63);
          ++total;
        }
        if (at != rec.here.end()) std::memcpy(to.make(p), head.data(), t.head_bytes);
      }
    }
    if (at == rec.here.end()) continue;
    std::vector<Store::TablePages> pages;
    pages.reserve(made.size());
    for (auto& [id, set] : made) pages.emplace_back(&set.table(), set.give_up());
    // Dense tables are here as they are; the mirror stays, so its copy does.
    for (auto& [id, set] : pages_) {
      if (!set->table().dense || id != pages_id(set->table(), index)) continue;
      PageSet copy(set->table(), store_.pool());
      copy.copy_from(*set);
      pages.emplace_back(&set->table(), copy.give_up());
    }
    const Member& m = members_[index];
    store_.adopt(m.partition, std::move(pages), m.marks.block(), m.seq, true);
    {
      Partition& partition = store_.partition(m.partition);
      std::lock_guard<std::mutex> hold(partition.mutex);
      for (auto& rows : partition.rows) {
        if (rows->table().dense) rows->recovered();
      }
    }
    at->total = total;
    at->heads_done = true;
  }
  rec.heads_done = true;
  for (auto& [id, table] : rec.tables) {
    if (rec.lost.size() == 1) table.r.drop_heads();  // of two, the other row may ask for them
    install(table, 0, table.slots, nullptr);
  }
}

void Mirror::install(RecoverTable& table, uint64_t lo, uint64_t hi, const std::vector<uint32_t>* listed) {
  Recovery& rec = *recovery_;
  if (!rec.heads_done) return;
  const size_t record = table.table.record_bytes;
  if (listed) {
    lo = 0;
    hi = listed->size();
  }
  for (Lost& lost : rec.here) {
    Partition& partition = store_.partition(members_[lost.member].partition);
    for (uint64_t from = lo; from < hi && lost.present < lost.total; from += kStretch) {
      std::lock_guard<std::mutex> hold(partition.mutex);
      Rows& rows = *partition.rows[table.table.index];
      for (uint64_t i = from; i < std::min(hi, from + kStretch); ++i) {
        const uint64_t slot = listed ? (*listed)[i] : i;
        if (slot >= table.slots || (table.bodies[slot] & rec.full) != rec.full) continue;
        if (!rows.absent(uint32_t(slot))) continue;  // no row, here already, or the partition was dropped meanwhile
        uint8_t* to = rows.record(uint32_t(slot));
        rows.touch(uint32_t(slot));
        std::memset(to, 0, record);
        if (const uint8_t* r = table.r.record(slot)) gf_.add_mul(to, r, record, lost.of_r);
        if (lost.of_other && table.other.of(slot)) gf_.add_mul(to, table.other.record(slot), record, lost.of_other);
        rows.arrived(uint32_t(slot));
        ++lost.present;
      }
    }
    if (lost.present == lost.total) {
      std::lock_guard<std::mutex> hold(partition.mutex);
      for (auto& rows : partition.rows) rows->recovered();
    }
  }
  if (!listed) let_go(table, lo, hi);
}

void Mirror::let_go(RecoverTable& table, uint64_t lo, uint64_t hi) {
  const uint16_t full = recovery_->full;
  if (!all_here() || lo >= hi) return;
  const size_t in_page = table.table.slots(), end = size_t((hi - 1) >> table.table.page_bits) + 1;
  for (size_t p = size_t(lo >> table.table.page_bits); p < std::min(end, table.r.n_pages()); ++p) {
    if (!table.r.has_body(p)) continue;
    const uint16_t* bits = table.bodies.data() + (uint64_t(p) << table.table.page_bits);
    if (!std::all_of(bits, bits + in_page, [&](uint16_t x) { return (x & full) == full; })) continue;
    table.r.drop_body(p);
    table.other.drop(p);
  }
}

std::vector<RecoverState> Mirror::recover_state() {
  std::lock_guard<std::mutex> hold(mutex_);
  std::vector<RecoverState> out;
  if (!recovery_) return out;
  for (const Lost& lost : recovery_->here)
    out.push_back(RecoverState{members_[lost.member].partition, lost.heads_done,
                               lost.heads_done && lost.present == lost.total, lost.present, lost.total});
  return out;
}

int64_t Mirror::recover_emit(int kind, uint32_t id, int64_t from, int64_t until, const std::vector<uint32_t>* listed,
                             std::vector<uint8_t>& out) {
  if (kind != blob::kHeads && kind != blob::kBodies) throw Malformed("contents are heads (2) or bodies (3)");
  const Table& t = store_.table_of(id);
  if (from < 0 || until <= from || from % int64_t(t.slots()))
    throw Malformed("[" + std::to_string(from) + ", " + std::to_string(until) +
                    ") is not a range that begins at a page");
  if (listed && kind != blob::kBodies) throw Malformed("only bodies can be asked for by slot");
  std::lock_guard<std::mutex> hold(mutex_);
  Recovery& rec = recovering();
  out.clear();
  RemainderHeader h;
  h.kind = uint16_t(kind);
  h.row = uint32_t(row_);
  h.table = id;
  auto found = rec.tables.find(id);
  RecoverTable* table = found == rec.tables.end() ? nullptr : &found->second;
  const uint64_t slots = table ? table->slots : 0, lo = uint64_t(from);
  std::vector<uint32_t> some;
  uint64_t to = lo;
  if (listed) {
    h.flags = kListed;
    for (uint32_t slot : *listed) {
      if (slot < slots && folded(*table, slot)) some.push_back(slot);
    }
    if (some.empty()) return -1;
  } else {
    // As far as nothing of the survivors is left in R.
    const uint64_t hi = std::min((uint64_t(until) + t.slots() - 1) / t.slots() * t.slots(), std::max(slots, lo));
    if (table && kind == blob::kHeads) {
      uint64_t done = kNoLimit;
      for (size_t i = 0; i < members_.size(); ++i) {
        if (rec.survivors >> i & 1) done = std::min(done, table->heads[i]);
      }
      to = std::max(lo, done == kNoLimit ? hi : std::min(hi, done / t.slots() * t.slots()));
      if (done != kNoLimit && to >= slots) return from;  // rows above may come yet
    } else if (table) {
      while (to < hi && folded(*table, to)) ++to;
      if (to < hi) to = std::max(lo, to / t.slots() * t.slots());
    }
    if (to == lo && to < slots) return from;
    h.lo = uint32_t(lo);
    h.hi = uint32_t(to);
    if (to >= slots) h.flags = blob::kLast;
    if (kind == blob::kBodies) {
      for (uint64_t s = lo; s < to; ++s) {
        if (table->r.record(s) && (!rec.heads_done || bit(table->wanted, s))) some.push_back(uint32_t(s));
      }
    }
  }
  const bool heads = kind == blob::kHeads;
  h.n = uint32_t(heads ? (to - lo) >> t.page_bits : some.size());
  out.resize(sizeof(h) + h.n * (heads ? t.head_bytes : 4 + t.record_bytes));
  blob::Writer w(out.data());
  w.put(h);
  for (uint32_t s : some) w.put(s);
  for (uint32_t i = 0; i < h.n; ++i) {
    const uint64_t slot = heads ? lo + uint64_t(i) * t.slots() : some[i];
    const size_t bytes = heads ? t.head_bytes : t.record_bytes;
    const uint8_t* from = heads ? table->r.head(size_t(slot >> t.page_bits)) : table->r.record(slot);
    uint8_t* at = w.skip(bytes);
    if (from) std::memcpy(at, from, bytes);
  }
  blob::seal(out.data(), out.size(), offsetof(RemainderHeader, crc));
  return listed || to >= slots ? -1 : int64_t(to);
}

void Mirror::recover_end(bool abort) {
  std::lock_guard<std::mutex> hold(mutex_);
  Recovery& rec = recovering();
  auto whole = [](const Lost& lost) { return lost.heads_done && lost.present == lost.total; };
  for (const Lost& lost : rec.here) {
    if (!whole(lost) && !abort)
      throw Malformed("partition " + std::to_string(members_[lost.member].partition) + " is not recovered yet");
  }
  // Also what is whole: whoever aborts begins anew with all of them, and the mirror has what was pushed meanwhile.
  for (const Lost& lost : rec.here) {
    if (abort && lost.heads_done) store_.drop(members_[lost.member].partition);
  }
  recovery_.reset();
}

}  // namespace everstep
