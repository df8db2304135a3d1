// Mirrors: what this ps keeps of partitions that live at other ps, so that they can live on here.
//
// A mirror of k member partitions has, per table, pages whose bytes are the sum over the members of weight * page in
// GF(2^8) (weight 1 in row 0, 2^i for member i in row 1), and each member's marks as a plain copy. It is built by
// *in a full sync*: the member's owner sends contents (HEADS, BODIES) of slot ranges in order, in the same stream as
// the differences (CHANGE); a difference of a slot that the full sync has not covered yet is dropped, its contents are
// still to come. MARKS ends the full sync; from then on every difference is applied in the order of its seq. A dense
// table is not summed: each member has its own pages here, and updates are made once more by the same kernel, so to the
// same bits.
//
// To *recover* lost members (recover.cpp), R, the pages as they are when it begins, has the surviving members folded
// out of it: their contents are added once more, which cancels them; where a survivor has not been folded yet, its
// differences go on to be applied to R too. R is copied page by page, on write (`Remainder`). What remains is weight *
// lost partition, or, of two lost partitions, one of two equations; the other one comes from the mirror of the other
// row. Heads (which rows there are) come first; from then on the partition is owned here and serves every row that is
// already back, and the others can be asked for by their slots.
//
// Lock order: a mirror's mutex > a partition's mutex > the outbox's and the pool's mutex. The mutex of the list of
// mirrors is held alone. Nothing here may be called with a partition's mutex held.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "blob.h"
#include "partition.h"
#include "gf256.h"
#include "pool.h"
#include "table.h"

namespace everstep {

class Store;

enum ApplyResult : int { kApplied = 0, kRepeat = 1, kGap = 2, kNotMember = 3 };

constexpr uint64_t kNoLimit = uint64_t(1) << 32;  // above all slots

// Pages of one table that come into being, zeroed, when something is written into them.
class PageSet {
 public:
  PageSet(const Table& table, Pool& pool) : table_(table), pool_(pool) {}
  ~PageSet();
  PageSet(const PageSet&) = delete;
  PageSet& operator=(const PageSet&) = delete;

  const Table& table() const { return table_; }
  uint64_t slots() const { return uint64_t(pages_.size()) << table_.page_bits; }
  size_t n_pages() const { return pages_.size(); }
  size_t bytes() const { return made_ * table_.page_bytes + pages_.capacity() * sizeof(uint8_t*); }
  // Null: all zero.
  uint8_t* page(size_t number) const { return number < pages_.size() ? pages_[number] : nullptr; }
  uint8_t* of(uint64_t slot) const { return page(size_t(slot >> table_.page_bits)); }
  uint8_t* make(size_t number);
  void make_for(uint64_t slot) {
    if (!of(slot)) make(size_t(slot >> table_.page_bits));
  }
  size_t in_page(uint64_t slot) const { return size_t(slot) & (table_.slots() - 1); }
  // Of a slot whose page was made.
  uint8_t* record(uint64_t slot) const { return table_.record(pages_[slot >> table_.page_bits], in_page(slot)); }
  // The record is about to be changed: it is not cold.
  void touch(uint64_t slot) const {
    if (pool_.cold.has(of(slot))) pool_.cold.touch(record(slot), table_.record_bytes);
  }
  void copy_from(const PageSet& other);
  void drop(size_t number);
  // Gives the pages away, null where all is zero; this is empty then.
  std::vector<uint8_t*> give_up();

 private:
  const Table& table_;
  Pool& pool_;
  std::vector<uint8_t*> pages_;
  size_t made_ = 0;
};

// What is left of a mirror's pages while surviving members are folded out of them: the mirror's own bytes until
// somebody is about to change either, then a copy; nothing once nobody needs a page any more. Heads and bodies are
// copied apart, since all heads are folded long before the first body. So a recovery begins without a copy, and never
// holds more than the pages that are between their first and their last fold.
class Remainder {
 public:
  Remainder(const PageSet& from, Pool& pool);
  ~Remainder();
  Remainder(const Remainder&) = delete;
  Remainder& operator=(const Remainder&) = delete;

  size_t n_pages() const { return pages_.size(); }
  // Held by copies.
  size_t bytes() const { return bytes_ + pages_.size() * sizeof(Page); }
  // Null: all zero.
  const uint8_t* head(size_t page) const;
  // A whole page, of which only the records count; null: all zero.
  const uint8_t* body(size_t page) const;
  const uint8_t* record(uint64_t slot) const {
    const uint8_t* page = body(number(slot));
    return page ? table_.record(page, in_page(slot)) : nullptr;
  }
  // To be called before the mirror's page changes: what is here does not. They may throw std::bad_alloc.
  void keep(uint64_t slot, bool head);
  // Before bytes of it are written here.
  void own_head(uint64_t slot);
  void own_body(uint64_t slot);
  // Of what is owned.
  uint8_t* head_to_write(uint64_t slot) { return pages_[number(slot)].head; }
  uint8_t* record_to_write(uint64_t slot) { return table_.record(pages_[number(slot)].body, in_page(slot)); }
  // Nobody needs it any more: all zero from now on, and stays so.
  void drop_heads();
  void drop_body(size_t page);
  bool has_body(size_t page) const { return pages_[page].body_state != kGone; }

