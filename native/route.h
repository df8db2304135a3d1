// Worker side: unique keys of a batch, grouped for the ps that own them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace everstep {

// `partition_ps[b]` in 0..n_ps-1 is the rank of the ps that owns partition b. `keys` gets the distinct ids, the ps in
// rank order, within a ps the partitions ascending; keys[inverse[i]] == ids[i].
void unique_route(const int64_t* ids, size_t n, uint32_t n_partitions, uint32_t table, const int32_t* partition_ps,
                  uint32_t n_ps, std::vector<int64_t>& keys, int32_t* inverse, int64_t* counts_by_ps);

}  // namespace everstep
