// Pages of rows that have not been used for long, on disk.
//
// Row pages lie in a private mapping of an unlinked file, at the file's own offsets. What is in memory is a private copy,
// which the kernel never writes back. To move a piece (4 KiB) to disk, its bytes are written to the file at the piece's
// place, then the private copy is dropped: from then on the mapping shows the file. Whoever touches the piece reads the
// same bytes, from disk; whoever writes makes a private copy again. So nothing that reads or writes rows has to know
// whether they are in memory, and no reader can see anything else than what was there (docs/decisions/0297).
//
// The caller of `drop` holds the lock of who owns the piece, and compares its bytes with what was written: what changed
// meanwhile stays in memory. `touch` is for ages and counts only, nothing depends on it.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace everstep {

struct ColdCounts {
  uint64_t lookups = 0, misses = 0;  // rows that were pulled; of these, that were on disk
  uint64_t written_bytes = 0;        // to the file so far
  size_t disk_bytes = 0;             // of rows that are on disk alone
  int error = 0;                     // errno of the last write that failed, 0 since one worked
};

class ColdTier {
 public:
  static constexpr size_t kPiece = 4096;
  static constexpr int kOldest = 62;

  ColdTier() = default;
  ~ColdTier();
  ColdTier(const ColdTier&) = delete;
  ColdTier& operator=(const ColdTier&) = delete;

  // Begins the tier: from now on pages are taken from it. Throws std::system_error: the folder takes no file.
  void begin(const std::string& folder);
  bool on() const { return base_ != nullptr; }
  bool has(const uint8_t* at) const { return uintptr_t(at) - uintptr_t(base_) < size_.load(std::memory_order_relaxed); }

  // A page: zeros, aligned to pieces. Throws std::bad_alloc.
  uint8_t* take(size_t bytes);
  void give(uint8_t* block, size_t bytes);
  // In memory, of what was taken.
  size_t memory_bytes() const {
    return (pieces_.load(std::memory_order_relaxed) - out_.load(std::memory_order_relaxed)) * kPiece;
  }
  size_t mapped_bytes() const { return size_.load(std::memory_order_relaxed); }

  // Bytes of a row are about to be used; whether some of them were on disk.
  bool touch(const uint8_t* at, size_t bytes) {
    bool missed = false;
    const size_t last = piece_of(at + bytes - 1);
    for (size_t p = piece_of(at); p <= last; ++p) {
      const uint8_t state = states_[p].load(std::memory_order_relaxed);
      if (state == kTaken) continue;
      missed |= (state & kOut) != 0;
      if (state & kOut) out_.fetch_sub(1, std::memory_order_relaxed);
      states_[p].store(kTaken, std::memory_order_relaxed);
    }
    return missed;
  }
  // Has what is on disk read ahead.
  void fetch(const uint8_t* at, size_t bytes) const;
  bool any_out() const { return out_.load(std::memory_order_relaxed) != 0; }
  void count(size_t lookups, size_t misses) {
    lookups_.fetch_add(lookups, std::memory_order_relaxed);
    misses_.fetch_add(misses, std::memory_order_relaxed);
  }
  ColdCounts counts() const;

  // ---- moving pieces to disk (Store::cool)
  // All pieces in memory are older by one.
  void grow_older();
  // The age from which on pieces have to go so that `bytes` go; -1: nothing is in memory.
  int age_of(size_t bytes) const;
  // Pieces of this page that are in memory and at least so old: bit i for the i-th; at most 64.
  uint64_t old_pieces(const uint8_t* block, size_t bytes, int age) const;
  // Writes bytes to the place of `at`; false: it failed (counts().error).
  bool write(const uint8_t* at, const uint8_t* from, size_t bytes);
  // The copy in memory goes, if it is still what was written. Under the lock of the page's owner.
  bool drop(uint8_t* at, const uint8_t* written, size_t bytes);
  // The page was read as a whole: what of it was only read from disk leaves memory again.
  void let_go(uint8_t* block, size_t bytes);
  // Written bytes leave the kernel's cache as soon as the disk has them.
  void flush(bool wait);

 private:
  static constexpr uint8_t kOut = 0x80, kTaken = 0x40;  // and the age below

  size_t piece_of(const uint8_t* at) const { return size_t(at - base_) / kPiece; }
  static size_t span(size_t bytes) { return (bytes + kPiece - 1) & ~(kPiece - 1); }

  int fd_ = -1, pagemap_ = -1;
  uint8_t* base_ = nullptr;
  std::atomic<uint8_t>* states_ = nullptr;  // of each piece
  size_t reserved_ = 0;
  std::atomic<size_t> size_{0};
  std::atomic<size_t> pieces_{0}, out_{0};
  std::atomic<uint64_t> lookups_{0}, misses_{0}, written_{0};
  std::atomic<int> error_{0};
  std::mutex mutex_;  // of what follows
  std::unordered_map<size_t, std::vector<std::pair<uint8_t*, bool>>> free_;  // by span; true: all zeros
  size_t next_ = 0;                                                         // of the mapping, handed out
};

}  // namespace everstep
