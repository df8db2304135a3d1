// One entry of the outbox: a difference or contents of a partition, as ps send them to each other.
//
// Little-endian, packed, arrays unaligned. Header (32 bytes), marks block, parts. `parse` checks every bound: a blob
// may come from the wire or from a file. The Python twin is everstep/native/blob.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "crc32c.h"
#include "table.h"

namespace everstep {
namespace blob {

constexpr uint32_t kMagic = 0x42535645;  // "EVSB"
constexpr uint16_t kVersion = 2;
constexpr uint32_t kLast = 1;       // flag of a part: contents up to the table's end
constexpr uint32_t kGradients = 2;  // flag of a part of a change: float64 rate, gradients; not what they made
constexpr int kSome = 5;            // of an outbox entry: bodies of single slots, for one peer alone
constexpr uint32_t kNoPartition = 0xffffffff;     // contents of several partitions folded into one
constexpr int64_t kMostCount = int64_t(1) << 62;  // of a seq, clock or watermark: they go on being counted

enum Kind : uint16_t {
  kChange = 1,  // a difference: XOR of what was and what is
  kHeads = 2,   // contents: which slots are used, and their keys
  kBodies = 3,  // contents: records
  kMarks = 4,   // all marks; ends a full sync of contents
};

struct Header {
  uint32_t magic = kMagic;
  uint16_t version = kVersion, kind = 0;
  uint32_t partition = 0, n_parts = 0;
  int64_t seq = 0;
  uint32_t marks_bytes = 0;
  uint32_t crc = 0;  // crc32c of all but this field
};
static_assert(sizeof(Header) == 32, "packed");

// The checksum of whatever has it in the four bytes from `at` on.
inline uint32_t checksum(const uint8_t* data, size_t size, size_t at) {
  return crc32c(data + at + 4, size - at - 4, crc32c(data, at));
}
inline void seal(uint8_t* data, size_t size, size_t at = offsetof(Header, crc)) {
  const uint32_t crc = checksum(data, size, at);
  std::memcpy(data + at, &crc, 4);
}
// Throws Malformed: it is not what was sealed.
inline void check_seal(const uint8_t* data, size_t size, size_t at = offsetof(Header, crc)) {
  uint32_t crc;
  if (size < at + 4) throw Malformed("a blob ends too early");
  std::memcpy(&crc, data + at, 4);
  if (crc != checksum(data, size, at)) throw Malformed("a blob is damaged: its checksum is wrong");
}

struct Mark {
  int64_t shard, watermark, fence;  // watermark -1: the shard's mark is gone
};
static_assert(sizeof(Mark) == 24, "packed");

struct Marks {
  uint64_t fingerprint = 0;
  int64_t clock = 0;
  std::vector<Mark> shards;
  std::vector<uint32_t> initialised;

  size_t bytes() const { return 24 + shards.size() * sizeof(Mark) + initialised.size() * 4; }
};

struct PartHeader {
  uint32_t table = 0, n = 0, lo = 0, hi = 0, flags = 0, n_toggled = 0;
};
static_assert(sizeof(PartHeader) == 24, "packed");

inline size_t bitmap_bytes(size_t n) { return (n + 63) / 64 * 8; }

// Before the gradients of a part of a change by gradients, and before its options, float64 each: none, or kOptions.
struct GradientHeader {
  double rate = 0;
  uint32_t dim = 0, n_options = 0;
};
static_assert(sizeof(GradientHeader) == 16, "packed");

// Bytes of such a part with its header.
inline size_t gradient_part_bytes(size_t n, size_t dim, bool options) {
  return sizeof(PartHeader) + n * 4 + bitmap_bytes(n) + sizeof(GradientHeader) + (options ? sizeof(Options) : 0) +
         n * dim * sizeof(float);
}

// Bytes of a part with its header.
inline size_t part_bytes(Kind kind, size_t n, size_t n_toggled, size_t record_bytes) {
  const size_t rest = kind == kChange  ? bitmap_bytes(n) + n_toggled * 8 + n * record_bytes
                      : kind == kHeads ? n * 8
                                       : n * record_bytes;
  return sizeof(PartHeader) + n * 4 + rest;
}

// A part inside of a parsed blob; the pointers are unaligned, read them with the functions.
struct Part {
  PartHeader head;
  const Table* table = nullptr;
  const uint8_t* slots = nullptr;
  const uint8_t* toggled = nullptr;    // CHANGE: bitmap over the n slots
  const uint8_t* keys = nullptr;       // CHANGE: of the n_toggled, XOR; HEADS: of the n
  const uint8_t* records = nullptr;    // CHANGE: XOR, null if by gradients; BODIES
  const uint8_t* gradients = nullptr;  // CHANGE: float32 [n, dim] of one update of the n rows at `rate`
  double rate = 0;
  bool has_options = false;
  Options options;

