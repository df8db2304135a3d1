// A difference on its way into the outbox: laid out at its full size first (that can fail), then filled, then
// committed.
#pragma once
#include <cstring>
#include <vector>

#include "blob.h"
#include "partition_rows.h"
#include "outbox.h"

namespace everstep {

class Change {
 public:
  struct Shape {
    const Table* table;
    size_t n, n_toggled;
    bool by_gradients = false, options = false;
  };
  // Where the arrays of a part go.
  struct Place {
    uint8_t *slots, *toggled, *keys, *records;
    size_t next_key;
  };

  explicit Change(Outbox& outbox) : outbox_(outbox) {}

  void lay_out(uint32_t partition, int64_t seq, const blob::Marks& marks, const std::vector<Shape>& shapes) {
    size_t bytes = sizeof(blob::Header) + marks.bytes();
    for (const Shape& s : shapes)
      bytes += s.by_gradients ? blob::gradient_part_bytes(s.n, s.table->dim, s.options)
                              : blob::part_bytes(blob::kChange, s.n, s.n_toggled, s.table->record_bytes);
    places_.reserve(shapes.size());
    entry_ = outbox_.reserve(partition, seq, blob::kChange, bytes);
    places_.clear();
    blob::Header head;
    head.kind = blob::kChange;
    head.partition = partition;
    head.n_parts = uint32_t(shapes.size());
    head.seq = seq;
    head.marks_bytes = uint32_t(marks.bytes());
    blob::Writer w(entry_.at);
    w.put(head);
    w.put_marks(marks);
    for (const Shape& s : shapes) {
      blob::PartHeader part;
      part.table = s.table->id;
      part.n = uint32_t(s.n);
      part.n_toggled = uint32_t(s.n_toggled);
      part.flags = s.by_gradients ? blob::kGradients : 0;
      w.put(part);
      Place place{};
      place.slots = w.skip(s.n * 4);
      place.toggled = w.skip(blob::bitmap_bytes(s.n));
      std::memset(place.toggled, 0, blob::bitmap_bytes(s.n));
      place.keys = w.skip(s.n_toggled * 8);
      place.records = w.skip(s.by_gradients ? sizeof(blob::GradientHeader) + (s.options ? sizeof(Options) : 0) +
                                                  s.n * s.table->dim * sizeof(float)
                                            : s.n * s.table->record_bytes);
      places_.push_back(place);
    }
  }
  // Row i of a part; call it in ascending i. `toggled`: made or freed in this change.
  void row(Place& place, size_t i, uint32_t slot, bool toggled, int64_t key) {
    std::memcpy(place.slots + i * 4, &slot, 4);
    if (!toggled) return;
    place.toggled[i >> 3] |= uint8_t(1u << (i & 7));
    std::memcpy(place.keys + 8 * place.next_key++, &key, 8);
  }
  // All of a part by gradients but its slots. `options`: null where they are the table's own.
  static void gradients(Place& place, double rate, const Options* options, const float* grads, size_t n,
                        const Table& table) {
    blob::GradientHeader head;
    head.rate = rate;
    head.dim = uint32_t(table.dim);
    head.n_options = options ? uint32_t(kOptions) : 0;
    blob::Writer w(place.records);
    w.put(head);
    if (options) w.put(*options);
    std::memcpy(w.skip(n * table.dim * sizeof(float)), grads, n * table.dim * sizeof(float));
  }
  Place& place(size_t part) { return places_[part]; }
  void commit() { outbox_.commit(entry_); }

 private:
  Outbox& outbox_;
  Outbox::Slot entry_;
  std::vector<Place> places_;
};

}  // namespace everstep
