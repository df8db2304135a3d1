// For the members of a group (mode allreduce): the sum and the check of reduced gradients, and one exchange of a few
// bytes with every peer. Both are waits of the script's thread in every step.
#include "group_module.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace everstep {

namespace {

// ---------------------------------------------------------------- digests

constexpr size_t kBlock = 4096;  // bytes that are added up, and then checked, while they are in the nearest cache

// Of n bytes: the sum of their 64-bit words (the last one filled up with zeros), and whether any element of type U has
// all the bits of `exponent` set. Only called by functions compiled for one kind of processor each.
template <class U>
__attribute__((always_inline)) inline std::pair<uint64_t, bool> sum_words(const uint8_t* p, size_t n, U exponent) {
  uint64_t sum = 0;
  U bad = 0;
  for (; n >= kBlock; p += kBlock, n -= kBlock) {
    const auto* words = reinterpret_cast<const uint64_t*>(p);
    const auto* elements = reinterpret_cast<const U*>(p);
    for (size_t i = 0; i < kBlock / sizeof(uint64_t); ++i) sum += words[i];
    for (size_t i = 0; i < kBlock / sizeof(U); ++i) bad |= U((elements[i] & exponent) == exponent);
  }
  const auto* elements = reinterpret_cast<const U*>(p);
  for (size_t i = 0; i < n / sizeof(U); ++i) bad |= U((elements[i] & exponent) == exponent);
  for (; n; p += std::min<size_t>(n, 8), n -= std::min<size_t>(n, 8)) {
    uint64_t word = 0;
    std::memcpy(&word, p, std::min<size_t>(n, 8));
    sum += word;
  }
  return {sum, bad != 0};
}

using Sum = std::pair<uint64_t, bool>;

__attribute__((always_inline)) inline Sum sum_kind(const uint8_t* p, size_t n, int kind) {
  switch (kind) {
    case 0:
      return sum_words<uint32_t>(p, n, 0x7f800000u);
    case 1:
      return sum_words<uint64_t>(p, n, 0x7ff0000000000000u);
    case 2:
      return sum_words<uint16_t>(p, n, 0x7c00u);
    default:
      return sum_words<uint16_t>(p, n, 0x7f80u);
  }
}

Sum sum_base(const uint8_t* p, size_t n, int kind) { return sum_kind(p, n, kind); }

#if defined(__x86_64__) || defined(_M_X64)
__attribute__((target("avx2"))) Sum sum_avx2(const uint8_t* p, size_t n, int kind) { return sum_kind(p, n, kind); }
#endif

Sum sum_bits(nb::handle data, const std::string& dtype) {
  const std::vector<std::string> kinds = {"float32", "float64", "float16", "bfloat16"};
  const auto at = std::find(kinds.begin(), kinds.end(), dtype);
  if (at == kinds.end())
    throw std::invalid_argument("dtype " + dtype + ": must be float32, float64, float16 or bfloat16");
  const int kind = int(at - kinds.begin());
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
  const auto* p = static_cast<const uint8_t*>(view.buf);
  if (reinterpret_cast<uintptr_t>(p) % 8) {
    PyBuffer_Release(&view);
    throw std::invalid_argument("the memory does not begin at a multiple of 8 bytes");
  }
  Sum found;
  {
    nb::gil_scoped_release free;
#if defined(__x86_64__) || defined(_M_X64)
    static const bool wide = __builtin_cpu_supports("avx2");
    found = wide ? sum_avx2(p, size_t(view.len), kind) : sum_base(p, size_t(view.len), kind);
#else
    found = sum_base(p, size_t(view.len), kind);
#endif
  }
  PyBuffer_Release(&view);
  return {found.first, !found.second};
}

// ---------------------------------------------------------------- a few bytes to and from everybody

using Clock = std::chrono::steady_clock;

struct Peer {
  int fd;
  size_t sent = 0, heard = 0;
  bool stuck = false;  // closed, or an error: the caller finds out which
};

void send_all(std::vector<Peer>& peers, const char* mine, size_t n) {
  for (Peer& peer : peers) {
    const ssize_t went = send(peer.fd, mine, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    peer.sent = went > 0 ? size_t(went) : 0;
    peer.stuck = peer.sent != n;
  }
}

// Takes what there is; whether all have said all, or one is stuck.
bool take(std::vector<Peer>& peers, char* heard, size_t size) {
  bool all = true;
  for (size_t i = 0; i < peers.size(); ++i) {
    Peer& peer = peers[i];
    while (peer.heard < size && !peer.stuck) {
      const ssize_t got = recv(peer.fd, heard + i * size + peer.heard, size - peer.heard, MSG_DONTWAIT);
      if (got > 0) {
        peer.heard += size_t(got);
      } else if (got < 0 && errno == EINTR) {
        continue;
      } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        break;
      } else {
        peer.stuck = true;
      }
    }
    if (peer.stuck) return true;
    all = all && peer.heard == size;
  }
  return all;
}

void hear(std::vector<Peer>& peers, char* heard, size_t size, int64_t spin_us, int64_t wait_ms) {
  const auto begun = Clock::now();
  const auto awake = begun + std::chrono::microseconds(spin_us), end = begun + std::chrono::milliseconds(wait_ms);
  std::vector<pollfd> polls;
  while (!take(peers, heard, size)) {
    const auto now = Clock::now();
    if (now < awake) {
      sched_yield();  // whoever we wait for may want this core
      continue;
    }
    if (now >= end) return;
    // Woken by the first one that is missing, and not by each: what the others say meanwhile is taken together. Of
    // those only the end counts.
    polls.clear();
    for (const Peer& peer : peers) {
      if (peer.heard < size) polls.push_back({peer.fd, short(polls.empty() ? POLLIN : POLLRDHUP), 0});
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - now).count() + 1;
    if (poll(polls.data(), nfds_t(polls.size()), int(left)) < 0) return;  // a signal: the caller's turn
  }
}

std::vector<Peer> peers_at(const std::vector<int>& fds) {
  std::vector<Peer> peers;
  peers.reserve(fds.size());
  for (const int fd : fds) peers.push_back({fd});
  return peers;
}

nb::list sent_to(const std::vector<Peer>& peers) {
  nb::list sent;
  for (const Peer& peer : peers) sent.append(peer.sent);
  return sent;
}

nb::list came_from(const std::vector<Peer>& peers, const char* heard, size_t size) {
  nb::list came;
  for (size_t i = 0; i < peers.size(); ++i) came.append(nb::bytes(heard + i * size, peers[i].heard));
  return came;
}

// Sends `mine` to every socket and reads as many bytes of each: for each how many went and what came. Less than all
// where one would block, is closed, fails, or nothing more came within wait_ms; what then is the caller's to find out.
nb::tuple talk(const std::vector<int>& fds, const nb::bytes& mine, int64_t spin_us, int64_t wait_ms) {
  const size_t size = mine.size();
  std::vector<Peer> peers = peers_at(fds);
  std::vector<char> heard(size * fds.size());
  {
    const char* said = mine.c_str();
    nb::gil_scoped_release free;
    send_all(peers, said, size);
    hear(peers, heard.data(), size, spin_us, wait_ms);
  }
  return nb::make_tuple(sent_to(peers), came_from(peers, heard.data(), size));
}

// The first half of it: for each socket how many bytes went.
nb::list tell(const std::vector<int>& fds, const nb::bytes& mine) {
  std::vector<Peer> peers = peers_at(fds);
  {
    const char* said = mine.c_str();
    nb::gil_scoped_release free;
    send_all(peers, said, mine.size());
  }
  return sent_to(peers);
}

// The second half of it: `size` bytes of each, as far as they come.
nb::list listen_to(const std::vector<int>& fds, size_t size, int64_t spin_us, int64_t wait_ms) {
  std::vector<Peer> peers = peers_at(fds);
  std::vector<char> heard(size * fds.size());
  {
    nb::gil_scoped_release free;
    hear(peers, heard.data(), size, spin_us, wait_ms);
  }
  return came_from(peers, heard.data(), size);
}

}  // namespace

void bind_group(nb::module_& m) {
  m.def("sum_bits", &sum_bits, nb::arg("data"), nb::arg("dtype"));
  m.def("tell", &tell, nb::arg("fds"), nb::arg("mine"));
  m.def("hear", &listen_to, nb::arg("fds"), nb::arg("size"), nb::arg("spin_us"), nb::arg("wait_ms"));
  m.def("talk", &talk, nb::arg("fds"), nb::arg("mine"), nb::arg("spin_us"), nb::arg("wait_ms"));
}

}  // namespace everstep
