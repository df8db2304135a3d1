// CRC-32C (Castagnoli), by the processor's own instruction where it has one.
#pragma once
#include <cstddef>
#include <cstdint>

namespace everstep {

// Of `n` bytes; `crc`: of what stood before them.
uint32_t crc32c(const void* data, size_t n, uint32_t crc = 0);

// "sse4.2" or "base".
const char* crc32c_isa();

}  // namespace everstep
