#include "outbox.h"

#include <algorithm>
#include <chrono>

#include "blob.h"

namespace everstep {

std::shared_ptr<Outbox::Chunk> Outbox::fresh(size_t bytes) {
  const auto now = std::chrono::steady_clock::now();
  auto chunk = used_again(bytes);
  if (!chunk) {
    chunk = std::make_shared<Chunk>(std::max(kChunk, bytes));
    if (kept_bytes_ + chunk->size <= kKeptBytes) {
      kept_.push_back(chunk);
      kept_bytes_ += chunk->size;
    }
  }
  chunk->taken_at = now;
  drop_unused(now);
  return chunk;
}

std::shared_ptr<Outbox::Chunk> Outbox::used_again(size_t bytes) {
  for (auto& chunk : kept_) {
    if (chunk.use_count() == 1 && chunk->size >= bytes) {
      chunk->used = 0;
      return chunk;
    }
  }
  // Takers hold them all, maybe for a small entry each: the rest of a chunk serves as well as a new one.
  for (auto& chunk : kept_) {
    if (chunk->size - chunk->used >= bytes) return chunk;
  }
  return nullptr;
}

// The ones at the front are taken first: those behind lie idle when less is needed.
void Outbox::drop_unused(std::chrono::steady_clock::time_point now) {
  for (size_t i = kept_.size(); i-- > 0;) {
    const Chunk& chunk = *kept_[i];
    const bool needed = i < kKept && chunk.size == kChunk;
    if (needed || kept_[i].use_count() > 1 || now - chunk.taken_at <= kUnused) continue;
    kept_bytes_ -= chunk.size;
    kept_.erase(kept_.begin() + std::ptrdiff_t(i));
  }
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
