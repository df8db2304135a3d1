// What other ps append to the mirrors here, as far as it goes without saying: the differences that come next in a
// stream, of partitions whose source the sender is; they are kept for other mirrors of theirs. Everything else is for
// the machine (everstep/protect/machine.py), which also says, with the gate held alone, what goes without saying.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gate.h"
#include "store.h"
#include "wire.h"

namespace everstep {

using PeerKey = std::pair<int64_t, int64_t>;  // slot, incarnation

class ReplicationReceiver {
 public:
  struct Source {
    PeerKey sender;
    std::vector<uint64_t> mirrors;
    bool several = false;  // there are others elsewhere: what is applied is kept for them
  };
  explicit ReplicationReceiver(Store& store) : store_(store) {}

  Gate& gate() { return gate_; }
  // With the gate held alone. Partitions that are not named are the machine's, whoever sends them.
  void publish(int64_t version, std::unordered_map<uint32_t, Source> sources) {
    version_ = version;
    sources_ = std::move(sources);
  }
  // Stream, and number of the next entry in it.
  std::pair<int64_t, int64_t> received(const PeerKey& sender);
  void set_received(const PeerKey& sender, std::pair<int64_t, int64_t> next);
  void forget(const PeerKey& sender);
  std::vector<PeerKey> senders();
  // Held, inside of the gate, for the time of a message: two of one sender never at once.
  std::mutex& one_at_a_time(const PeerKey& sender);

  // The retained log: protect/retained_log.py.
  void retain(uint32_t partition, int64_t seq, const uint8_t* data, size_t size);
  void confirm_retained(uint32_t partition, int64_t seq);
  std::vector<std::pair<int64_t, std::shared_ptr<const std::vector<uint8_t>>>> retained_after(uint32_t partition,
                                                                                              int64_t seq);
  void drop_retained(uint32_t partition);
  void drop_all_retained();

  // Applies the entries of a APPEND. False: it is for the machine, from the beginning.
  bool follow(const wire::Frame& frame, std::vector<uint8_t>& codes);

 private:
  Store& store_;
  Gate gate_;
  int64_t version_ = -1;                          // gate
  std::unordered_map<uint32_t, Source> sources_;  // gate
  std::mutex mutex_;                              // of what follows; innermost
  std::map<PeerKey, std::pair<int64_t, int64_t>> received_;
  std::map<PeerKey, std::unique_ptr<std::mutex>> senders_;
  std::unordered_map<uint32_t, std::deque<std::pair<int64_t, std::shared_ptr<const std::vector<uint8_t>>>>> retained_;
};

}  // namespace everstep
