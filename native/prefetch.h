// Brings the lines of a row on their way before the row is used.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace everstep {

// The lines of `bytes` from `at` on; of a longer row the first `most`: the hardware sees to the rest. `kWrite`: 1, the
// row is about to be changed.
template <int kWrite>
inline void prefetch_lines(const void* at, size_t bytes, size_t most) {
  const uint8_t* p = static_cast<const uint8_t*>(at);
  bytes = std::min(bytes, most);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, kWrite);
  if (bytes) __builtin_prefetch(p + bytes - 1, kWrite);  // rows do not begin at a line's start
}

}  // namespace everstep
