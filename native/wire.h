// Frames of the data plane on a plain socket, as everstep/net/frames.py has them, and the two that only ps send to each
// other: APPEND (entries of a stream, net/append_frames.py is the twin) and APPENDED (a code for each).
//
// The checksum of a APPEND covers all but its body: every entry there has its own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <sys/uio.h>

namespace everstep {

// The connection does not hold: the peer is gone, or sent what nobody should.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace wire {

constexpr uint8_t kRequest = 5, kAnswer = 6, kAppend = 7, kAppended = 8;
constexpr uint64_t kMostHeader = uint64_t(1) << 20, kMostBody = uint64_t(1) << 30;  // frames.DATA_LIMITS

#pragma pack(push, 1)
struct Preamble {
  char magic[4] = {'E', 'S', 'F', '2'};
  uint8_t kind = 0, flags = 0;
  uint16_t check = 0;
  uint32_t header_bytes = 0;
  uint64_t body_bytes = 0;
  uint32_t crc = 0;
};
struct Append {
  int64_t version = 0, slot = 0, incarnation = 0, stream = 0, first = 0;
  uint32_t n_entries = 0, n_confirmed = 0;
};
struct Entry {
  uint32_t partition = 0, kind = 0;
  int64_t seq = 0;
  uint64_t bytes = 0;
  int64_t mirror = 0, sync = 0;
};
struct Confirmed {
  int64_t partition = 0, seq = 0;
};
#pragma pack(pop)
static_assert(sizeof(Preamble) == 24 && sizeof(Append) == 48 && sizeof(Entry) == 40 && sizeof(Confirmed) == 16,
              "packed");

struct Frame {
  uint8_t kind = 0, flags = 0;
  std::vector<uint8_t> header;
  uint8_t* body = nullptr;  // good until the next frame is read
  size_t body_bytes = 0;
};

// Sealed, of a frame without a body or of a APPEND.
Preamble preamble(uint8_t kind, const uint8_t* header, size_t header_bytes, uint64_t body_bytes);

// A descriptor of its own for a socket that others may close.
class Socket {
 public:
  explicit Socket(int fd);  // throws Broken
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }
  // All of it; a time-out of the socket is asked `go_on()`, which may throw.
  template <class GoOn>
  void send(std::vector<iovec>& parts, GoOn&& go_on) {
    size_t at = 0;
    while (at < parts.size()) {
      if (!send_some(parts, at) || at < parts.size()) go_on();  // a peer that takes a byte a second is none either
    }
  }
  // At least one byte and at most `most`, `all`: all of them unless a time-out comes before; 0: the end, -1: a
  // time-out.
  int64_t receive(uint8_t* to, size_t most, bool all);

 private:
  bool send_some(std::vector<iovec>& parts, size_t& at);  // false: a time-out

  int fd_;
};

// Reads frames of any kind; checks all but the bodies of APPENDs.
class Reader {
 public:
  // `ahead`: what somebody else read of the first frame.
  Reader(Socket& socket, std::string ahead = {});
  // False: the peer closed the connection between two frames. Throws Broken. `go_on()`: after a time-out.
  template <class GoOn>
  bool next(Frame& frame, GoOn&& go_on) {
    if (!fill(sizeof(Preamble), true, go_on)) return false;
    Preamble start;
    take(reinterpret_cast<uint8_t*>(&start), sizeof(start));
    begin(start, frame);
    read(frame.header.data(), frame.header.size(), go_on);
    if (frame.body_bytes) read(frame.body, frame.body_bytes, go_on);
    check(start, frame);
    return true;
  }

 private:
  void begin(const Preamble& start, Frame& frame);
  void check(const Preamble& start, const Frame& frame) const;
  void take(uint8_t* to, size_t n);
  template <class GoOn>
  bool fill(size_t need, bool boundary, GoOn&& go_on) {
    while (end_ - start_ < need) {
      const int64_t n = receive_ahead();
      if (n > 0) continue;
      if (n < 0) {
        go_on();
      } else if (boundary && end_ == start_) {
        return false;
      } else {
        throw Broken("the peer closed the connection within a frame");
      }
    }
    return true;
  }
  template <class GoOn>
  void read(uint8_t* to, size_t n, GoOn&& go_on) {
    const size_t here = end_ - start_ < n ? end_ - start_ : n;
    take(to, here);
    for (size_t at = here; at < n;) {
      const int64_t got = socket_.receive(to + at, n - at, true);
      if (!got) throw Broken("the peer closed the connection within a frame");
      if (got > 0) at += size_t(got);
      if (at < n) go_on();
    }
  }
  int64_t receive_ahead();

  Socket& socket_;
  std::vector<uint8_t> ahead_;
  size_t start_ = 0, end_ = 0;
  std::unique_ptr<uint8_t[]> body_;
  size_t room_ = 0;
};

}  // namespace wire
}  // namespace everstep
