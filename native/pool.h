// Memory for rows and indexes: 2 MiB-aligned mappings with huge pages (half the time of a random gather is TLB misses
// without them), cut into blocks. Freed blocks are reused: those of a power of two for anything, others (pages) for
// blocks of the same size. Mappings live as long as the pool.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cold.h"

namespace everstep {

class Pool {
 public:
  Pool() = default;
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // 64-byte aligned; content undefined. Throws std::bad_alloc.
  uint8_t* take(size_t bytes);
  // As take, all bytes zero.
  uint8_t* take_zeroed(size_t bytes);
  // `bytes` as given to take.
  void give(uint8_t* block, size_t bytes);
  size_t mapped_bytes() const;
  // Taken and not given back, without what is on disk.
  size_t used_bytes() const { return used_.load(std::memory_order_relaxed) + cold.memory_bytes(); }
  // Pages of rows: as take and take_zeroed, but from the cold tier once it has begun. `give` takes them back.
  uint8_t* take_page(size_t bytes) { return cold.on() ? cold.take(bytes) : take(bytes); }
  uint8_t* take_zeroed_page(size_t bytes) { return cold.on() ? cold.take(bytes) : take_zeroed(bytes); }

  // Has no pages until it begins.
  ColdTier cold;

 private:
  static constexpr size_t kHuge = size_t(2) << 20;
  static constexpr size_t kOwnMapping = size_t(1) << 20;  // from here on a block is its own mapping
  static constexpr int kClasses = 21;

  // `fresh`: never used, so zero.
  uint8_t* take_block(size_t bytes, bool& fresh);
  uint8_t* map(size_t bytes);
  void give_piece(uint8_t* block, size_t bytes);

  mutable std::mutex mutex_;
  std::vector<std::pair<uint8_t*, size_t>> mappings_;
  std::vector<uint8_t*> free_[kClasses];
  std::unordered_map<size_t, std::vector<uint8_t*>> exact_;  // free blocks of sizes that are no power of two
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
  size_t mapped_ = 0;
  std::atomic<size_t> used_{0};
};

}  // namespace everstep
