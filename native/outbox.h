// What the sender has still to send: blobs in the order of their tickets, each partition's in the order of its seq.
//
// An entry is reserved (under the partition's mutex, which gives the order), filled in place, then committed; it leaves
// only when all before it are committed. Thread-safe. Lock order: a partition's mutex > this one.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace everstep {

class Outbox {
 public:
  struct Slot {
    uint64_t ticket = 0;
    uint8_t* at = nullptr;
    size_t bytes = 0;
  };
  struct Sent {
    uint32_t partition;
    int64_t seq;
    int kind;
    size_t offset, length;  // within Taken::data
  };
  // Memory that several entries lie in.
  struct Chunk {
    explicit Chunk(size_t size) : data(new uint8_t[size]), size(size) {}
    std::unique_ptr<uint8_t[]> data;
    const size_t size;
    size_t used = 0;
    std::chrono::steady_clock::time_point taken_at;  // when it was last begun
  };
  struct Taken {
    uint64_t first_ticket = 0;
    std::vector<Sent> entries;
    std::shared_ptr<Chunk> chunk;  // null: nothing was there
    uint8_t* data = nullptr;
    size_t bytes = 0;
  };

  // Memory for one entry; throws std::bad_alloc. Must be committed.
  Slot reserve(uint32_t partition, int64_t seq, int kind, size_t bytes);
  // Seals it with its checksum: the bytes are in the cache still, and nobody waits for them but who goes on to the
  // mirrors.
  void commit(const Slot& slot);
  // Entries from the front, at least one if there is one, else at most `max_bytes`. Never blocks.
  Taken take(size_t max_bytes);
  // Until an entry can be taken; false after `timeout_s`.
  bool wait(double timeout_s);

  // Entries reserved so far: everything that happened before is among the first `ticket()` entries.
  uint64_t ticket() const;
  // What waits.
  size_t bytes() const;

 private:
  struct Entry {
    uint32_t partition;
    int64_t seq;
    int kind;
    std::shared_ptr<Chunk> chunk;
    size_t offset, length;
    bool done;
  };
  static constexpr size_t kChunk = size_t(4) << 20;
  // So many of this size are kept for good, and others, up to `kKeptBytes`, while they are needed: a lag's differences
  // go out together, and memory that is new to the process costs as much as they do.
  static constexpr size_t kKept = 4;
  static constexpr size_t kKeptBytes = size_t(64) << 20;
  static constexpr std::chrono::seconds kUnused{30};

  std::shared_ptr<Chunk> fresh(size_t bytes);
  std::shared_ptr<Chunk> used_again(size_t bytes);
  void drop_unused(std::chrono::steady_clock::time_point now);

  mutable std::mutex mutex_;
  std::condition_variable there_;
  std::deque<Entry> entries_;
  uint64_t first_ticket_ = 0;
  size_t bytes_ = 0;
  std::shared_ptr<Chunk> open_;
  std::vector<std::shared_ptr<Chunk>> kept_;  // to be used again once nobody else holds them: no new pages to fault in
  size_t kept_bytes_ = 0;
};

}  // namespace everstep
