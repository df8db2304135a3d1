#include "replication_sender.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <stdexcept>
#include <thread>

#include <poll.h>

#include "blob.h"

namespace everstep {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kTakeBytes = size_t(8) << 20;
constexpr size_t kAppendBytes = size_t(4) << 20;  // largest message to a peer, but for single entries that are larger
constexpr size_t kAppendItems = 4096;
constexpr double kLeastAnswer_s = 0.1;  // an answer that is on its way is worth so much, however late it is
constexpr int kTick_ms = 100;

Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(s, 0.0, 3600.0)));
}

}  // namespace

struct ReplicationSender::Flight {
  PeerKey peer;
  std::shared_ptr<Link> link;
  Batch batch;
  std::vector<uint8_t> head;
  wire::Frame answer;
  std::string broken;
  bool landed = false;
};

// ---------------------------------------------------------------- streams: in

void ReplicationSender::set_route(uint32_t partition, std::vector<PeerKey> peers) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (peers.empty()) {
    routes_.erase(partition);
  } else {
    routes_[partition] = std::move(peers);
  }
}

void ReplicationSender::set_version(int64_t version) {
  std::lock_guard<std::mutex> hold(mutex_);
  version_ = std::max(version_, version);
}

void ReplicationSender::sync(uint32_t partition, int64_t from_ticket, const std::vector<SyncTarget>& targets) {
  std::lock_guard<std::mutex> hold(mutex_);
  Synced synced;
  for (const SyncTarget& t : targets) synced.emplace_back(from_ticket, t);
  syncs_[partition].push_back(std::move(synced));
}

void ReplicationSender::widen(uint32_t partition, int64_t from_ticket, const SyncTarget& target) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto found = syncs_.find(partition);
  if (found == syncs_.end()) throw std::logic_error("partition " + std::to_string(partition) + " is not being synced");
  found->second.back().emplace_back(from_ticket, target);
}

void ReplicationSender::end_syncs(uint32_t partition) {
  std::lock_guard<std::mutex> hold(mutex_);
  syncs_.erase(partition);
}

void ReplicationSender::some(uint32_t partition, const SyncTarget& target) {
  std::lock_guard<std::mutex> hold(mutex_);
  some_[partition].push_back(target);
}

std::vector<PeerKey> ReplicationSender::append(int64_t first_ticket, const std::vector<OutItem>& entries) {
  std::lock_guard<std::mutex> hold(mutex_);
  return deal(first_ticket, entries);
}

std::vector<PeerKey> ReplicationSender::deal(int64_t first_ticket, const std::vector<OutItem>& entries) {
  if (first_ticket != next_ticket_)
    throw std::logic_error("outbox entries from " + std::to_string(first_ticket) + ", " + std::to_string(next_ticket_) +
                           " was to come");
  std::set<PeerKey> got;
  for (const OutItem& e : entries) {
    const int64_t ticket = next_ticket_++;
    pending_.push_back(0);
    OutItem item = e;
    item.ticket = ticket;
    auto give = [&](const PeerKey& peer, int64_t mirror, int64_t sync) {
      item.mirror = mirror;
      item.sync = sync;
      put(peer, item);
      got.insert(peer);
    };
    if (e.kind == blob::kChange) {
      auto route = routes_.find(e.partition);
      if (route == routes_.end()) continue;
      for (const PeerKey& peer : route->second) give(peer, 0, 0);
      if (route->second.size() > 1) several_[ticket] = {e.partition, e.seq};
      continue;
    }
    if (e.kind == blob::kSome) {
      auto& targets = some_[e.partition];
      if (targets.empty())
        throw std::logic_error("single slots of partition " + std::to_string(e.partition) + " for nobody");
      const SyncTarget t = targets.front();
      targets.pop_front();
      give(t.peer, t.mirror, t.sync);
      continue;
    }
    auto syncs = syncs_.find(e.partition);
    if (syncs == syncs_.end() || ticket < syncs->second.front().front().first) continue;
    for (auto& [since, t] : syncs->second.front()) {
      if (ticket >= since) give(t.peer, t.mirror, t.sync);
    }
    if (e.kind == blob::kMarks) {
      syncs->second.pop_front();
      if (syncs->second.empty()) syncs_.erase(syncs);
    }
  }
  advance();
  return {got.begin(), got.end()};
}

