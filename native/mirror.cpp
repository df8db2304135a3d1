#include "mirror.h"

#include <algorithm>
#include <cstring>

#include "prefetch.h"
#include "store.h"

namespace everstep {

using blob::Blob;
using blob::Part;

namespace {

constexpr size_t kMostMembers = 16;
constexpr uint64_t kMostGrowth = uint64_t(1) << 24;  // slots by which one blob may lengthen a table
constexpr size_t kAhead = 6;                         // rows whose lines are on their way

// Of a slot whose page was made. `head`: its key, too.
void fetch(const PageSet& pages, uint64_t slot, bool head) {
  if (head) __builtin_prefetch(pages.of(slot) + pages.table().keys_at + pages.in_page(slot) * 8, 1);
  prefetch_lines<1>(pages.record(slot), pages.table().record_bytes, 1024);
}

std::string not_member(uint32_t partition) {
  return "partition " + std::to_string(partition) + " is no member of this mirror";
}

uint32_t partition_arg(const Store& store, int64_t b) {
  if (b < 0 || b >= int64_t(store.n_partitions()))
    throw Malformed("partition " + std::to_string(b) + " does not exist");
  return uint32_t(b);
}

}  // namespace

// ---------------------------------------------------------------- PageSet

PageSet::~PageSet() {
  for (uint8_t* page : pages_) {
    if (page) pool_.give(page, table_.page_bytes);
  }
}

uint8_t* PageSet::make(size_t number) {
  if (number >= pages_.size()) pages_.resize(number + 1, nullptr);
  if (!pages_[number]) {
    pages_[number] = pool_.take_zeroed_page(table_.page_bytes);
    ++made_;
  }
  return pages_[number];
}

void PageSet::copy_from(const PageSet& other) {
  pages_.resize(other.pages_.size(), nullptr);
  for (size_t p = 0; p < other.pages_.size(); ++p) {
    if (!other.pages_[p]) continue;
    pages_[p] = pool_.take_page(table_.page_bytes);
    ++made_;
    std::memcpy(pages_[p], other.pages_[p], table_.page_bytes);
  }
}

void PageSet::drop(size_t number) {
  if (!page(number)) return;
  pool_.give(pages_[number], table_.page_bytes);
  pages_[number] = nullptr;
  --made_;
}

std::vector<uint8_t*> PageSet::give_up() {
  made_ = 0;
  return std::exchange(pages_, {});
}

void add_head(const Table& table, uint8_t* head, size_t i, const uint8_t* key, uint8_t weight) {
  if (weight == 1) {
    head[i >> 3] ^= uint8_t(1u << (i & 7));
    xor_bytes(head + table.keys_at + i * 8, key, 8);
    return;
  }
  const GfTables& t = gf_tables();
  head[i >> 3] ^= gf_mul(t, weight, uint8_t(1u << (i & 7)));
  uint8_t* at = head + table.keys_at + i * 8;
  for (int b = 0; b < 8; ++b) at[b] ^= gf_mul(t, weight, key[b]);
}

blob::Marks MemberMarks::block() const {
  blob::Marks out;
  out.fingerprint = fingerprint;
  out.clock = clock;
  for (auto& [shard, mark] : shards) out.shards.push_back(blob::Mark{shard, mark.watermark, mark.fence});
  out.initialised.assign(initialised.begin(), initialised.end());
  return out;
}

// ---------------------------------------------------------------- building and following

Mirror::Mirror(Store& store, uint64_t id, const std::vector<uint32_t>& members, int row)
    : store_(store), id_(id), row_(row), gf_(gf_kernels()) {
  for (size_t i = 0; i < members.size(); ++i) {
    Member m;
    m.partition = members[i];
    m.weight = gf_weight(row, i);
    members_.push_back(std::move(m));
  }
}

Mirror::Member* Mirror::member(uint32_t partition, size_t* index) {
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].partition != partition) continue;
    if (index) *index = i;
    return &members_[i];
  }
  return nullptr;
}

PageSet& Mirror::pages_of(const Table& table, size_t index) {
  auto& pages = pages_[pages_id(table, index)];
  if (!pages) pages = std::make_unique<PageSet>(table, store_.pool());
  return *pages;
}

// A slot far beyond what the table has comes from a broken blob, and must not make this ps run out of memory.
void Mirror::check_slots(size_t index, const Blob& b) {
  for (const Part& part : b.parts) {
    const PageSet* pages = pages_if(*part.table, index);
    const uint64_t most = (pages ? pages->slots() : 0) + kMostGrowth;
    for (uint32_t i = 0; i < part.head.n; ++i) {
      if (part.slot(i) >= most)
        throw Malformed("slot " + std::to_string(part.slot(i)) + " of table " + std::to_string(part.table->id) +
                        " is far beyond the rows there are");
    }
  }
}

