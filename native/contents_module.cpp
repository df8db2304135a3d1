// The Python face of contents.cpp. Everything runs without the GIL; whatever waits or is long is bounded.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "arrays.h"

namespace everstep {
namespace {

using free_gil = nb::call_guard<nb::gil_scoped_release>;

nb::bytes to_bytes(const std::vector<uint8_t>& v) { return nb::bytes(v.data(), v.size()); }

nb::tuple take_outbox(Store& s, int64_t max_bytes) {
  Outbox::Taken taken;
  {
    nb::gil_scoped_release free;
    taken = s.outbox().take(size_t(std::max<int64_t>(max_bytes, 0)));
  }
  nb::list entries;
  for (auto& e : taken.entries) entries.append(nb::make_tuple(e.partition, e.seq, e.kind, e.offset, e.length));
  auto* held = new std::shared_ptr<Outbox::Chunk>(taken.chunk);
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::shared_ptr<Outbox::Chunk>*>(p); });
  return nb::make_tuple(taken.first_ticket, entries, nb::ndarray<nb::numpy, uint8_t>(taken.data, {taken.bytes}, owner));
}

nb::bytes marks(Store& s, int64_t partition) {
  std::vector<uint8_t> out;
  {
    nb::gil_scoped_release free;
    out = s.marks(partition);
  }
  return to_bytes(out);
}

void emit_slots(Store& s, int64_t partition, int64_t table, const Input& slots) {
  const uint32_t* at = vec<uint32_t>(slots, "slots");
  const uint32_t id = table_arg(table);
  const size_t n = slots.shape(0);
  nb::gil_scoped_release free;
  s.emit_slots(partition, id, at, n);
}

nb::bytes digest(Store& s, int64_t partition, bool by_key) {
  std::pair<uint64_t, uint64_t> d;
  {
    nb::gil_scoped_release free;
    d = s.digest(partition, by_key);
  }
  uint8_t out[16];
  std::memcpy(out, &d.first, 8);
  std::memcpy(out + 8, &d.second, 8);
  return nb::bytes(out, 16);
}

nb::dict partition_rows(Store& s, int64_t partition) {
  std::vector<std::pair<uint32_t, uint64_t>> rows;
  {
    nb::gil_scoped_release free;
    rows = s.partition_rows(partition);
  }
  nb::dict out;
  for (auto& [table, n] : rows) out[nb::int_(table)] = n;
  return out;
}

void load_pages(Store& s, int64_t partition, int64_t table, const std::vector<int64_t>& page_nos, const Input& pages) {
  const uint8_t* at = vec<uint8_t>(pages, "pages");
  const uint32_t id = table_arg(table);
  if (pages.shape(0) != page_nos.size() * s.table_of(id).page_bytes)
    malformed("pages must be " + std::to_string(page_nos.size()) + " x " + std::to_string(s.table_of(id).page_bytes) +
              " bytes");
  nb::gil_scoped_release free;
  s.load_pages(partition, id, page_nos.data(), page_nos.size(), at);
}

void load_end(Store& s, int64_t partition, const nb::bytes& blob) {
  const std::string held = bytes_of(blob);
  nb::gil_scoped_release free;
  s.load_end(partition, reinterpret_cast<const uint8_t*>(held.data()), held.size());
}

nb::tuple snapshot_begin(Store& s, int64_t partition, int64_t since) {
  std::vector<uint8_t> blob;
  int64_t generation;
  {
    nb::gil_scoped_release free;
    generation = s.snapshot_begin(partition, since, blob);
  }
  return nb::make_tuple(generation, to_bytes(blob));
}

nb::tuple snapshot_next(Store& s, int64_t partition, int64_t max_bytes) {
  std::vector<Store::ImagePage> pages;
  std::vector<uint8_t> data;
  {
    nb::gil_scoped_release free;
    s.snapshot_next(partition, size_t(std::max<int64_t>(max_bytes, 0)), pages, data);
  }
  nb::list names;
  for (auto& p : pages) names.append(nb::make_tuple(p.table, p.page));
  return nb::make_tuple(names, own_vector(std::move(data)));
}