void ReplicationSender::send(const PeerKey& peer, OutItem item) {
  std::lock_guard<std::mutex> hold(mutex_);
  item.ticket = -1;
  put(peer, std::move(item));
}

void ReplicationSender::put(const PeerKey& peer, OutItem item) {
  auto stream = streams_.find(peer);
  if (stream == streams_.end()) return;  // it is gone
  waiting_bytes_ += int64_t(item.bytes);
  levelling_ += item.ticket < 0 && item.kind == blob::kChange;
  ++owed_[item.partition];
  if (item.ticket >= 0) ++pending_[size_t(item.ticket - done_ticket_)];
  if (item.kind != blob::kChange) sync_bytes_ += int64_t(item.bytes);
  stream->second.queue.push_back(std::move(item));
}

// ---------------------------------------------------------------- streams: out

bool ReplicationSender::make_batch(Stream& stream, size_t max_bytes, size_t max_items, Batch& out) {
  if (stream.queue.empty()) return false;
  out.stream = stream.number;
  out.first = stream.first;
  size_t size = 0;
  for (const OutItem& item : stream.queue) {
    if (!out.items.empty() && (size + item.bytes > max_bytes || out.items.size() >= max_items)) break;
    out.items.push_back(item);
    size += item.bytes;
  }
  out.confirmed.assign(stream.confirmed.begin(), stream.confirmed.end());
  stream.confirmed.clear();
  return true;
}

bool ReplicationSender::batch(const PeerKey& peer, size_t max_bytes, size_t max_items, Batch& out) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto stream = streams_.find(peer);
  return stream != streams_.end() && make_batch(stream->second, max_bytes, max_items, out);
}

bool ReplicationSender::waits(const PeerKey& peer) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto stream = streams_.find(peer);
  return stream != streams_.end() && !stream->second.queue.empty();
}

std::map<int64_t, int64_t> ReplicationSender::answered(const PeerKey& peer, int64_t first, const std::string& codes) {
  std::lock_guard<std::mutex> hold(mutex_);
  return answered_locked(peer, first, reinterpret_cast<const uint8_t*>(codes.data()), codes.size());
}

std::map<int64_t, int64_t> ReplicationSender::answered_locked(const PeerKey& peer, int64_t first, const uint8_t* codes,
                                                              size_t n) {
  std::map<int64_t, int64_t> refused;
  auto found = streams_.find(peer);
  if (found == streams_.end()) return refused;
  Stream& stream = found->second;
  for (size_t i = 0; i < n; ++i) {
    const int64_t number = first + int64_t(i);
    if (number < stream.first) continue;  // answered before
    if (number > stream.first || stream.queue.empty())
      throw std::logic_error("answer to entry " + std::to_string(number) + ", " + std::to_string(stream.first) +
                             " was to come");
    const OutItem item = std::move(stream.queue.front());
    stream.queue.pop_front();
    ++stream.first;
    if (item.kind == blob::kChange && (codes[i] == kRefused || codes[i] == kGap)) {
      refused_ticket_ = std::max(refused_ticket_, item.ticket);
      several_.erase(item.ticket);  // not all have it: who has it must keep it
      if (codes[i] == kRefused) {
        const int64_t ticket = item.ticket >= 0 ? item.ticket : next_ticket_;  // levelling: what is served now
        auto [at, fresh] = refused.try_emplace(item.partition, ticket);
        if (!fresh) at->second = std::max(at->second, ticket);
      }
    }
    settle(item);
  }
  advance();
  return refused;
}

