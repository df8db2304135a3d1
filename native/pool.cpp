#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace everstep {

static size_t rounded(size_t bytes) { return (std::max<size_t>(bytes, 64) + 63) & ~size_t(63); }

static int log2_up(size_t bytes) { return bytes <= 1 ? 0 : 64 - __builtin_clzll(bytes - 1); }

Pool::~Pool() {
  for (auto& [at, bytes] : mappings_) munmap(at, bytes);
}

size_t Pool::mapped_bytes() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return mapped_ + cold.memory_bytes();
}

uint8_t* Pool::map(size_t bytes) {
  bytes = (bytes + kHuge - 1) & ~(kHuge - 1);
  void* got = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  auto* start = static_cast<uint8_t*>(got);
  auto* at = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(start) + kHuge - 1) & ~(kHuge - 1));
  if (at > start) munmap(start, size_t(at - start));
  const size_t tail = size_t(start + bytes + kHuge - (at + bytes));
  if (tail) munmap(at + bytes, tail);
#ifdef MADV_HUGEPAGE
  madvise(at, bytes, MADV_HUGEPAGE);  // refused where huge pages are off: only slower
#endif
  mappings_.emplace_back(at, bytes);
  mapped_ += bytes;
  return at;
}

uint8_t* Pool::take(size_t bytes) {
  std::lock_guard<std::mutex> hold(mutex_);
  bool fresh;
  return take_block(rounded(bytes), fresh);
}

uint8_t* Pool::take_zeroed(size_t bytes) {
  bytes = rounded(bytes);
  bool fresh;
  uint8_t* block;
  {
    std::lock_guard<std::mutex> hold(mutex_);
    block = take_block(bytes, fresh);
  }
  if (!fresh) std::memset(block, 0, bytes);
  return block;
}

uint8_t* Pool::take_block(size_t bytes, bool& fresh) {
  fresh = true;
  if (bytes >= kOwnMapping) {
    uint8_t* block = map(bytes);
    used_ += bytes;
    return block;
  }
  fresh = false;
  if (bytes & (bytes - 1)) {
    auto found = exact_.find(bytes);
    if (found != exact_.end() && !found->second.empty()) {
      uint8_t* block = found->second.back();
      found->second.pop_back();
      used_ += bytes;
      return block;
    }
  }
  for (int c = log2_up(bytes); c < kClasses; ++c) {
    if (free_[c].empty()) continue;
    uint8_t* block = free_[c].back();
    free_[c].pop_back();
    used_ += bytes;
    give_piece(block + bytes, (size_t(1) << c) - bytes);
    return block;
  }
  if (left_ < bytes) {
    give_piece(next_, left_);
    // Small at first (a ps without rows stays small), then large enough to keep the number of mappings low.
    const size_t chunk = std::min<size_t>(std::max(mapped_ / 8 & ~(kHuge - 1), kHuge), size_t(64) << 20);
    left_ = 0;
    next_ = map(chunk);
    left_ = chunk;
  }
  fresh = true;
  uint8_t* block = next_;
  next_ += bytes;
  left_ -= bytes;
  used_ += bytes;
  return block;
}

void Pool::give(uint8_t* block, size_t bytes) {
  if (cold.has(block)) {
    cold.give(block, bytes);
    return;
  }
  std::lock_guard<std::mutex> hold(mutex_);
  bytes = rounded(bytes);
  used_ -= bytes;
  if (bytes >= kOwnMapping) {
    for (size_t i = 0; i < mappings_.size(); ++i) {
      if (mappings_[i].first != block) continue;
      mapped_ -= mappings_[i].second;
      munmap(block, mappings_[i].second);
      mappings_[i] = mappings_.back();
      mappings_.pop_back();
      return;
    }
    return;
  }
  if (bytes & (bytes - 1)) {
    exact_[bytes].push_back(block);
  } else {
    give_piece(block, bytes);
  }
}

void Pool::give_piece(uint8_t* block, size_t bytes) {
  while (bytes >= 64) {
    const int c = 63 - __builtin_clzll(bytes);
    const int used = std::min(c, kClasses - 1);
    free_[used].push_back(block);
    block += size_t(1) << used;
    bytes -= size_t(1) << used;
  }
}

}  // namespace everstep
