#include "cold.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>

namespace everstep {

namespace {

constexpr size_t kReserve = size_t(1) << 40;  // of the address space; nothing is behind it until it is used
constexpr size_t kLeast = size_t(1) << 33;
constexpr size_t kGrow = size_t(8) << 20, kMostGrow = size_t(256) << 20;

int open_file(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return fd;
  std::string name = folder + "/everstep-cold-XXXXXX";  // (a file system that has no files without a name)
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

}  // namespace

ColdTier::~ColdTier() {
  if (base_) munmap(base_, reserved_);
  if (states_) munmap(static_cast<void*>(states_), reserved_ / kPiece);
  if (fd_ >= 0) ::close(fd_);
  if (pagemap_ >= 0) ::close(pagemap_);
}

void ColdTier::begin(const std::string& folder) {
  if (on()) return;
  if (size_t(sysconf(_SC_PAGESIZE)) != kPiece)
    throw std::system_error(ENOTSUP, std::generic_category(), "pages of this machine are not of 4096 bytes");
  fd_ = open_file(folder);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category());
  uint8_t probe[kPiece] = {1};
  if (::pwrite(fd_, probe, kPiece, 0) != ssize_t(kPiece) || ::ftruncate(fd_, 0) != 0) {
    const int error = errno ? errno : ENOSPC;
    ::close(fd_);
    fd_ = -1;
    throw std::system_error(error, std::generic_category());
  }
  void* got = MAP_FAILED;
  for (reserved_ = kReserve; reserved_ >= kLeast && got == MAP_FAILED; reserved_ /= 2)
    got = mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) throw std::system_error(ENOMEM, std::generic_category(), "too little address space");
  reserved_ *= 2;
  void* states = mmap(nullptr, reserved_ / kPiece, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (states == MAP_FAILED) {
    munmap(got, reserved_);
    throw std::system_error(ENOMEM, std::generic_category(), "too little address space");
  }
  states_ = static_cast<std::atomic<uint8_t>*>(states);
  pagemap_ = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);  // without: what was only read stays in memory
  base_ = static_cast<uint8_t*>(got);
}