void ReplicationSender::live(const std::vector<PeerKey>& peers, int64_t version) {
  std::lock_guard<std::mutex> hold(mutex_);
  for (const PeerKey& peer : peers) {
    auto [stream, fresh] = streams_.try_emplace(peer);
    if (fresh) stream->second.number = version;
  }
  for (auto stream = streams_.begin(); stream != streams_.end();) {
    if (std::find(peers.begin(), peers.end(), stream->first) != peers.end()) {
      ++stream;
      continue;
    }
    std::deque<OutItem> queue = std::move(stream->second.queue);
    stream = streams_.erase(stream);
    for (const OutItem& item : queue) settle(item);
  }
  advance();
}

void ReplicationSender::settle(const OutItem& item) {
  waiting_bytes_ -= int64_t(item.bytes);
  levelling_ -= item.ticket < 0 && item.kind == blob::kChange;
  if (item.kind != blob::kChange) sync_bytes_ -= int64_t(item.bytes);
  auto owed = owed_.find(item.partition);
  if (!--owed->second) owed_.erase(owed);
  if (item.ticket < 0 || --pending_[size_t(item.ticket - done_ticket_)]) return;
  auto several = several_.find(item.ticket);
  if (several == several_.end()) return;
  const auto [partition, seq] = several->second;
  several_.erase(several);
  auto route = routes_.find(partition);
  if (route == routes_.end()) return;
  for (const PeerKey& peer : route->second) {
    auto known = streams_.find(peer);
    if (known != streams_.end()) known->second.confirmed[partition] = seq;
  }
}

void ReplicationSender::advance() {
  while (!pending_.empty() && !pending_.front()) {
    pending_.pop_front();
    ++done_ticket_;
  }
  for (Waiter* w : waiters_) {
    if (!w->woken && done_ticket_ >= w->after && !levelling_) {
      w->woken = true;
      w->changed.notify_one();
    }
  }
  if (want_room_) roomy_.notify_all();
}

std::vector<PeerKey> ReplicationSender::peers() {
  std::lock_guard<std::mutex> hold(mutex_);
  std::vector<PeerKey> out;
  out.reserve(streams_.size());
  for (auto& [key, stream] : streams_) out.push_back(key);
  return out;
}

bool ReplicationSender::owes(uint32_t partition) {
  std::lock_guard<std::mutex> hold(mutex_);
  return owed_.count(partition);
}

ReplicationSender::Counts ReplicationSender::counts() {
  std::lock_guard<std::mutex> hold(mutex_);
  return {done_ticket_, refused_ticket_, next_ticket_, sync_bytes_, waiting_bytes_, levelling_};
}

// ---------------------------------------------------------------- links

ReplicationSender::Peer& ReplicationSender::peer(const PeerKey& key) { return peers_[key]; }

void ReplicationSender::link(const PeerKey& key, int fd, size_t told) {
  auto made = fd < 0 ? nullptr : std::make_shared<Link>(fd);
  std::lock_guard<std::mutex> hold(mutex_);
  Peer& p = peer(key);
  p.link = std::move(made);
  p.by_python = fd < 0;
  p.told = told;
}

void ReplicationSender::told(const PeerKey& key, size_t tables) {
  std::lock_guard<std::mutex> hold(mutex_);
  peer(key).told = tables;
}

void ReplicationSender::unlink(const PeerKey& key) {
  std::shared_ptr<Link> gone;  // closed without the mutex
  std::lock_guard<std::mutex> hold(mutex_);
  auto found = peers_.find(key);
  if (found == peers_.end()) return;
  gone = std::move(found->second.link);
  found->second.by_python = false;
}

bool ReplicationSender::claim(const PeerKey& key) {
  std::lock_guard<std::mutex> hold(mutex_);
  Peer& p = peer(key);
  p.asked = p.claimed;
  if (p.claimed) return false;
  return p.claimed = true;
}

void ReplicationSender::release(const PeerKey& key) {
  std::lock_guard<std::mutex> hold(mutex_);
  release_locked(key);
}