 private:
  enum State : uint8_t { kShared, kOwn, kGone };
  struct Page {
    uint8_t *head = nullptr, *body = nullptr;
    State head_state = kShared, body_state = kShared;
  };
  size_t number(uint64_t slot) const { return size_t(slot >> table_.page_bits); }
  size_t in_page(uint64_t slot) const { return size_t(slot) & (table_.slots() - 1); }

  const Table& table_;
  const PageSet& from_;
  Pool& pool_;
  std::vector<Page> pages_;
  size_t bytes_ = 0;
};

// The marks of a member, absolute.
struct MemberMarks {
  uint64_t fingerprint = 0;
  int64_t clock = 0;
  std::map<int64_t, ShardMark> shards;
  std::set<uint32_t> initialised;

  blob::Marks block() const;
};

struct MemberState {
  uint32_t partition;
  int64_t seq;  // -1: nothing yet
  bool complete;
};

struct RecoverState {
  uint32_t partition;
  bool heads_done, bodies_done;
  uint64_t slots_present, slots_total;
};

class Mirror {
 public:
  Mirror(Store& store, uint64_t id, const std::vector<uint32_t>& members, int row);

  // One blob of a member's stream. Throws Malformed (or std::bad_alloc) with nothing changed.
  // `checked`: the caller did, and the bytes are as they were sealed.
  ApplyResult apply(const uint8_t* data, size_t size, bool checked = false);
  std::vector<MemberState> state();
  std::vector<uint8_t> marks(uint32_t partition);
  size_t bytes();
  // Moves pieces that are at least so old to disk, until so many bytes went; how many (cool.cpp).
  size_t cool(int age, size_t bytes);
  struct Page {
    uint32_t number;
    std::string bytes;
  };
  // Of a dense table: that member's.
  std::vector<Page> pages(uint32_t table, uint32_t partition);
  // The pages become the partition, which is owned here then; nothing is left here.
  void promote(uint32_t partition);

  // `here`: those of the lost members that are to live here. After all lost members' mirrors were levelled.
  void recover_begin(const std::vector<uint32_t>& lost, const std::vector<uint32_t>& here);
  // Contents of a survivor, in the order of its stream.
  ApplyResult recover_fold(const uint8_t* data, size_t size);
  // What recover_emit gave at the mirror of the other row.
  ApplyResult recover_other(const uint8_t* data, size_t size);
  std::vector<RecoverState> recover_state();
  // Contents of R for the mirror of the other row, as far as they are folded: `out`, empty if nothing is ready. The
  // next lo, or -1 at the table's end. `listed`: BODIES of exactly those of these slots that are folded.
  int64_t recover_emit(int kind, uint32_t table, int64_t lo, int64_t hi, const std::vector<uint32_t>* listed,
                       std::vector<uint8_t>& out);
  // Malformed if something is not back yet, unless `abort`: then what came back here is dropped, half or whole.
  void recover_end(bool abort);

 private:
  enum Stage { kEmpty, kSyncing, kComplete };
  struct FullSync {
    uint64_t heads = 0, bodies = 0;  // covered below
    bool dropped = false;            // a difference was left to contents that are still to come
  };
  struct Member {
    uint32_t partition = 0;
    uint8_t weight = 1;
    Stage stage = kEmpty;
    int64_t seq = -1;
    MemberMarks marks;
    std::unordered_map<uint32_t, FullSync> full_syncs;  // by table; empty once complete
  };
  struct RecoverTable {
    RecoverTable(const PageSet& pages, Pool& pool, size_t members);
    size_t bytes() const;

    const Table& table;
    Remainder r;
    PageSet other;
    const uint64_t slots;             // beyond, no lost partition has a row
    std::vector<uint64_t> heads;      // [member] folded below; at the first lost: of the other row
    std::vector<uint16_t> bodies;     // [slot] bit i: member i is folded; at the first lost: the other row is here
    std::vector<uint8_t> seen, left;  // [member] sent bodies; has differences that only its contents will cancel
    std::vector<uint64_t> wanted;     // bit per slot: used in a lost partition; empty until heads are done
  };
  struct Lost {
    size_t member = 0;
    uint8_t of_r = 0, of_other = 0;  // its bytes = of_r * R + of_other * other
    bool heads_done = false;
    uint64_t present = 0, total = 0;
  };
  struct Recovery {
    std::vector<size_t> lost;
    std::vector<Lost> here;
    uint16_t survivors = 0, full = 0;  // members whose bits a slot needs; and of the other row's, if two are lost
    bool heads_done = false;
    std::map<uint32_t, RecoverTable> tables;
  };

