#include "wire.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/socket.h>
#include <unistd.h>

#include <fcntl.h>

#include "crc32c.h"

namespace everstep {
namespace wire {

namespace {

constexpr size_t kAhead = size_t(16) << 10;
constexpr size_t kKeep = size_t(64) << 20;  // a buffer that grew beyond this is not kept for the next frame
constexpr size_t kMostParts = 512;          // below the kernel's 1024

[[noreturn]] void gone() { throw Broken(std::string("the peer is gone: ") + std::strerror(errno)); }

uint16_t check_of(const Preamble& p) {
  const auto* at = reinterpret_cast<const uint8_t*>(&p);
  return uint16_t(crc32c(at + 8, 12, crc32c(at, 6)));
}

uint32_t crc_of(const Preamble& p, const uint8_t* header, size_t header_bytes) {
  return crc32c(header, header_bytes, crc32c(&p, sizeof(p) - sizeof(p.crc)));
}

}  // namespace

Preamble preamble(uint8_t kind, const uint8_t* header, size_t header_bytes, uint64_t body_bytes) {
  Preamble p;
  p.kind = kind;
  p.header_bytes = uint32_t(header_bytes);
  p.body_bytes = body_bytes;
  p.check = check_of(p);
  p.crc = crc_of(p, header, header_bytes);
  return p;
}

Socket::Socket(int fd) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
  if (fd_ < 0) gone();
}

Socket::~Socket() { close(fd_); }

bool Socket::send_some(std::vector<iovec>& parts, size_t& at) {
  msghdr message{};
  message.msg_iov = parts.data() + at;
  message.msg_iovlen = std::min(parts.size() - at, kMostParts);
  const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
  if (sent < 0) {
    if (errno == EINTR) return true;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    gone();
  }
  size_t left = size_t(sent);
  while (at < parts.size() && left >= parts[at].iov_len) left -= parts[at++].iov_len;
  if (left) {
    parts[at].iov_base = static_cast<uint8_t*>(parts[at].iov_base) + left;
    parts[at].iov_len -= left;
  }
  return true;
}

int64_t Socket::receive(uint8_t* to, size_t most, bool all) {
  for (;;) {
    const ssize_t got = recv(fd_, to, most, all ? MSG_WAITALL : 0);
    if (got >= 0) return got;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return -1;
    if (errno != EINTR) gone();
  }
}

Reader::Reader(Socket& socket, std::string ahead) : socket_(socket), ahead_(std::max(kAhead, ahead.size())) {
  std::memcpy(ahead_.data(), ahead.data(), ahead.size());
  end_ = ahead.size();
}

void Reader::take(uint8_t* to, size_t n) {
  if (n) std::memcpy(to, ahead_.data() + start_, n);
  start_ += n;
  if (start_ == end_) start_ = end_ = 0;
}

int64_t Reader::receive_ahead() {
  if (start_) {
    std::memmove(ahead_.data(), ahead_.data() + start_, end_ - start_);
    end_ -= start_;
    start_ = 0;
  }
  const int64_t got = socket_.receive(ahead_.data() + end_, ahead_.size() - end_, false);
  if (got > 0) end_ += size_t(got);
  return got;
}

void Reader::begin(const Preamble& p, Frame& frame) {
  if (std::memcmp(p.magic, Preamble().magic, 4) != 0 || p.kind < kRequest || p.kind > kAppended)
    throw Broken("not a frame of the data plane");
  if (p.header_bytes > kMostHeader || p.body_bytes > kMostBody)
    throw Broken("a frame of " + std::to_string(p.header_bytes) + " + " + std::to_string(p.body_bytes) +
                 " bytes was announced: too large");
  if (p.check != check_of(p)) throw Broken("a frame is damaged: the check of its lengths is wrong");
  frame.kind = p.kind;
  frame.flags = p.flags;
  frame.header.resize(p.header_bytes);
  frame.body_bytes = size_t(p.body_bytes);
  if (room_ < frame.body_bytes || (room_ > kKeep && frame.body_bytes <= kKeep)) {
    room_ = 0;
    body_.reset();
    size_t room = kAhead;
    while (room < frame.body_bytes) room *= 2;
    body_.reset(new uint8_t[room]);
    room_ = room;
  }
  frame.body = body_.get();
}

void Reader::check(const Preamble& p, const Frame& frame) const {
  uint32_t crc = crc_of(p, frame.header.data(), frame.header.size());
  if (frame.kind != kAppend) crc = crc32c(frame.body, frame.body_bytes, crc);
  if (p.crc != crc) throw Broken("a frame is damaged: its checksum is wrong");
}

}  // namespace wire
}  // namespace everstep
