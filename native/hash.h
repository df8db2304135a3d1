// The hash that everything agrees on: placement, index, initial values, fingerprints. The NumPy twin has the same.
// Static: of inline functions the linker keeps one copy, which could be that compiled for AVX-512.
#pragma once
#include <cstdint>

namespace everstep {

// Finalizer of splitmix64: a bijection of 64 bits.
static inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

static inline uint64_t table_salt(uint32_t table) { return mix64(uint64_t(table) + 1); }

static inline uint64_t key_hash(int64_t key, uint64_t salt) { return mix64(uint64_t(key) ^ salt); }

// The high half of the hash chooses the partition, the low half the place in the partition's index: independent.
static inline uint32_t partition_of(uint64_t hash, uint32_t n_partitions) {
  return uint32_t(((hash >> 32) * n_partitions) >> 32);
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

}  // namespace everstep
