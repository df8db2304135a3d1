// What a ps owes to the mirrors of its partitions, and who brings it there.
//
// The first half is everstep/protect/replication.py once more, which is its oracle and says what everything means. The
// second sends: a peer life has a link (a connection that Python made), and one thread at a time, who has *claimed* it,
// sends a batch there and takes the answer. Who waits for the mirrors carries: it sends to every peer that nobody has
// claimed. Thread-safe; nobody waits for the network with the mutex. Lock order: this mutex > the outbox's.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "replication_receiver.h"
#include "outbox.h"
#include "store.h"
#include "wire.h"

namespace everstep {

struct OutItem {
  int64_t ticket = -1;  // -1: not of the outbox
  uint32_t partition = 0;
  int64_t seq = 0;
  int kind = 0;
  int64_t mirror = 0, sync = 0;
  std::shared_ptr<const void> hold;  // what `data` lies in
  const uint8_t* data = nullptr;
  size_t bytes = 0;
};

struct SyncTarget {
  PeerKey peer;
  int64_t mirror = 0, sync = 0;
};

class ReplicationSender {
 public:
  enum Code : uint8_t { kApplied, kRepeat, kGap, kNoMirror, kRefused };
  enum Outcome { kLate, kConfirmed, kDenied, kEvents };
  enum EventKind { kCodes, kAnswer, kBroken, kYours };
  // Something of a peer that Python has to see to; it is claimed until `release`. `payload`: the codes, an answer's
  // header, what is wrong. kYours: send to it, this one's link is Python's.
  struct Event {
    PeerKey peer;
    EventKind kind;
    int64_t first;
    std::string payload;
  };
  struct Batch {
    int64_t stream = 0, first = 0;
    std::vector<OutItem> items;
    std::vector<std::pair<int64_t, int64_t>> confirmed;
  };

  ReplicationSender(Store& store, PeerKey me) : store_(store), me_(me) {}

  // ------------------------------------------------ streams
  void set_route(uint32_t partition, std::vector<PeerKey> peers);
  void set_version(int64_t version);
  void sync(uint32_t partition, int64_t from_ticket, const std::vector<SyncTarget>& targets);
  void widen(uint32_t partition, int64_t from_ticket, const SyncTarget& target);
  void end_syncs(uint32_t partition);
  void some(uint32_t partition, const SyncTarget& target);
  // Entries that must come in order; the peers that got something. Throws std::logic_error.
  std::vector<PeerKey> append(int64_t first_ticket, const std::vector<OutItem>& entries);
  void send(const PeerKey& peer, OutItem item);
  bool batch(const PeerKey& peer, size_t max_bytes, size_t max_items, Batch& out);
  bool waits(const PeerKey& peer);
  std::map<int64_t, int64_t> answered(const PeerKey& peer, int64_t first, const std::string& codes);
  void live(const std::vector<PeerKey>& peers, int64_t version);
  std::vector<PeerKey> peers();
  bool owes(uint32_t partition);
  struct Counts {
    int64_t done_ticket, refused_ticket, next_ticket, sync_bytes, waiting_bytes, levelling;
  };
  Counts counts();

  // ------------------------------------------------ links
  // Of a plain socket: `fd` is duplicated. `told`: tables (Store::n_tables) that the peer heard of. fd -1: Python
  // sends.
  void link(const PeerKey& peer, int fd, size_t told);
  void told(const PeerKey& peer, size_t tables);
  void unlink(const PeerKey& peer);
  bool claim(const PeerKey& peer);
  void release(const PeerKey& peer);
  // Its thread has something to do.
  void poke(const PeerKey& peer);
  void poke_all();
  // Until poked, or `timeout_s`.
  void wait(const PeerKey& peer, double timeout_s);
  void forget(const PeerKey& peer);
  // Nobody waits any more.
  void stop();

  // ------------------------------------------------ carrying
  // Deals out what the outbox holds; `tell`: and pokes.
  void drain(bool tell);
  // For `time_s`: deals out, and tells, what lies there for `idle_s`: who pushes carries its own.
  void drain_idle(double time_s, double idle_s);
  // Until all mirrors have what the outbox held up to ticket `after`, sending it. Denied: refused from `before` on.
  Outcome carry(int64_t before, int64_t after, double timeout_s, std::vector<Event>& events);
  // One batch to a peer that the caller has claimed; nothing if nothing waits.
  void flight(const PeerKey& peer, double timeout_s, std::vector<Event>& events);
  // Until not more than `limit` bytes wait; false: too late.
  bool room(size_t limit, double timeout_s);

 private:
  struct Link {
    explicit Link(int fd) : socket(fd), reader(socket) {}
    wire::Socket socket;
    wire::Reader reader;
  };
  struct Peer {
    std::condition_variable work;
    bool poked = false, claimed = false, by_python = false;
    bool asked = false;  // its thread found it claimed: to be poked
    std::shared_ptr<Link> link;
    size_t told = 0;
  };
  struct Stream {
    int64_t number = 0, first = 0;
    std::deque<OutItem> queue;
    std::map<int64_t, int64_t> confirmed;
  };
  struct Waiter {
    std::condition_variable changed;
    bool woken = false;
    int64_t after = 0;
  };
  struct Flight;
  using Synced = std::vector<std::pair<int64_t, SyncTarget>>;  // since which ticket, who

  void put(const PeerKey& peer, OutItem item);
  void settle(const OutItem& item);
  void advance();
  std::vector<PeerKey> deal(int64_t first_ticket, const std::vector<OutItem>& entries);
  std::vector<PeerKey> drain_locked();
  Peer& peer(const PeerKey& key);
  void poke_locked(const PeerKey& key);
  void release_locked(const PeerKey& key);
  void pass_on();
  bool make_batch(Stream& stream, size_t max_bytes, size_t max_items, Batch& out);
  std::map<int64_t, int64_t> answered_locked(const PeerKey& peer, int64_t first, const uint8_t* codes, size_t n);
  std::unique_ptr<Flight> prepare(const PeerKey& key, Stream& stream, Peer& peer);
  void fly(std::vector<std::unique_ptr<Flight>>& flights, double timeout_s, std::vector<Event>& events, bool release);
  bool land(Flight& flight);
  size_t waiting() const { return size_t(waiting_bytes_) + store_.outbox().bytes(); }

  Store& store_;
  const PeerKey me_;
  std::mutex mutex_;
  int64_t version_ = 0;
  std::unordered_map<uint32_t, std::vector<PeerKey>> routes_;
  int64_t done_ticket_ = 0, refused_ticket_ = -1, next_ticket_ = 0;
  int64_t sync_bytes_ = 0, waiting_bytes_ = 0, levelling_ = 0;
  std::map<PeerKey, Stream> streams_;
  std::deque<int> pending_;  // answers that the tickets from done_ticket_ on lack
  std::unordered_map<uint32_t, int64_t> owed_;
  std::map<int64_t, std::pair<uint32_t, int64_t>> several_;
  std::unordered_map<uint32_t, std::deque<Synced>> syncs_;
  std::unordered_map<uint32_t, std::deque<SyncTarget>> some_;
  std::map<PeerKey, Peer> peers_;
  std::list<Waiter*> waiters_;
  std::condition_variable roomy_;
  int want_room_ = 0;
  bool stopping_ = false;
};

}  // namespace everstep