ApplyResult Mirror::apply(const uint8_t* data, size_t size, bool checked) {
  const Blob b = blob::parse(data, size, [&](uint32_t id) { return &store_.table_of(id); }, checked);
  std::lock_guard<std::mutex> hold(mutex_);
  size_t index = 0;
  Member* m = member(b.head.partition, &index);
  if (!m) return kNotMember;
  check_slots(index, b);
  if (b.head.kind == blob::kChange) return apply_change(*m, index, b);
  return b.head.kind == blob::kMarks ? apply_marks(*m, b) : apply_contents(*m, index, b);
}

ApplyResult Mirror::apply_change(Member& m, size_t index, const Blob& b) {
  if (m.stage == kEmpty) {
    for (const Part& part : b.parts) m.full_syncs[part.table->id].dropped = true;
    return kApplied;
  }
  if (b.head.seq <= m.seq) return kRepeat;
  if (b.head.seq != m.seq + 1) return kGap;
  auto covered = [&](const Part& part) {
    return m.stage == kComplete ? FullSync{kNoLimit, kNoLimit, false} : m.full_syncs[part.table->id];
  };
  // What can fail (memory) comes first.
  if (recovery_) keep_remainder(b);
  for (const Part& part : b.parts) {
    PageSet& pages = pages_of(*part.table, index);
    const FullSync sync = covered(part);
    const uint64_t below = std::max(sync.heads, sync.bodies);
    for (uint32_t i = 0; i < part.head.n; ++i) {
      if (part.slot(i) < below) pages.make_for(part.slot(i));
    }
  }
  if (recovery_) follow(index, b);
  for (const Part& part : b.parts) {
    const PageSet& pages = pages_of(*part.table, index);
    const size_t record = part.table->record_bytes;
    const uint8_t weight = weight_of(m, *part.table);
    const FullSync sync = covered(part);
    const uint64_t below = std::max(sync.heads, sync.bodies);
    if (m.stage == kSyncing && (sync.heads < kNoLimit || sync.bodies < kNoLimit))
      m.full_syncs[part.table->id].dropped = true;
    const uint32_t n = part.head.n;
    if (part.gradients) {
      update_again(pages, part, sync.bodies);
      continue;
    }
    for (uint32_t i = 0, key = 0; i < n; ++i) {
      const uint32_t slot = part.slot(i);
      if (i + kAhead < n && part.slot(i + kAhead) < below)
        fetch(pages, part.slot(i + kAhead), part.is_toggled(i + kAhead));
      if (part.is_toggled(i)) {
        if (slot < sync.heads)
          add_head(*part.table, pages.of(slot), pages.in_page(slot), part.keys + size_t(key) * 8, weight);
        ++key;
      }
      if (slot < sync.bodies) {
        pages.touch(slot);
        add_weighted(gf_, pages.record(slot), part.record(i), record, weight);
      }
    }
  }
  m.marks.fingerprint = b.marks.fingerprint;
  m.marks.clock = b.marks.clock;
  for (const blob::Mark& mark : b.marks.shards) {
    if (mark.watermark < 0) {
      m.marks.shards.erase(mark.shard);
    } else {
      m.marks.shards[mark.shard] = ShardMark{mark.watermark, mark.fence};
    }
  }
  m.marks.initialised.insert(b.marks.initialised.begin(), b.marks.initialised.end());
  m.seq = b.head.seq;
  return kApplied;
}

// The update that the owner made of rows of a dense table, on this copy of them: the same kernel, so the same bits.
void Mirror::update_again(const PageSet& pages, const Part& part, uint64_t below) {
  const Table& t = *part.table;
  const Optimizer optimizer = part.has_options ? with_options(t.optimizer, part.options) : t.optimizer;
  constexpr uint32_t kBlock = 8;
  float* values[kBlock];
  float* state[kBlock];
  std::vector<float> aligned;
  for (uint32_t i = 0; i < part.head.n;) {
    uint32_t m = 0;
    const uint32_t first = i;
    for (; i < part.head.n && m < kBlock && part.slot(i) < below; ++i, ++m) {
      values[m] = reinterpret_cast<float*>(pages.record(part.slot(i)));
      state[m] = values[m] + t.dim;
    }
    if (!m) {
      ++i;  // the full sync has not come to it yet
      continue;
    }
    const uint8_t* from = part.gradients + size_t(first) * t.dim * sizeof(float);
    auto* grads = reinterpret_cast<const float*>(from);
    if (reinterpret_cast<uintptr_t>(from) % alignof(float)) {
      aligned.resize(kBlock * t.dim);
      std::memcpy(aligned.data(), from, size_t(m) * t.dim * sizeof(float));
      grads = aligned.data();
    }
    row_kernels().update(optimizer, part.rate, values, state, grads, m, t.dim);
  }
}

