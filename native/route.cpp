#include "route.h"

#include <algorithm>

#include "hash.h"

namespace everstep {

void unique_route(const int64_t* ids, size_t n, uint32_t n_partitions, uint32_t table, const int32_t* partition_ps,
                  uint32_t n_ps, std::vector<int64_t>& keys, int32_t* inverse, int64_t* counts_by_ps) {
  constexpr uint32_t kEmpty = 0xffffffffu;
  thread_local std::vector<uint32_t> places;      // open addressing: index into `found`
  thread_local std::vector<int64_t> found;        // distinct ids as they come
  thread_local std::vector<uint64_t> hashes;      // of `ids`
  thread_local std::vector<uint32_t> found_rank;  // place of the id's partition in the order of the answer
  thread_local std::vector<uint32_t> rank, starts, moved;

  const uint64_t salt = table_salt(table);
  size_t size = 64;
  while (size < 2 * n) size *= 2;
  places.assign(size, kEmpty);
  found.clear();
  found_rank.clear();

  // Order of partitions: by ps, then by number.
  rank.resize(n_partitions);
  starts.assign(size_t(n_ps) + 1, 0);
  for (uint32_t b = 0; b < n_partitions; ++b) ++starts[size_t(partition_ps[b]) + 1];
  for (uint32_t p = 0; p < n_ps; ++p) starts[p + 1] += starts[p];
  for (uint32_t b = 0; b < n_partitions; ++b) rank[b] = starts[partition_ps[b]]++;

  hashes.resize(n);
  for (size_t i = 0; i < n; ++i) hashes[i] = key_hash(ids[i], salt);
  const uint64_t mask = size - 1;
  constexpr size_t ahead = 16;
  for (size_t i = 0; i < n; ++i) {
    if (i + ahead < n) __builtin_prefetch(&places[hashes[i + ahead] & mask], 1);
    uint64_t at = hashes[i] & mask;
    while (places[at] != kEmpty && found[places[at]] != ids[i]) at = (at + 1) & mask;
    if (places[at] == kEmpty) {
      places[at] = uint32_t(found.size());
      found.push_back(ids[i]);
      found_rank.push_back(rank[partition_of(hashes[i], n_partitions)]);
    }
    inverse[i] = int32_t(places[at]);
  }

  // Counting sort by the partition's place; stable, so the answer depends on nothing but the arguments.
  starts.assign(size_t(n_partitions) + 1, 0);
  for (uint32_t r : found_rank) ++starts[size_t(r) + 1];
  for (uint32_t b = 0; b < n_partitions; ++b) starts[b + 1] += starts[b];
  std::fill(counts_by_ps, counts_by_ps + n_ps, 0);
  for (uint32_t b = 0; b < n_partitions; ++b) counts_by_ps[partition_ps[b]] += starts[rank[b] + 1] - starts[rank[b]];
  keys.resize(found.size());
  moved.resize(found.size());
  for (size_t u = 0; u < found.size(); ++u) {
    const uint32_t to = starts[found_rank[u]]++;
    moved[u] = to;
    keys[to] = found[u];
  }
  for (size_t i = 0; i < n; ++i) inverse[i] = int32_t(moved[size_t(inverse[i])]);
}

}  // namespace everstep