uint8_t* ColdTier::take(size_t bytes) {
  const size_t n = span(bytes);
  std::lock_guard<std::mutex> hold(mutex_);
  uint8_t* block = nullptr;
  auto& free = free_[n];
  if (!free.empty()) {
    const auto [at, zero] = free.back();
    if (!zero) std::memset(at, 0, n);
    free.pop_back();
    block = at;
  } else {
    const size_t have = size_.load(std::memory_order_relaxed);
    if (next_ + n > have) {
      const size_t more = std::clamp((have / 8) & ~(kGrow - 1), std::max(kGrow, span(n)), kMostGrow);
      if (have + more > reserved_ || ::ftruncate(fd_, off_t(have + more)) != 0) throw std::bad_alloc();
      const size_t states_from = have / kPiece, states_to = (have + more) / kPiece;
      uint8_t* states = reinterpret_cast<uint8_t*>(states_);
      const size_t from = states_from & ~(kPiece - 1);
      if (mprotect(states + from, span(states_to - from), PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
      if (mmap(base_ + have, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd_, off_t(have)) ==
          MAP_FAILED)
        throw std::bad_alloc();
      madvise(base_ + have, more, MADV_RANDOM);  // a miss reads what it needs
      size_.store(have + more, std::memory_order_relaxed);
    }
    block = base_ + next_;
    next_ += n;
  }
  for (size_t p = piece_of(block); p < piece_of(block) + n / kPiece; ++p)
    states_[p].store(kTaken, std::memory_order_relaxed);
  pieces_ += n / kPiece;
  return block;
}

void ColdTier::give(uint8_t* block, size_t bytes) {
  const size_t n = span(bytes);
  size_t out = 0;
  for (size_t p = piece_of(block); p < piece_of(block) + n / kPiece; ++p)
    out += (states_[p].exchange(0, std::memory_order_relaxed) & kOut) != 0;
  // Holes read as zeros; where the file system makes none, they are written when the block is taken again.
  const bool zero =
      ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(block - base_), off_t(n)) == 0 &&
      madvise(block, n, MADV_DONTNEED) == 0;
  std::lock_guard<std::mutex> hold(mutex_);
  out_ -= out;
  pieces_ -= n / kPiece;
  free_[n].emplace_back(block, zero);
}

void ColdTier::fetch(const uint8_t* at, size_t bytes) const {
  const size_t first = piece_of(at), last = piece_of(at + bytes - 1);
  for (size_t p = first; p <= last; ++p) {
    if (!(states_[p].load(std::memory_order_relaxed) & kOut)) continue;
    madvise(base_ + first * kPiece, (last - first + 1) * kPiece, MADV_WILLNEED);
    return;
  }
}

ColdCounts ColdTier::counts() const {
  ColdCounts c;
  c.lookups = lookups_.load(std::memory_order_relaxed);
  c.misses = misses_.load(std::memory_order_relaxed);
  c.written_bytes = written_.load(std::memory_order_relaxed);
  c.disk_bytes = out_.load(std::memory_order_relaxed) * kPiece;
  c.error = error_.load(std::memory_order_relaxed);
  return c;
}

void ColdTier::grow_older() {
  const size_t end = size_.load(std::memory_order_relaxed) / kPiece;
  for (size_t p = 0; p < end; ++p) {
    uint8_t state = states_[p].load(std::memory_order_relaxed);
    if ((state & kTaken) && !(state & kOut) && (state & 0x3f) < kOldest)
      states_[p].compare_exchange_strong(state, uint8_t(state + 1), std::memory_order_relaxed);
  }
}

int ColdTier::age_of(size_t bytes) const {
  size_t ages[kOldest + 1] = {};
  const size_t end = size_.load(std::memory_order_relaxed) / kPiece;
  for (size_t p = 0; p < end; ++p) {
    const uint8_t state = states_[p].load(std::memory_order_relaxed);
    if ((state & kTaken) && !(state & kOut)) ++ages[state & 0x3f];
  }
  size_t found = 0;
  for (int age = kOldest; age >= 0; --age) {
    found += ages[age] * kPiece;
    if (found >= bytes && found) return age;
  }
  return found ? 0 : -1;
}

uint64_t ColdTier::old_pieces(const uint8_t* block, size_t bytes, int age) const {
  uint64_t out = 0;
  const size_t first = piece_of(block), n = std::min<size_t>(span(bytes) / kPiece, 64);
  for (size_t i = 0; i < n; ++i) {
    const uint8_t state = states_[first + i].load(std::memory_order_relaxed);
    if ((state & kTaken) && !(state & kOut) && (state & 0x3f) >= age) out |= uint64_t(1) << i;
  }
  return out;
}

bool ColdTier::write(const uint8_t* at, const uint8_t* from, size_t bytes) {
  off_t to = off_t(at - base_);
  written_.fetch_add(bytes, std::memory_order_relaxed);
  while (bytes) {
    const ssize_t n = ::pwrite(fd_, from, bytes, to);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      error_.store(n < 0 ? errno : ENOSPC, std::memory_order_relaxed);
      return false;
    }
    from += n;
    to += n;
    bytes -= size_t(n);
  }
  error_.store(0, std::memory_order_relaxed);
  return true;
}

bool ColdTier::drop(uint8_t* at, const uint8_t* written, size_t bytes) {
  if (std::memcmp(at, written, bytes) != 0 || madvise(at, bytes, MADV_DONTNEED) != 0) return false;
  for (size_t p = piece_of(at); p < piece_of(at) + bytes / kPiece; ++p)
    states_[p].fetch_or(kOut, std::memory_order_relaxed);
  out_ += bytes / kPiece;
  return true;
}

void ColdTier::let_go(uint8_t* block, size_t bytes) {
  if (!any_out() || pagemap_ < 0 || !has(block)) return;
  const size_t first = piece_of(block), n = std::min<size_t>(span(bytes) / kPiece, 64);
  bool some = false;
  for (size_t i = 0; i < n; ++i) some |= (states_[first + i].load(std::memory_order_relaxed) & kOut) != 0;
  uint64_t pages[64];
  if (!some || ::pread(pagemap_, pages, n * 8, off_t(uintptr_t(block) / kPiece * 8)) != ssize_t(n * 8)) return;
  for (size_t i = 0; i < n; ++i) {
    // Present, and a page of the file: nobody has written to it since it came from there.
    const bool clean = (pages[i] >> 63 & 1) && (pages[i] >> 61 & 1);
    if (clean && (states_[first + i].load(std::memory_order_relaxed) & kOut))
      madvise(block + i * kPiece, kPiece, MADV_DONTNEED);
  }
}

void ColdTier::flush(bool wait) {
  const off_t size = off_t(size_.load(std::memory_order_relaxed));
  unsigned how = SYNC_FILE_RANGE_WRITE;
  if (wait) how |= SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER;
  ::sync_file_range(fd_, 0, size, how);
  ::posix_fadvise(fd_, 0, size, POSIX_FADV_DONTNEED);
}

}  // namespace everstep