ApplyResult Mirror::apply_contents(Member& m, size_t index, const Blob& b) {
  if (m.stage == kComplete) return b.head.seq <= m.seq ? kRepeat : kGap;
  const bool heads = b.head.kind == blob::kHeads;
  auto covered = [&](const Part& part) -> uint64_t {
    auto found = m.full_syncs.find(part.table->id);
    return found == m.full_syncs.end() ? 0 : heads ? found->second.heads : found->second.bodies;
  };
  bool fresh = false;
  for (const Part& part : b.parts) {
    if (is_listed(part)) continue;  // asked for by somebody who recovers
    if (part.head.lo > covered(part)) return kGap;
    fresh |= end_of(part) > covered(part);
  }
  if (!fresh) return kRepeat;
  if (m.stage == kSyncing && b.head.seq != m.seq) return kGap;
  for (const Part& part : b.parts) {
    PageSet& pages = pages_of(*part.table, index);
    const uint64_t from = covered(part);
    for (uint32_t i = 0; i < part.head.n; ++i) {
      if (!is_listed(part) && part.slot(i) >= from) pages.make_for(part.slot(i));
    }
  }
  if (m.stage == kEmpty) {
    m.stage = kSyncing;
    m.seq = b.head.seq;
  }
  for (const Part& part : b.parts) {
    if (is_listed(part)) continue;
    const PageSet& pages = pages_of(*part.table, index);
    const uint8_t weight = weight_of(m, *part.table);
    const uint64_t from = covered(part);
    for (uint32_t i = 0; i < part.head.n; ++i) {
      const uint32_t slot = part.slot(i);
      if (slot < from) continue;
      if (heads) {
        add_head(*part.table, pages.of(slot), pages.in_page(slot), part.keys + size_t(i) * 8, weight);
      } else {
        add_weighted(gf_, pages.record(slot), part.record(i), part.table->record_bytes, weight);
      }
    }
    FullSync& sync = m.full_syncs[part.table->id];
    uint64_t& to = heads ? sync.heads : sync.bodies;
    to = std::max(to, end_of(part));
  }
  m.marks.fingerprint = b.marks.fingerprint;
  m.marks.clock = b.marks.clock;
  return kApplied;
}

ApplyResult Mirror::apply_marks(Member& m, const Blob& b) {
  if (m.stage == kComplete) return b.head.seq <= m.seq ? kRepeat : kGap;
  if (m.stage == kSyncing && b.head.seq != m.seq) return kGap;
  for (auto& [id, sync] : m.full_syncs) {
    // A table that was not sent to its end, though rows of it are known: the full sync must go on.
    const bool ended = sync.heads == kNoLimit && sync.bodies == kNoLimit;
    if (!ended && (sync.dropped || sync.heads || sync.bodies)) return kGap;
  }
  m.stage = kComplete;
  m.seq = b.head.seq;
  m.full_syncs.clear();
  m.marks = MemberMarks{b.marks.fingerprint, b.marks.clock, {}, {}};
  for (const blob::Mark& mark : b.marks.shards) m.marks.shards[mark.shard] = ShardMark{mark.watermark, mark.fence};
  m.marks.initialised.insert(b.marks.initialised.begin(), b.marks.initialised.end());
  return kApplied;
}

std::vector<MemberState> Mirror::state() {
  std::lock_guard<std::mutex> hold(mutex_);
  std::vector<MemberState> out;
  out.reserve(members_.size());
  for (const Member& m : members_) out.push_back(MemberState{m.partition, m.seq, m.stage == kComplete});
  return out;
}

std::vector<uint8_t> Mirror::marks(uint32_t partition) {
  std::lock_guard<std::mutex> hold(mutex_);
  const Member* m = member(partition);
  if (!m) throw Malformed(not_member(partition));
  return blob::marks_blob(partition, std::max<int64_t>(m->seq, 0), m->marks.block());
}

size_t Mirror::bytes() {
  std::lock_guard<std::mutex> hold(mutex_);
  size_t sum = 0;
  for (auto& [id, pages] : pages_) sum += pages->bytes();
  if (recovery_) {
    for (auto& [id, table] : recovery_->tables) sum += table.bytes();
  }
  return sum;
}

std::vector<Mirror::Page> Mirror::pages(uint32_t table, uint32_t partition) {
  const Table& t = store_.table_of(table);
  std::lock_guard<std::mutex> hold(mutex_);
  std::vector<Page> out;
  size_t index = 0;
  if (t.dense && !member(partition, &index)) throw Malformed(not_member(partition));
  const PageSet* found = pages_if(t, index);
  if (!found) return out;
  const PageSet& pages = *found;
  for (size_t p = 0; p < pages.n_pages(); ++p) {
    if (const uint8_t* page = pages.page(p))
      out.push_back(Page{uint32_t(p), std::string(reinterpret_cast<const char*>(page), pages.table().page_bytes)});
  }
  return out;
}

