#include "partition.h"

#include <algorithm>

namespace everstep {

blob::Marks Partition::marks() const {
  blob::Marks out;
  out.fingerprint = fingerprint;
  out.clock = clock;
  out.shards.reserve(shards.size());
  for (auto& [shard, mark] : shards) out.shards.push_back(blob::Mark{shard, mark.watermark, mark.fence});
  std::sort(out.shards.begin(), out.shards.end(), [](auto& a, auto& b) { return a.shard < b.shard; });
  out.initialised = initialised;
  return out;
}

void Partition::set_marks(const blob::Marks& marks, int64_t at_seq) {
  seq = at_seq;
  clock = marks.clock;
  fingerprint = marks.fingerprint;
  shards.clear();
  for (const blob::Mark& mark : marks.shards) shards[mark.shard] = ShardMark{mark.watermark, mark.fence};
  initialised = marks.initialised;
  std::sort(initialised.begin(), initialised.end());
  initialised.erase(std::unique(initialised.begin(), initialised.end()), initialised.end());
}

void Partition::clear() {
  owned = false;
  phase = Phase::kEmpty;
  protect = snapshot = false;
  open = Open();
  for (auto& r : rows) r->clear();
  set_marks(blob::Marks{}, 0);
}

}  // namespace everstep
