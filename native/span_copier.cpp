#include "span_copier.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "crc32c.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#define EVERSTEP_STREAMS 1
#endif

namespace everstep {

namespace {

constexpr int kLowest = 19;

constexpr size_t kSip = 6 << 10;  // bytes that are in the first cache from the checksum to the copy

// Copies past the caches: what trains keeps its own, and the target is not read first.
void stream(uint8_t* to, const uint8_t* from, size_t n) {
#ifdef EVERSTEP_STREAMS
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (; n >= 64; to += 64, from += 64, n -= 64) {
      // (for the next checksum; behind a piece's end it does no harm)
      _mm_prefetch(reinterpret_cast<const char*>(from) + kSip, _MM_HINT_T0);
      for (size_t i = 0; i < 64; i += 16) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), part);
      }
    }
  }
#endif
  std::memcpy(to, from, n);
}

// What was streamed is there for all, before anything that follows.
void streamed() {
#ifdef EVERSTEP_STREAMS
  _mm_sfence();
#endif
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

SpanCopier::~SpanCopier() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    open_ = false;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void SpanCopier::quiet(std::unique_lock<std::mutex>& lock) {
  open_ = false;
  rested_.wait(lock, [this] { return !busy_; });
}

void SpanCopier::load(std::vector<CopyPiece> pieces, uint8_t* into, size_t size, uint32_t* sums) {
  std::unique_lock<std::mutex> lock(mutex_);
  quiet(lock);
  pieces_ = std::move(pieces);
  into_ = into;
  size_ = size;
  sums_ = sums;
  next_ = 0;
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void SpanCopier::open(uint64_t limit) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (next_ >= blocks()) return;
    open_ = true;
    limit_ = limit;
    ++span_;
  }
  changed_.notify_one();
}

void SpanCopier::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_ = false;
}

uint64_t SpanCopier::finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  quiet(lock);
  uint64_t done = 0;
  while (next_ < blocks()) {
    const size_t block = next_++;
    busy_ = true;
    lock.unlock();
    copy_block(block);
    lock.lock();
    busy_ = false;
    done += size_of(block);
  }
  counts_.stalled += done;
  rested_.notify_all();
  return done;
}

void SpanCopier::drop() {
  std::unique_lock<std::mutex> lock(mutex_);
  quiet(lock);
  pieces_.clear();
  size_ = next_ = 0;
  into_ = nullptr;
  sums_ = nullptr;
}

uint64_t SpanCopier::left() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t claimed = std::min(size_, next_ * block_);
  return size_ - claimed;
}

CopyCounts SpanCopier::counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

size_t SpanCopier::size_of(size_t block) const { return std::min(block_, size_ - block * block_); }

void SpanCopier::copy_block(size_t block) const {
  const size_t lo = block * block_, hi = lo + size_of(block);
  size_t at = lo;
  uint32_t sum = 0;
  const auto zeros = [&](size_t to) {
    std::memset(into_ + at, 0, to - at);
    sum = crc32c(into_ + at, to - at, sum);
    at = to;
  };
  auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), lo,
                                [](size_t where, const CopyPiece& p) { return where < p.at + p.size; });
  for (; piece != pieces_.end() && piece->at < hi; ++piece) {
    const size_t begin = std::max(lo, piece->at), end = std::min(hi, piece->at + piece->size);
    if (begin >= end) continue;
    if (begin > at) zeros(begin);
    const uint8_t* from = piece->from + (begin - piece->at);
    while (at < end) {
      const size_t n = std::min(kSip, end - at);
      sum = crc32c(from, n, sum);
      stream(into_ + at, from, n);
      from += n;
      at += n;
    }
  }
  if (at < hi) zeros(hi);
  streamed();
  sums_[block] = sum;
}

void SpanCopier::run() {
  // (Who waits for a neighbour is woken at once, whatever this thread is at.)
  setpriority(PRIO_PROCESS, id_t(syscall(SYS_gettid)), kLowest);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || (open_ && next_ < blocks() && limit_ >= size_of(next_)); });
    if (stop_) return;
    const size_t block = next_++;
    const uint64_t span = span_, size = size_of(block);
    limit_ -= size;
    busy_ = true;
    lock.unlock();
    const double began = seconds();
    copy_block(block);
    const double took = seconds() - began;
    lock.lock();
    busy_ = false;
    if (open_ && span == span_) {
      counts_.inside += size;
      counts_.busy_s += took;
    } else {
      counts_.late += size;
      ++counts_.late_blocks;
    }
    rested_.notify_all();
  }
}

}  // namespace everstep
