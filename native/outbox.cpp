#include "outbox.h"

#include <algorithm>
#include <chrono>

#include "blob.h"

namespace everstep {

std::shared_ptr<Outbox::Chunk> Outbox::fresh(size_t bytes) {
  if (bytes > kChunk) return std::make_shared<Chunk>(bytes);
  for (auto& chunk : kept_) {
    if (chunk.use_count() == 1) {
      chunk->used = 0;
      return chunk;
    }
  }
  // Takers hold them all, maybe for a small entry each: the rest of a chunk serves as well as a new one.
  for (auto& chunk : kept_) {
    if (chunk->size - chunk->used >= bytes) return chunk;
  }
  auto chunk = std::make_shared<Chunk>(kChunk);
  if (kept_.size() < kKept) kept_.push_back(chunk);
  return chunk;
}

Outbox::Slot Outbox::reserve(uint32_t partition, int64_t seq, int kind, size_t bytes) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (!open_ || open_->size - open_->used < bytes) open_ = fresh(bytes);
  entries_.push_back(Entry{partition, seq, kind, open_, open_->used, bytes, false});
  uint8_t* at = open_->data.get() + open_->used;
  open_->used += bytes;
  bytes_ += bytes;
  return Slot{first_ticket_ + entries_.size() - 1, at, bytes};
}

void Outbox::commit(const Slot& slot) {
  const uint64_t ticket = slot.ticket;
  blob::seal(slot.at, slot.bytes);
  bool front;
  {
    std::lock_guard<std::mutex> hold(mutex_);
    entries_[size_t(ticket - first_ticket_)].done = true;
    front = ticket == first_ticket_;
  }
  if (front) there_.notify_all();
}

Outbox::Taken Outbox::take(size_t max_bytes) {
  std::lock_guard<std::mutex> hold(mutex_);
  Taken out;
  out.first_ticket = first_ticket_;
  while (!entries_.empty()) {
    const Entry& e = entries_.front();
    if (!e.done || (out.chunk && (e.chunk != out.chunk || out.bytes + e.length > max_bytes))) break;
    if (!out.chunk) {
      out.chunk = e.chunk;
      out.data = e.chunk->data.get() + e.offset;
    }
    out.entries.push_back(Sent{e.partition, e.seq, e.kind, out.bytes, e.length});
    out.bytes += e.length;
    bytes_ -= e.length;
    entries_.pop_front();
    ++first_ticket_;
  }
  if (entries_.empty() && open_ && open_ == out.chunk) open_.reset();  // lets go of it: the taker has it alone
  return out;
}

bool Outbox::wait(double timeout_s) {
  std::unique_lock<std::mutex> hold(mutex_);
  const auto limit = std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 3600.0));
  return there_.wait_for(hold, limit, [&] { return !entries_.empty() && entries_.front().done; });
}

uint64_t Outbox::ticket() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return first_ticket_ + entries_.size();
}

size_t Outbox::bytes() const {
  std::lock_guard<std::mutex> hold(mutex_);
  return bytes_;
}

}  // namespace everstep