  Member* member(uint32_t partition, size_t* index = nullptr);
  // A table's pages, or, of a dense table, one member's.
  static uint64_t pages_id(const Table& table, size_t index) {
    return uint64_t(table.id) << 8 | (table.dense ? index + 1 : 0);
  }
  PageSet& pages_of(const Table& table, size_t index);
  const PageSet* pages_if(const Table& table, size_t index) const {
    auto found = pages_.find(pages_id(table, index));
    return found == pages_.end() ? nullptr : found->second.get();
  }
  static uint8_t weight_of(const Member& m, const Table& table) { return table.dense ? 1 : m.weight; }
  void update_again(const PageSet& pages, const blob::Part& part, uint64_t below);
  void check_slots(size_t index, const blob::Blob& b);
  ApplyResult apply_change(Member& m, size_t index, const blob::Blob& b);
  ApplyResult apply_contents(Member& m, size_t index, const blob::Blob& b);
  ApplyResult apply_marks(Member& m, const blob::Blob& b);

  Recovery& recovering();
  Lost solve(const std::vector<size_t>& lost, size_t member) const;
  void keep_remainder(const blob::Blob& b);
  void follow(size_t index, const blob::Blob& b);
  ApplyResult fold_heads(size_t index, const blob::Blob& b);
  ApplyResult fold_bodies(size_t index, const blob::Blob& b);
  ApplyResult fold_marks(size_t index, const blob::Blob& b);
  bool folded(const RecoverTable& table, uint64_t slot) const {
    return (table.bodies[slot] & recovery_->survivors) == recovery_->survivors;
  }
  void heads_if_ready();
  // Puts rows that are whole now into their partitions: slots [lo, hi), or those listed.
  void install(RecoverTable& table, uint64_t lo, uint64_t hi, const std::vector<uint32_t>* listed);
  // Gives pages back of which nobody needs what is left: all of [lo, hi) is installed.
  void let_go(RecoverTable& table, uint64_t lo, uint64_t hi);
  // Whether all that is recovered lives here: nobody else asks for what is left.
  bool all_here() const { return recovery_->here.size() == recovery_->lost.size(); }

  Store& store_;
  const uint64_t id_;
  const int row_;
  const GfKernels& gf_;
  std::mutex mutex_;
  std::vector<Member> members_;
  std::unordered_map<uint64_t, std::unique_ptr<PageSet>> pages_;  // by pages_id
  std::unique_ptr<Recovery> recovery_;
};

// dst += weight * src
inline void add_weighted(const GfKernels& gf, uint8_t* dst, const uint8_t* src, size_t n, uint8_t weight) {
  if (weight == 1) {
    gf.add(dst, src, n);
  } else {
    gf.add_mul(dst, src, n, weight);
  }
}

// Toggles slot `i` of a page in its head: used bit and key, times weight.
void add_head(const Table& table, uint8_t* head, size_t i, const uint8_t* key, uint8_t weight);

// A part of a blob that holds contents covers [lo, hi), or, `listed`, exactly its slots.
inline uint64_t end_of(const blob::Part& part) { return part.head.flags & blob::kLast ? kNoLimit : part.head.hi; }
inline bool is_listed(const blob::Part& part) { return !part.head.hi && !(part.head.flags & blob::kLast); }

class Mirrors {
 public:
  explicit Mirrors(Store& store) : store_(store) {}

  void make(uint64_t id, const std::vector<int64_t>& members, int row);
  // False: there is none of this id.
  bool drop(uint64_t id);
  std::vector<uint64_t> ids();
  // Throws Malformed if there is none.
  std::shared_ptr<Mirror> get(uint64_t id);
  void promote(uint64_t id, int64_t partition);
  size_t bytes();
  size_t cool(int age, size_t bytes);
  // Slots of those of these rows of a partition that is being recovered that are not here yet, ascending.
  std::vector<uint32_t> missing(int64_t partition, uint32_t table, const int64_t* keys, size_t n);
  // The same for keys of any partitions that are here: (partition, slot), in the order of the keys.
  std::vector<std::pair<uint32_t, uint32_t>> missing_all(uint32_t table, const int64_t* keys, size_t n);

 private:
  Store& store_;
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Mirror>> mirrors_;
};

}  // namespace everstep