nb::object snapshot_slots(Store& s, int64_t partition, int64_t table, const std::vector<int64_t>& page_nos) {
  std::vector<uint8_t> bits;
  bool known;
  const uint32_t id = table_arg(table);
  {
    nb::gil_scoped_release free;
    known = s.snapshot_slots(partition, id, page_nos, bits);
  }
  return known ? nb::cast(own_vector(std::move(bits))) : nb::none();
}

}  // namespace

void bind_contents(nb::class_<Store>& store) {
  store.def("protect", &Store::protect, nb::arg("partitions"), nb::arg("on"), free_gil())
      .def("_set_lag", &Store::set_lag, nb::arg("on"), nb::arg("bytes"), nb::arg("pushes"), nb::arg("late_s"))
      .def("flush", &Store::flush, nb::arg("partition"), free_gil())
      .def("flush_older", &Store::flush_older, nb::arg("age_s"), nb::arg("most"), free_gil())
      .def(
          "_lag",
          [](Store& s, bool sizes) {
            const Store::Lag lag = s.lag(sizes);
            return std::make_tuple(lag.opened, lag.closed, lag.partitions, lag.rows, lag.bytes, lag.oldest_s);
          },
          nb::arg("sizes"), free_gil())
      .def("outbox_ticket", [](Store& s) { return s.outbox().ticket(); })
      .def("outbox_bytes", [](Store& s) { return s.outbox().bytes(); })
      .def(
          "wait_outbox", [](Store& s, double timeout_s) { return s.outbox().wait(timeout_s); }, nb::arg("timeout_s"),
          free_gil())
      .def("take_outbox", &take_outbox, nb::arg("max_bytes"))
      .def(
          "emit",
          [](Store& s, int64_t partition, int kind, int64_t table, int64_t lo, int64_t hi) {
            return s.emit(partition, kind, table_arg(table), lo, hi);
          },
          nb::arg("partition"), nb::arg("kind"), nb::arg("table"), nb::arg("lo"), nb::arg("hi"), free_gil())
      .def("emit_slots", &emit_slots, nb::arg("partition"), nb::arg("table"), nb::arg("slots").noconvert())
      .def("emit_marks", &Store::emit_marks, nb::arg("partition"), free_gil())
      .def("_marks", &marks)
      .def("seq", &Store::seq, nb::arg("partition"), free_gil())
      .def("hand_over", &Store::hand_over, nb::arg("partition"), free_gil())
      .def("resume", &Store::resume, nb::arg("partition"), free_gil())
      .def("drop", &Store::drop, nb::arg("partition"), free_gil())
      .def("partition_rows", &partition_rows, nb::arg("partition"))
      .def("partition_bytes", &Store::partition_bytes, nb::arg("partition"), free_gil())
      .def(
          "digest", [](Store& s, int64_t partition) { return digest(s, partition, false); }, nb::arg("partition"))
      .def(
          "content_digest", [](Store& s, int64_t partition) { return digest(s, partition, true); },
          nb::arg("partition"))
      .def(
          "page_bytes", [](Store& s, int64_t table) { return s.table_of(table_arg(table)).page_bytes; },
          nb::arg("table"))
      .def(
          "layout",
          [](Store& s, int64_t table) {
            const Table& t = s.table_of(table_arg(table));
            return std::make_tuple(t.page_bits, t.head_bytes, t.record_bytes);
          },
          nb::arg("table"))
      .def("load_begin", &Store::load_begin, nb::arg("partition"), free_gil())
      .def("load_pages", &load_pages, nb::arg("partition"), nb::arg("table"), nb::arg("page_nos"),
           nb::arg("pages").noconvert())
      .def("_load_end", &load_end)
      .def("_snapshot_begin", &snapshot_begin)
      .def("snapshot_next", &snapshot_next, nb::arg("partition"), nb::arg("max_bytes"))
      .def("snapshot_slots", &snapshot_slots, nb::arg("partition"), nb::arg("table"), nb::arg("page_nos"))
      .def("snapshot_end", &Store::snapshot_end, nb::arg("partition"), free_gil());
}

}  // namespace everstep
