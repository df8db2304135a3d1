#include "replication_receiver.h"

#include <cstring>

#include "blob.h"
#include "mirror.h"

namespace everstep {

std::pair<int64_t, int64_t> ReplicationReceiver::received(const PeerKey& sender) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto found = received_.find(sender);
  return found == received_.end() ? std::pair<int64_t, int64_t>(-1, 0) : found->second;
}

void ReplicationReceiver::set_received(const PeerKey& sender, std::pair<int64_t, int64_t> next) {
  std::lock_guard<std::mutex> hold(mutex_);
  received_[sender] = next;
}

void ReplicationReceiver::forget(const PeerKey& sender) {
  std::lock_guard<std::mutex> hold(mutex_);
  received_.erase(sender);
}

std::vector<PeerKey> ReplicationReceiver::senders() {
  std::lock_guard<std::mutex> hold(mutex_);
  std::vector<PeerKey> out;
  out.reserve(received_.size());
  for (auto& [sender, next] : received_) out.push_back(sender);
  return out;
}

std::mutex& ReplicationReceiver::one_at_a_time(const PeerKey& sender) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto& found = senders_[sender];
  if (!found) found = std::make_unique<std::mutex>();
  return *found;
}

void ReplicationReceiver::retain(uint32_t partition, int64_t seq, const uint8_t* data, size_t size) {
  auto blob = std::make_shared<const std::vector<uint8_t>>(data, data + size);
  std::lock_guard<std::mutex> hold(mutex_);
  auto& log = retained_[partition];
  if (log.empty() || log.back().first < seq) log.emplace_back(seq, std::move(blob));
}

void ReplicationReceiver::confirm_retained(uint32_t partition, int64_t seq) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto found = retained_.find(partition);
  if (found == retained_.end()) return;
  auto& log = found->second;
  while (!log.empty() && log.front().first <= seq) log.pop_front();
}

std::vector<std::pair<int64_t, std::shared_ptr<const std::vector<uint8_t>>>> ReplicationReceiver::retained_after(
    uint32_t partition, int64_t seq) {
  std::lock_guard<std::mutex> hold(mutex_);
  std::vector<std::pair<int64_t, std::shared_ptr<const std::vector<uint8_t>>>> out;
  auto found = retained_.find(partition);
  if (found == retained_.end()) return out;
  for (auto& kept : found->second)
    if (kept.first > seq) out.push_back(kept);
  return out;
}

void ReplicationReceiver::drop_retained(uint32_t partition) {
  std::lock_guard<std::mutex> hold(mutex_);
  retained_.erase(partition);
}

void ReplicationReceiver::drop_all_retained() {
  std::lock_guard<std::mutex> hold(mutex_);
  retained_.clear();
}

bool ReplicationReceiver::follow(const wire::Frame& frame, std::vector<uint8_t>& codes) {
  wire::Append message;
  if (frame.header.size() < sizeof(message)) return false;
  std::memcpy(&message, frame.header.data(), sizeof(message));
  const uint64_t n = message.n_entries, n_confirmed = message.n_confirmed;
  const uint64_t confirmed_at = sizeof(message) + n * sizeof(wire::Entry);
  if (frame.header.size() != confirmed_at + n_confirmed * sizeof(wire::Confirmed)) return false;
  std::vector<wire::Entry> entries(n);
  if (n) std::memcpy(entries.data(), frame.header.data() + sizeof(message), n * sizeof(wire::Entry));
  std::vector<wire::Confirmed> confirmed(n_confirmed);
  if (n_confirmed)
    std::memcpy(confirmed.data(), frame.header.data() + confirmed_at, n_confirmed * sizeof(wire::Confirmed));
  uint64_t size = 0;
  for (const wire::Entry& e : entries) {
    if (e.kind != blob::kChange || e.bytes > frame.body_bytes) return false;
    size += e.bytes;
  }
  if (size != frame.body_bytes) return false;
  const PeerKey sender{message.slot, message.incarnation};
  Gate::Shared inside(gate_);
  std::lock_guard<std::mutex> alone(one_at_a_time(sender));
  if (message.version > version_ || received(sender) != std::make_pair(message.stream, message.first)) return false;
  for (const wire::Entry& e : entries) {
    auto found = sources_.find(e.partition);
    if (found == sources_.end() || found->second.sender != sender) return false;
  }
  codes.assign(n, uint8_t(kNotMember));
  try {
    // All before the first: a message with a damaged entry changes nothing, and is taken whole when it comes again.
    const uint8_t* at = frame.body;
    for (const wire::Entry& e : entries) {
      blob::check_seal(at, e.bytes);
      at += e.bytes;
    }
    at = frame.body;
    for (uint64_t i = 0; i < n; ++i) {
      const wire::Entry& e = entries[i];
      const Source& source = sources_.find(e.partition)->second;
      for (uint64_t id : source.mirrors) {
        if (e.mirror && uint64_t(e.mirror) != id) continue;
        const ApplyResult done = store_.mirrors->get(id)->apply(at, e.bytes, true);
        if (done == kGap) return false;  // what was applied is a repeat for the machine
        if (codes[i] != uint8_t(kApplied)) {
          codes[i] = uint8_t(done);
          if (done == kApplied && source.several) retain(e.partition, e.seq, at, e.bytes);
        }
      }
      at += e.bytes;
    }
  } catch (const std::exception&) {
    return false;  // the machine comes to the same, and says what it is
  }
  for (const wire::Confirmed& c : confirmed) {
    auto found = c.partition < 0 ? sources_.end() : sources_.find(uint32_t(c.partition));
    if (found != sources_.end() && found->second.sender == sender) confirm_retained(uint32_t(c.partition), c.seq);
  }
  set_received(sender, {message.stream, message.first + int64_t(n)});
  return true;
}

}  // namespace everstep