void ReplicationSender::release_locked(const PeerKey& key) {
  auto found = peers_.find(key);
  if (found == peers_.end()) return;
  found->second.claimed = false;
  if (std::exchange(found->second.asked, false)) poke_locked(key);
  auto stream = streams_.find(key);
  if (stream == streams_.end() || stream->second.queue.empty()) return;
  if (found->second.link || found->second.by_python) {
    for (Waiter* w : waiters_) {
      if (w->woken) continue;
      w->woken = true;  // it carries this as well
      w->changed.notify_one();
      return;
    }
  }
  poke_locked(key);
}

void ReplicationSender::pass_on() {
  for (auto& [key, stream] : streams_) {
    if (stream.queue.empty()) continue;
    auto found = peers_.find(key);
    if (found != peers_.end() && !found->second.claimed) release_locked(key);
  }
}

void ReplicationSender::poke_locked(const PeerKey& key) {
  auto found = peers_.find(key);
  if (found == peers_.end() || found->second.poked) return;
  found->second.poked = true;
  found->second.work.notify_all();
}

void ReplicationSender::poke(const PeerKey& key) {
  std::lock_guard<std::mutex> hold(mutex_);
  poke_locked(key);
}

void ReplicationSender::poke_all() {
  std::lock_guard<std::mutex> hold(mutex_);
  for (auto& [key, p] : peers_) poke_locked(key);
}

void ReplicationSender::wait(const PeerKey& key, double timeout_s) {
  std::unique_lock<std::mutex> hold(mutex_);
  Peer& p = peer(key);
  p.work.wait_for(hold, seconds(timeout_s), [&] { return p.poked || stopping_; });
  p.poked = false;
}

void ReplicationSender::forget(const PeerKey& key) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto found = peers_.find(key);
  if (found != peers_.end() && !found->second.claimed) peers_.erase(found);
}

void ReplicationSender::stop() {
  std::lock_guard<std::mutex> hold(mutex_);
  stopping_ = true;
  for (Waiter* w : waiters_) {
    w->woken = true;
    w->changed.notify_all();
  }
  for (auto& [key, p] : peers_) p.work.notify_all();
  roomy_.notify_all();
}

// ---------------------------------------------------------------- carrying

std::vector<PeerKey> ReplicationSender::drain_locked() {
  std::set<PeerKey> got;
  for (;;) {
    Outbox::Taken taken = store_.outbox().take(kTakeBytes);
    if (taken.entries.empty()) break;
    std::vector<OutItem> entries;
    entries.reserve(taken.entries.size());
    for (const Outbox::Sent& e : taken.entries) {
      OutItem item;
      item.partition = e.partition;
      item.seq = e.seq;
      item.kind = e.kind;
      item.hold = taken.chunk;
      item.data = taken.data + e.offset;
      item.bytes = e.length;
      entries.push_back(std::move(item));
    }
    for (const PeerKey& key : deal(int64_t(taken.first_ticket), entries)) got.insert(key);
  }
  return {got.begin(), got.end()};
}

void ReplicationSender::drain(bool tell) {
  std::lock_guard<std::mutex> hold(mutex_);
  const auto got = drain_locked();
  if (!tell) return;
  for (const PeerKey& key : got) poke_locked(key);
}

void ReplicationSender::drain_idle(double time_s, double idle_s) {
  const auto until = Clock::now() + seconds(time_s);
  for (;;) {
    const double left = std::chrono::duration<double>(until - Clock::now()).count();
    if (left <= 0 || !store_.outbox().wait(left)) return;
    std::this_thread::sleep_for(seconds(idle_s));
    drain(true);
  }
}

