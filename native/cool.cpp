// Rows that were not used for longest go to disk (cold.h): which, and under whose lock.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "mirror.h"
#include "store.h"

namespace everstep {

namespace {

constexpr size_t kBatch = size_t(1) << 20;  // bytes that are written between two holds of a lock

// Pieces that are copied under their owner's lock, written without it, and dropped under it.
class Batch {
 public:
  struct Piece {
    uint64_t set;
    size_t page;
    uint8_t *block, *at;
    size_t bytes, in;
  };
  explicit Batch(ColdTier& cold) : cold_(cold), buffer_(new uint8_t[kBatch]) {}

  bool full() const { return used_ == kBatch; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  void add(uint64_t set, size_t page, uint8_t* block, size_t bytes, int age) {
    uint64_t old = cold_.old_pieces(block, bytes, age);
    while (old && used_ < kBatch) {
      const size_t i = size_t(__builtin_ctzll(old));
      size_t n = 0;
      while (i + n < 64 && (old >> (i + n) & 1) && used_ + (n + 1) * ColdTier::kPiece <= kBatch) ++n;
      const size_t size = n * ColdTier::kPiece;
      pieces_.push_back(Piece{set, page, block, block + i * ColdTier::kPiece, size, used_});
      std::memcpy(buffer_.get() + used_, block + i * ColdTier::kPiece, size);
      used_ += size;
      old &= i + n == 64 ? 0 : ~uint64_t(0) << (i + n);
    }
  }
  bool write() {
    return std::all_of(pieces_.begin(), pieces_.end(),
                       [&](const Piece& p) { return cold_.write(p.at, buffer_.get() + p.in, p.bytes); });
  }
  // Of a piece whose owner still has its page.
  size_t drop(const Piece& p) { return cold_.drop(p.at, buffer_.get() + p.in, p.bytes) ? p.bytes : 0; }

 private:
  ColdTier& cold_;
  std::unique_ptr<uint8_t[]> buffer_;
  size_t used_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace

size_t Store::cool_partition(Partition& partition, int age, size_t bytes) {
  size_t gone = 0, set = 0, page = 0;
  for (;;) {
    Batch batch(pool_.cold);
    {
      std::lock_guard<std::mutex> hold(partition.mutex);
      for (; set < partition.rows.size() && !batch.full(); ++set, page = 0) {
        const Rows& rows = *partition.rows[set];
        for (; page < rows.pages().size() && !batch.full(); ++page) {
          uint8_t* block = rows.pages()[page];
          if (block && pool_.cold.has(block)) batch.add(set, page, block, rows.table().page_bytes, age);
        }
        if (batch.full()) break;
      }
    }
    if (batch.pieces().empty() || !batch.write()) return gone;
    {
      std::lock_guard<std::mutex> hold(partition.mutex);
      for (const auto& piece : batch.pieces()) {
        const auto& pages = partition.rows[piece.set]->pages();
        if (piece.page < pages.size() && pages[piece.page] == piece.block) gone += batch.drop(piece);
      }
    }
    if (gone >= bytes || !batch.full()) return gone;
    if (page) --page;  // the last page may have more
  }
}

size_t Mirror::cool(int age, size_t bytes) {
  ColdTier& cold = store_.pool().cold;
  size_t gone = 0;
  std::vector<uint64_t> sets;
  {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto& [id, pages] : pages_) sets.push_back(id);
  }
  for (uint64_t id : sets) {
    for (size_t page = 0, end = 1; page < end && gone < bytes;) {
      Batch batch(cold);
      {
        std::lock_guard<std::mutex> hold(mutex_);
        auto found = pages_.find(id);
        if (found == pages_.end()) break;
        PageSet& set = *found->second;
        end = set.n_pages();
        for (; page < end && !batch.full(); ++page) {
          uint8_t* block = set.page(page);
          if (block && cold.has(block)) batch.add(id, page, block, set.table().page_bytes, age);
        }
      }
      if (batch.pieces().empty()) break;
      if (!batch.write()) return gone;
      std::lock_guard<std::mutex> hold(mutex_);
      auto found = pages_.find(id);
      if (found == pages_.end()) break;
      for (const auto& piece : batch.pieces()) {
        if (found->second->page(piece.page) == piece.block) gone += batch.drop(piece);
      }
      if (batch.full() && page) --page;
    }
  }
  return gone;
}

size_t Mirrors::cool(int age, size_t bytes) {
  size_t gone = 0;
  for (uint64_t id : ids()) {
    if (gone >= bytes) break;
    std::shared_ptr<Mirror> mirror;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      auto found = mirrors_.find(id);
      if (found != mirrors_.end()) mirror = found->second;
    }
    if (mirror) gone += mirror->cool(age, bytes - gone);
  }
  return gone;
}

size_t Store::cool(size_t target) {
  ColdTier& cold = pool_.cold;
  if (!cold.on()) return 0;
  std::lock_guard<std::mutex> alone(cool_mutex_);
  const size_t used = pool_.used_bytes();
  if (used <= target) return 0;
  const size_t bytes = used - target;
  const int age = cold.age_of(bytes);
  if (age < 0) return 0;
  size_t gone = mirrors ? mirrors->cool(age, bytes) : 0;
  for (uint32_t i = 0; i < n_partitions_ && gone < bytes; ++i) {
    gone += cool_partition(partitions_[cool_next_], age, bytes - gone);
    cool_next_ = (cool_next_ + 1) % n_partitions_;
    if (cold.counts().error) break;
  }
  cold.flush(false);
  return gone;
}

}  // namespace everstep