  uint32_t slot(size_t i) const { return read<uint32_t>(slots + i * 4); }
  int64_t key(size_t i) const { return read<int64_t>(keys + i * 8); }
  bool is_toggled(size_t i) const { return toggled[i >> 3] >> (i & 7) & 1; }
  const uint8_t* record(size_t i) const { return records + i * table->record_bytes; }

  template <class T>
  static T read(const uint8_t* at) {
    T x;
    std::memcpy(&x, at, sizeof(T));
    return x;
  }
};

struct Blob {
  Header head;
  Marks marks;
  std::vector<Part> parts;
};

// Writes a blob into memory of the right size.
class Writer {
 public:
  explicit Writer(uint8_t* at) : at_(at) {}

  template <class T>
  void put(const T& x) {
    std::memcpy(at_, &x, sizeof(T));
    at_ += sizeof(T);
  }
  // The next n bytes, for the caller to fill.
  uint8_t* skip(size_t n) {
    uint8_t* at = at_;
    at_ += n;
    return at;
  }
  void put_marks(const Marks& m) {
    put(m.fingerprint);
    put(m.clock);
    put(uint32_t(m.shards.size()));
    put(uint32_t(m.initialised.size()));
    for (const Mark& mark : m.shards) put(mark);
    for (uint32_t table : m.initialised) put(table);
  }
  const uint8_t* at() const { return at_; }