std::unique_ptr<ReplicationSender::Flight> ReplicationSender::prepare(const PeerKey& key, Stream& stream, Peer& p) {
  auto flight = std::make_unique<Flight>();
  flight->peer = key;
  flight->link = p.link;
  make_batch(stream, kAppendBytes, kAppendItems, flight->batch);
  const Batch& b = flight->batch;
  wire::Append message;
  message.version = version_;
  message.slot = me_.first;
  message.incarnation = me_.second;
  message.stream = b.stream;
  message.first = b.first;
  message.n_entries = uint32_t(b.items.size());
  message.n_confirmed = uint32_t(b.confirmed.size());
  auto& head = flight->head;
  const size_t header =
      sizeof(message) + b.items.size() * sizeof(wire::Entry) + b.confirmed.size() * sizeof(wire::Confirmed);
  head.resize(sizeof(wire::Preamble) + header);
  uint8_t* at = head.data() + sizeof(wire::Preamble);
  auto add = [&](const auto& x) {
    std::memcpy(at, &x, sizeof(x));
    at += sizeof(x);
  };
  add(message);
  uint64_t body = 0;
  for (const OutItem& i : b.items) {
    add(wire::Entry{i.partition, uint32_t(i.kind), i.seq, i.bytes, i.mirror, i.sync});
    body += i.bytes;
  }
  for (auto& [partition, seq] : b.confirmed) add(wire::Confirmed{partition, seq});
  const wire::Preamble start = wire::preamble(wire::kAppend, head.data() + sizeof(wire::Preamble), header, body);
  std::memcpy(head.data(), &start, sizeof(start));
  return flight;
}

// Sends all, then takes the answers as they come. Lands those that went well; the others are events, still claimed.
void ReplicationSender::fly(std::vector<std::unique_ptr<Flight>>& flights, double timeout_s, std::vector<Event>& events,
                            bool release) {
  const auto until = Clock::now() + seconds(std::max(timeout_s, kLeastAnswer_s));
  auto go_on = [&] {
    if (Clock::now() > until) throw Broken("no answer in time");
  };
  auto end = [&](Flight& f) {
    f.landed = true;
    std::lock_guard<std::mutex> hold(mutex_);
    if (!f.broken.empty()) {
      auto found = peers_.find(f.peer);
      if (found != peers_.end() && found->second.link == f.link) found->second.link.reset();
      events.push_back(Event{f.peer, kBroken, 0, f.broken});
      return;
    }
    const auto& codes = f.answer.header;
    if (f.answer.kind != wire::kAppended) {
      events.push_back(Event{f.peer, kAnswer, f.batch.first, std::string(codes.begin(), codes.end())});
    } else if (!land(f)) {
      events.push_back(Event{f.peer, kCodes, f.batch.first, std::string(codes.begin(), codes.end())});
    } else if (release) {
      release_locked(f.peer);
    }
  };
  auto attempt = [&](Flight& f, auto&& what) {
    try {
      what();
    } catch (const Broken& error) {
      f.broken = error.what();
    }
  };
  for (auto& f : flights) {
    attempt(*f, [&] {
      std::vector<iovec> parts{{f->head.data(), f->head.size()}};
      for (const OutItem& i : f->batch.items) {
        auto* data = const_cast<uint8_t*>(i.data);
        iovec& last = parts.back();
        if (parts.size() > 1 && static_cast<uint8_t*>(last.iov_base) + last.iov_len == data) {
          last.iov_len += i.bytes;
        } else if (i.bytes) {
          parts.push_back({data, i.bytes});
        }
      }
      f->link->socket.send(parts, go_on);
    });
    if (!f->broken.empty()) end(*f);
  }
  std::vector<pollfd> polls;
  std::vector<Flight*> waiting;
  for (;;) {
    polls.clear();
    waiting.clear();
    for (auto& f : flights) {
      if (f->landed) continue;
      polls.push_back({f->link->socket.fd(), POLLIN, 0});
      waiting.push_back(f.get());
    }
    if (waiting.empty()) return;
    const int ready = poll(polls.data(), nfds_t(polls.size()), kTick_ms);
    if (ready < 0 && errno != EINTR) throw std::runtime_error("poll failed");
    for (size_t i = 0; i < waiting.size(); ++i) {
      Flight& f = *waiting[i];
      if (ready > 0 && polls[i].revents) {
        attempt(f, [&] {
          if (!f.link->reader.next(f.answer, go_on)) throw Broken("the peer closed the connection");
          if (f.answer.kind != wire::kAppended && f.answer.kind != wire::kAnswer) throw Broken("not an answer");
          if (f.answer.kind == wire::kAppended && f.answer.header.size() != f.batch.items.size())
            throw Broken("not as many codes as entries");
        });
      } else if (ready <= 0) {
        attempt(f, go_on);
        if (f.broken.empty()) continue;
      } else {
        continue;
      }
      end(f);
    }
  }
}

