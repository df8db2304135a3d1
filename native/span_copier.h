// Copies a stage's state into a slot, block by block, while its process waits for a neighbour.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace everstep {

// `size` bytes at `from`, which lie at `at` in the slot.
struct CopyPiece {
  const uint8_t* from;
  size_t at, size;
};

// Bytes since the copier was made. `inside`: of blocks that ended in the span that they began in; `late`: of blocks
// that ended behind it; `stalled`: copied by `finish`.
struct CopyCounts {
  uint64_t inside = 0, late = 0, stalled = 0, late_blocks = 0;
  double busy_s = 0.0;  // of the blocks inside
};

// One copy at a time. A thread of low priority copies while a span is open; it claims a block only in there, so at most
// one block ends behind the span. Gaps between pieces are zeros in the slot.
class SpanCopier {
 public:
  explicit SpanCopier(size_t block_bytes) : block_(block_bytes) {}
  ~SpanCopier();
  SpanCopier(const SpanCopier&) = delete;
  SpanCopier& operator=(const SpanCopier&) = delete;

  // Begins a copy of pieces (ascending, not overlapping, inside of `size`) to `into`; `sums` gets a checksum for each
  // block. What was copied before is dropped.
  void load(std::vector<CopyPiece> pieces, uint8_t* into, size_t size, uint32_t* sums);
  // A span begins, in which at most `limit` bytes may be copied.
  void open(uint64_t limit);
  // The span is over; returns at once.
  void close();
  // Copies what is left on this thread. Returns its bytes.
  uint64_t finish();
  // Ends the copy as it is: behind this nothing is read or written any more.
  void drop();

  size_t block_bytes() const { return block_; }
  size_t blocks() const { return (size_ + block_ - 1) / block_; }
  uint64_t left();
  CopyCounts counts();

 private:
  void run();
  void quiet(std::unique_lock<std::mutex>& lock);
  void copy_block(size_t block) const;
  size_t size_of(size_t block) const;

  const size_t block_;
  std::vector<CopyPiece> pieces_;
  uint8_t* into_ = nullptr;
  uint32_t* sums_ = nullptr;
  size_t size_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_, rested_;
  size_t next_ = 0;     // block to be claimed
  uint64_t limit_ = 0;  // bytes that this span still takes
  uint64_t span_ = 0;   // number of the open one
  bool open_ = false, busy_ = false, stop_ = false;
  CopyCounts counts_;
  std::thread thread_;
};

}  // namespace everstep