 private:
  uint8_t* at_;
};

inline std::vector<uint8_t> marks_blob(uint32_t partition, int64_t seq, const Marks& marks) {
  Header head;
  head.kind = kMarks;
  head.partition = partition;
  head.seq = seq;
  head.marks_bytes = uint32_t(marks.bytes());
  std::vector<uint8_t> out(sizeof(Header) + marks.bytes());
  Writer w(out.data());
  w.put(head);
  w.put_marks(marks);
  seal(out.data(), out.size());
  return out;
}

// Reads a blob whose memory outlives the answer. `table_of(id)` gives the Table, or throws Malformed. Throws Malformed
// on anything that a Writer would not write, and on a wrong checksum unless that was `checked` before.
template <class TableOf>
Blob parse(const uint8_t* data, size_t size, TableOf&& table_of, bool checked = false) {
  size_t left = size;
  const uint8_t* at = data;
  auto wrong = [](const std::string& what) { throw Malformed("a blob " + what); };
  auto take = [&](size_t n) {
    if (n > left) wrong("ends too early");
    const uint8_t* from = at;
    at += n;
    left -= n;
    return from;
  };
  Blob out;
  std::memcpy(&out.head, take(sizeof(Header)), sizeof(Header));
  const Header& head = out.head;
  if (head.magic != kMagic || head.version != kVersion) wrong("does not begin as one of this version");
  if (!checked) check_seal(data, size);
  if (head.kind < kChange || head.kind > kMarks) wrong("is of no known kind");
  if (head.seq < 0 || head.seq > kMostCount) wrong("has a seq that cannot be");
  const Kind kind = Kind(head.kind);
  if (kind == kMarks && head.n_parts) wrong("of marks has parts");

  const uint8_t* m = take(head.marks_bytes);
  if (head.marks_bytes < 24) wrong("has no marks");
  out.marks.fingerprint = Part::read<uint64_t>(m);
  out.marks.clock = Part::read<int64_t>(m + 8);
  const uint64_t n_shards = Part::read<uint32_t>(m + 16), n_initialised = Part::read<uint32_t>(m + 20);
  if (head.marks_bytes != 24 + n_shards * sizeof(Mark) + n_initialised * 4) wrong("has marks of another size");
  if (out.marks.clock < 0 || out.marks.clock > kMostCount) wrong("has a clock that cannot be");
  out.marks.shards.resize(n_shards);
  if (n_shards) std::memcpy(out.marks.shards.data(), m + 24, n_shards * sizeof(Mark));
  for (const Mark& mark : out.marks.shards) {
    const bool gone = kind == kChange && mark.watermark == -1;
    if (mark.shard < 0 || mark.fence < 0 || (mark.watermark < 0 && !gone)) wrong("has a mark with a negative number");
    if (mark.watermark > kMostCount) wrong("has a mark that cannot be");
  }
  out.marks.initialised.resize(n_initialised);
  if (n_initialised) std::memcpy(out.marks.initialised.data(), m + 24 + n_shards * sizeof(Mark), n_initialised * 4);

  for (uint32_t p = 0; p < head.n_parts; ++p) {
    Part part;
    std::memcpy(&part.head, take(sizeof(PartHeader)), sizeof(PartHeader));
    const PartHeader& h = part.head;
    part.table = table_of(h.table);
    if (!part.table) wrong("has a part where none can be");
    const bool by_gradients = kind == kChange && h.flags == kGradients;
    if (h.flags & ~kLast && !by_gradients) wrong("has unknown flags");
    part.slots = take(size_t(h.n) * 4);
    if (kind == kChange) {
      if (h.n_toggled > h.n || h.lo || h.hi || (h.flags && (!by_gradients || h.n_toggled || !part.table->dense)))
        wrong("of a change has a wrong part");
      part.toggled = take(bitmap_bytes(h.n));
      size_t toggled = 0;
      for (size_t i = 0; i < bitmap_bytes(h.n); i += 8) {
        const uint64_t word = Part::read<uint64_t>(part.toggled + i);
        toggled += size_t(__builtin_popcountll(word));
        if (h.n - i * 8 < 64 && word >> (h.n - i * 8)) wrong("toggles rows that it does not have");
      }
      if (toggled != h.n_toggled) wrong("toggles another number of rows than it says");
      part.keys = take(size_t(h.n_toggled) * 8);
      if (by_gradients) {
        const auto g = Part::read<GradientHeader>(take(sizeof(GradientHeader)));
        if (g.dim != part.table->dim) wrong("of a change has gradients of another width");
        if (g.n_options && g.n_options != kOptions) wrong("of a change has another number of options");
        part.rate = g.rate;
        if (g.n_options) {
          part.options = Part::read<Options>(take(sizeof(Options)));
          part.has_options = true;
          with_options(part.table->optimizer, part.options);  // throws where it cannot go by them
        }
        part.gradients = take(size_t(h.n) * g.dim * sizeof(float));
      } else {
        part.records = take(size_t(h.n) * part.table->record_bytes);
      }
    } else {
      if (h.n_toggled || h.lo > h.hi) wrong("of contents has a wrong part");
      if (kind == kHeads) {
        part.keys = take(size_t(h.n) * 8);
      } else {
        part.records = take(size_t(h.n) * part.table->record_bytes);
      }
    }
    const bool listed = kind == kBodies && h.lo == 0 && h.hi == 0;
    for (uint32_t i = 0; i < h.n; ++i) {
      const uint32_t slot = part.slot(i);
      if (slot >= 0xff000000u) wrong("has a slot that cannot be");
      if (kind == kChange || listed) continue;
      if (slot < h.lo || (!(h.flags & kLast) && slot >= h.hi)) wrong("has a slot outside of what it covers");
      if (i && slot <= part.slot(i - 1)) wrong("has slots that do not ascend");
    }
    out.parts.push_back(part);
  }
  if (left) wrong("goes on after its end");
  return out;
}

// The marks alone; of a blob of any other kind nothing is looked at. Throws Malformed.
inline Blob parse_marks(const uint8_t* data, size_t size) {
  Header head;
  if (size < sizeof(head)) throw Malformed("a blob ends too early");
  std::memcpy(&head, data, sizeof(head));
  if (head.kind != kMarks)
    throw Malformed("these are not the marks of a partition: a blob of kind " + std::to_string(head.kind));
  return parse(data, size, [](uint32_t) -> const Table* { return nullptr; });
}

}  // namespace blob
}  // namespace everstep