// False: Python has to hear of it.
bool ReplicationSender::land(Flight& f) {
  const auto& codes = f.answer.header;
  for (uint8_t code : codes) {
    if (code == kRefused || code == kGap || code > kRefused) return false;
  }
  auto stream = streams_.find(f.peer);
  if (stream != streams_.end() && stream->second.number == f.batch.stream)
    answered_locked(f.peer, f.batch.first, codes.data(), codes.size());
  return true;
}

ReplicationSender::Outcome ReplicationSender::carry(int64_t before, int64_t after, double timeout_s,
                                                    std::vector<Event>& events) {
  const auto until = Clock::now() + seconds(timeout_s);
  Waiter me;
  me.after = after;
  std::unique_lock<std::mutex> hold(mutex_);
  auto left = [&] { return std::chrono::duration<double>(until - Clock::now()).count(); };
  Outcome outcome = kLate;
  for (;;) {
    drain_locked();
    if (done_ticket_ >= after && !levelling_) {
      outcome = refused_ticket_ < before ? kConfirmed : kDenied;
      break;
    }
    if (stopping_ || left() <= 0) break;
    const size_t tables = store_.n_tables();
    std::vector<std::unique_ptr<Flight>> flights;
    std::vector<std::pair<PeerKey, Stream*>> ours;
    for (auto& [key, stream] : streams_) {
      if (stream.queue.empty()) continue;
      auto found = peers_.find(key);
      if (found == peers_.end() || found->second.claimed) continue;
      Peer& p = found->second;
      if (p.by_python || (p.link && p.told != tables)) {
        p.claimed = true;
        events.push_back(Event{key, kYours, 0, {}});
      } else if (p.link) {
        ours.emplace_back(key, &stream);
      } else {
        poke_locked(key);
      }
    }
    if (!events.empty()) {
      outcome = kEvents;
      break;
    }
    for (auto& [key, stream] : ours) {
      Peer& p = peers_[key];
      flights.push_back(prepare(key, *stream, p));
      p.claimed = true;
    }
    if (flights.empty()) {
      me.woken = false;
      waiters_.push_back(&me);
      me.changed.wait_for(hold, std::min(seconds(left()), seconds(0.5)), [&] { return me.woken; });
      waiters_.remove(&me);
      continue;
    }
    hold.unlock();
    fly(flights, left(), events, true);
    hold.lock();
    if (!events.empty()) {
      outcome = kEvents;
      break;
    }
  }
  pass_on();
  return outcome;
}

void ReplicationSender::flight(const PeerKey& key, double timeout_s, std::vector<Event>& events) {
  std::vector<std::unique_ptr<Flight>> flights;
  {
    std::lock_guard<std::mutex> hold(mutex_);
    auto stream = streams_.find(key);
    auto found = peers_.find(key);
    if (stream == streams_.end() || found == peers_.end() || stream->second.queue.empty()) return;
    Peer& p = found->second;
    if (!p.link || p.told != store_.n_tables()) {
      events.push_back(Event{key, kYours, 0, {}});
      return;
    }
    flights.push_back(prepare(key, stream->second, p));
  }
  fly(flights, timeout_s, events, false);
}

bool ReplicationSender::room(size_t limit, double timeout_s) {
  std::unique_lock<std::mutex> hold(mutex_);
  ++want_room_;
  const bool there = roomy_.wait_for(hold, seconds(timeout_s), [&] { return stopping_ || waiting() <= limit; });
  --want_room_;
  return there && waiting() <= limit;
}

}  // namespace everstep
