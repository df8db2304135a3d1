// A partition: its rows by table, and its marks. One critical section, by its mutex.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "blob.h"
#include "partition_rows.h"

namespace everstep {

struct ShardMark {
  int64_t watermark = 0;
  int64_t fence = 0;
};

enum class Phase : int {
  kEmpty = 0,   // somebody else's, nothing of it is here
  kLoading,     // pages of an image are coming in
  kOwned,       // served from here
  kHandedOver,  // not served any more, but its contents can be read until it is dropped
};

struct alignas(64) Partition {
  std::mutex mutex;
  std::atomic<bool> owned{false};  // phase == kOwned; may be looked at without the mutex, for an early refusal
  Phase phase = Phase::kEmpty;
  bool protect = false;   // changes go to the outbox
  bool snapshot = false;  // one is being read
  int64_t seq = 0;        // changes so far, of any kind; the last one may be open
  int64_t clock = 0;      // pushes applied
  uint64_t fingerprint = 0;
  std::unordered_map<int64_t, ShardMark> shards;
  std::vector<uint32_t> initialised;         // table ids, ascending
  size_t expire_table = 0, expire_slot = 0;  // where Store::expire goes on
  uint64_t generation = 1;                   // of pages, see Rows; grows with every snapshot
  std::vector<std::unique_ptr<Rows>> rows;   // by Table::index
  std::vector<std::pair<const Table*, std::vector<uint8_t*>>> incoming;  // pages of an image

  // The open change of a partition whose mirrors lag: everything since their newest difference.
  struct Open {
    int64_t number = 0;  // of all that were ever opened here; 0: there is none
    int64_t since_ns = 0;
    int64_t pushes = 0;
    std::set<int64_t> shards;        // whose marks changed
    std::set<uint32_t> initialised;  // tables
  } open;

  bool readable() const { return phase == Phase::kOwned || phase == Phase::kHandedOver; }
  // All marks; the shards ascending.
  blob::Marks marks() const;
  void set_marks(const blob::Marks& marks, int64_t at_seq);
  // As it was before it was owned for the first time. Its Rows stay, empty.
  void clear();
};

}  // namespace everstep