void Mirror::promote(uint32_t partition) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (!member(partition)) throw Malformed(not_member(partition));
  if (members_.size() != 1)
    throw Malformed("mirror " + std::to_string(id_) + " has several members: recover it instead");
  const Member& m = members_[0];
  if (m.stage != kComplete)
    throw Malformed("the mirror of partition " + std::to_string(partition) + " is not complete");
  if (store_.partition(partition).owned)
    throw Malformed("partition " + std::to_string(partition) + " is owned here already");
  std::vector<Store::TablePages> pages;
  pages.reserve(pages_.size());
  for (auto& [id, set] : pages_) pages.emplace_back(&set->table(), set->give_up());
  pages_.clear();
  const blob::Marks marks = m.marks.block();
  const int64_t seq = m.seq;
  members_.clear();
  store_.adopt(partition, std::move(pages), marks, seq);
}

// ---------------------------------------------------------------- Mirrors

void Mirrors::make(uint64_t id, const std::vector<int64_t>& members, int row) {
  if (members.empty() || members.size() > kMostMembers) throw Malformed("a mirror has 1 to 16 members");
  if (row != 0 && row != 1) throw Malformed("row " + std::to_string(row) + " of a mirror is neither 0 nor 1");
  std::vector<uint32_t> partitions;
  for (int64_t b : members) {
    if (std::count(members.begin(), members.end(), b) > 1)
      throw Malformed("partition " + std::to_string(b) + " is a member twice");
    partitions.push_back(partition_arg(store_, b));
  }
  auto made = std::make_shared<Mirror>(store_, id, partitions, row);
  std::lock_guard<std::mutex> hold(mutex_);
  if (!mirrors_.try_emplace(id, std::move(made)).second)
    throw Malformed("mirror " + std::to_string(id) + " exists already");
}

bool Mirrors::drop(uint64_t id) {
  std::shared_ptr<Mirror> gone;  // freed without the mutex
  std::lock_guard<std::mutex> hold(mutex_);
  auto found = mirrors_.find(id);
  if (found == mirrors_.end()) return false;
  gone = std::move(found->second);
  mirrors_.erase(found);
  return true;
}

std::vector<uint64_t> Mirrors::ids() {
  std::lock_guard<std::mutex> hold(mutex_);
  std::vector<uint64_t> out;
  out.reserve(mirrors_.size());
  for (auto& [id, mirror] : mirrors_) out.push_back(id);
  return out;
}

std::shared_ptr<Mirror> Mirrors::get(uint64_t id) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto found = mirrors_.find(id);
  if (found == mirrors_.end()) throw Malformed("there is no mirror " + std::to_string(id));
  return found->second;
}

void Mirrors::promote(uint64_t id, int64_t partition) {
  get(id)->promote(partition_arg(store_, partition));
  drop(id);
}

std::vector<uint32_t> Mirrors::missing(int64_t b, uint32_t table, const int64_t* keys, size_t n) {
  const Table& t = store_.table_of(table);
  Partition& partition = store_.partition(partition_arg(store_, b));
  std::vector<uint32_t> out;
  std::lock_guard<std::mutex> hold(partition.mutex);
  const Rows& rows = *partition.rows[t.index];
  if (!rows.recovering()) return out;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t slot = rows.find(keys[i], key_hash(keys[i], t.salt));
    if (slot != Rows::kNone && rows.absent(slot)) out.push_back(slot);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

std::vector<std::pair<uint32_t, uint32_t>> Mirrors::missing_all(uint32_t table, const int64_t* keys, size_t n) {
  const Table& t = store_.table_of(table);
  std::vector<std::pair<uint32_t, uint32_t>> out;
  for (size_t i = 0; i < n;) {
    const uint32_t b = partition_of(key_hash(keys[i], t.salt), store_.n_partitions());
    Partition& partition = store_.partition(b);
    std::lock_guard<std::mutex> hold(partition.mutex);
    const Rows& rows = *partition.rows[t.index];
    for (; i < n; ++i) {
      const uint64_t hash = key_hash(keys[i], t.salt);
      if (partition_of(hash, store_.n_partitions()) != b) break;
      const uint32_t slot = rows.recovering() ? rows.find(keys[i], hash) : Rows::kNone;
      if (slot != Rows::kNone && rows.absent(slot)) out.emplace_back(b, slot);
    }
  }
  return out;
}

size_t Mirrors::bytes() {
  size_t sum = 0;
  for (uint64_t id : ids()) {
    std::shared_ptr<Mirror> mirror;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      auto found = mirrors_.find(id);
      if (found != mirrors_.end()) mirror = found->second;
    }
    if (mirror) sum += mirror->bytes();
  }
  return sum;
}

}  // namespace everstep
