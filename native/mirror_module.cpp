// The Python face of mirror.h. Blobs are anything with the buffer protocol; everything long runs without the GIL.
#include "mirror_module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

#include "gf256.h"
#include "mirror.h"

namespace everstep {
namespace {

using free_gil = nb::call_guard<nb::gil_scoped_release>;

// Bytes of somebody else, contiguous, held while this lives. With the GIL.
class Bytes {
 public:
  explicit Bytes(nb::handle from) {
    if (PyObject_GetBuffer(from.ptr(), &view_, PyBUF_SIMPLE)) {
      PyErr_Clear();
      malformed("a blob must be contiguous bytes");
    }
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  const uint8_t* data() const { return static_cast<const uint8_t*>(view_.buf); }
  size_t size() const { return size_t(view_.len); }

 private:
  Py_buffer view_{};
};

Mirrors& mirrors(Store& s) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> hold(mutex);
  if (!s.mirrors) s.mirrors = std::make_shared<Mirrors>(s);
  return *s.mirrors;
}

std::vector<uint32_t> partitions_arg(const std::vector<int64_t>& partitions) {
  std::vector<uint32_t> out;
  for (int64_t b : partitions) {
    if (b < 0 || b > 0xffffffffLL) malformed("partition " + std::to_string(b) + " does not exist");
    out.push_back(uint32_t(b));
  }
  return out;
}

nb::bytes to_bytes(const std::vector<uint8_t>& v) { return nb::bytes(v.data(), v.size()); }

int apply(Store& s, uint64_t id, nb::handle blob) {
  Bytes bytes(blob);
  nb::gil_scoped_release free;
  return mirrors(s).get(id)->apply(bytes.data(), bytes.size());
}

// One call for a whole message: a Python loop over the blobs of 64 partitions would cost more than applying them.
nb::ndarray<nb::numpy, int32_t> apply_many(Store& s, const Input& ids, const Input& offsets, const Input& lengths,
                                           nb::handle data) {
  const int64_t* id = vec<int64_t>(ids, "ids");
  const int64_t* at = vec<int64_t>(offsets, "offsets");
  const int64_t* length = vec<int64_t>(lengths, "lengths");
  const size_t n = ids.shape(0);
  if (offsets.shape(0) != n || lengths.shape(0) != n) malformed("ids, offsets and lengths must be as many");
  Bytes bytes(data);
  std::vector<int32_t> out(n);
  {
    nb::gil_scoped_release free;
    const int64_t size = int64_t(bytes.size());
    for (size_t i = 0; i < n; ++i) {
      if (at[i] < 0 || length[i] < 0 || at[i] > size || length[i] > size - at[i])
        malformed("blob " + std::to_string(i) + " lies outside of the message");
    }
    // All before the first: a message with a damaged blob changes nothing, and is taken whole when it comes again.
    for (size_t i = 0; i < n; ++i) {
      if (!i || at[i] != at[i - 1] || length[i] != length[i - 1])
        blob::check_seal(bytes.data() + at[i], size_t(length[i]));
    }
    Mirrors& all = mirrors(s);
    std::shared_ptr<Mirror> mirror;
    for (size_t i = 0; i < n; ++i) {
      if (!mirror || id[i] != id[i - 1]) mirror = all.get(uint64_t(id[i]));
      out[i] = mirror->apply(bytes.data() + at[i], size_t(length[i]), true);
    }
  }
  return own_vector(std::move(out));
}

std::vector<std::tuple<uint32_t, int64_t, bool>> state(Store& s, uint64_t id) {
  std::vector<std::tuple<uint32_t, int64_t, bool>> out;
  for (const MemberState& m : mirrors(s).get(id)->state()) out.emplace_back(m.partition, m.seq, m.complete);
  return out;
}

nb::bytes marks(Store& s, uint64_t id, int64_t partition) {
  std::vector<uint8_t> out;
  {
    nb::gil_scoped_release free;
    out = mirrors(s).get(id)->marks(partitions_arg({partition})[0]);
  }
  return to_bytes(out);
}

nb::list pages(Store& s, uint64_t id, int64_t table, int64_t partition) {
  nb::list out;
  for (const Mirror::Page& page : mirrors(s).get(id)->pages(table_arg(table), partitions_arg({partition})[0]))
    out.append(nb::make_tuple(page.number, nb::bytes(page.bytes.data(), page.bytes.size())));
  return out;
}

void recover_begin(Store& s, uint64_t id, const std::vector<int64_t>& lost,
                   const std::optional<std::vector<int64_t>>& here) {
  mirrors(s).get(id)->recover_begin(partitions_arg(lost), partitions_arg(here ? *here : lost));
}

int recover_fold(Store& s, uint64_t id, nb::handle blob) {
  Bytes bytes(blob);
  nb::gil_scoped_release free;
  return mirrors(s).get(id)->recover_fold(bytes.data(), bytes.size());
}

int recover_other(Store& s, uint64_t id, nb::handle blob) {
  Bytes bytes(blob);
  nb::gil_scoped_release free;
  return mirrors(s).get(id)->recover_other(bytes.data(), bytes.size());
}

nb::dict recover_state(Store& s, uint64_t id) {
  std::vector<RecoverState> states;
  {
    nb::gil_scoped_release free;
    states = mirrors(s).get(id)->recover_state();
  }
  nb::dict out;
  for (const RecoverState& r : states)
    out[nb::int_(r.partition)] = nb::make_tuple(r.heads_done, r.bodies_done, r.slots_present, r.slots_total);
  return out;
}

nb::tuple emit_recovering(Store& s, uint64_t id, int kind, int64_t table, int64_t lo, int64_t hi) {
  std::vector<uint8_t> out;
  int64_t next;
  const uint32_t t = table_arg(table);
  {
    nb::gil_scoped_release free;
    next = mirrors(s).get(id)->recover_emit(kind, t, lo, hi, nullptr, out);
  }
  return nb::make_tuple(next, to_bytes(out));
}

nb::bytes emit_recovering_slots(Store& s, uint64_t id, int64_t table, const Input& slots) {
  const uint32_t* at = vec<uint32_t>(slots, "slots");
  const std::vector<uint32_t> listed(at, at + slots.shape(0));
  std::vector<uint8_t> out;
  const uint32_t t = table_arg(table);
  {
    nb::gil_scoped_release free;
    mirrors(s).get(id)->recover_emit(blob::kBodies, t, 0, 1, &listed, out);
  }
  return to_bytes(out);
}

nb::ndarray<nb::numpy, uint32_t> missing(Store& s, int64_t partition, int64_t table, const Input& keys) {
  const int64_t* k = vec<int64_t>(keys, "keys");
  const uint32_t t = table_arg(table);
  const size_t n = keys.shape(0);
  std::vector<uint32_t> out;
  {
    nb::gil_scoped_release free;
    out = mirrors(s).missing(partition, t, k, n);
  }
  return own_vector(std::move(out));
}

nb::list missing_all(Store& s, int64_t table, const Input& keys) {
  const int64_t* k = vec<int64_t>(keys, "keys");
  const uint32_t t = table_arg(table);
  const size_t n = keys.shape(0);
  std::vector<std::pair<uint32_t, uint32_t>> found;
  {
    nb::gil_scoped_release free;
    found = mirrors(s).missing_all(t, k, n);
  }
  nb::list out;
  for (auto& [partition, slot] : found) out.append(nb::make_tuple(partition, slot));
  return out;
}

uint8_t byte_arg(int64_t c) {
  if (c < 0 || c > 255) malformed("a weight is a byte");
  return uint8_t(c);
}

// dst += weight * src over GF(2^8): for benchmarks and tests of the kernels.
void gf_add_mul(const Output& dst, const Input& src, int64_t weight) {
  check<uint8_t>(dst, "dst", 1);
  check_dense(dst, "dst");
  const uint8_t* from = vec<uint8_t>(src, "src");
  if (dst.shape(0) != src.shape(0)) malformed("dst and src must be as long");
  auto* to = static_cast<uint8_t*>(dst.data());
  const size_t n = dst.shape(0);
  const uint8_t c = byte_arg(weight);
  nb::gil_scoped_release free;
  add_weighted(gf_kernels(), to, from, n, c);
}

void gf_mul_all(const Output& dst, int64_t weight) {
  check<uint8_t>(dst, "dst", 1);
  check_dense(dst, "dst");
  auto* to = static_cast<uint8_t*>(dst.data());
  const size_t n = dst.shape(0);
  const uint8_t c = byte_arg(weight);
  nb::gil_scoped_release free;
  gf_kernels().mul(to, n, c);
}

}  // namespace

void bind_mirror(nb::class_<Store>& store) {
  store
      .def(
          "mirror_make",
          [](Store& s, uint64_t id, const std::vector<int64_t>& members, int row) {
            mirrors(s).make(id, members, row);
          },
          nb::arg("id"), nb::arg("members"), nb::arg("row") = 0)
      .def(
          "mirror_drop", [](Store& s, uint64_t id) { return mirrors(s).drop(id); }, nb::arg("id"), free_gil())
      .def("mirrors", [](Store& s) { return mirrors(s).ids(); })
      .def("mirror_apply", &apply, nb::arg("id"), nb::arg("blob"))
      .def("mirror_apply_many", &apply_many, nb::arg("ids").noconvert(), nb::arg("offsets").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("data"))
      .def("mirror_state", &state, nb::arg("id"), free_gil())
      .def("mirror_marks", &marks, nb::arg("id"), nb::arg("partition"))
      .def(
          "mirror_bytes", [](Store& s, uint64_t id) { return mirrors(s).get(id)->bytes(); }, nb::arg("id"), free_gil())
      .def("mirror_pages", &pages, nb::arg("id"), nb::arg("table"), nb::arg("partition") = 0)
      .def(
          "promote", [](Store& s, uint64_t id, int64_t partition) { mirrors(s).promote(id, partition); }, nb::arg("id"),
          nb::arg("partition"), free_gil())
      .def("recover_begin", &recover_begin, nb::arg("id"), nb::arg("lost"), nb::arg("here").none() = nb::none(),
           free_gil())
      .def("recover_fold", &recover_fold, nb::arg("id"), nb::arg("blob"))
      .def("recover_other", &recover_other, nb::arg("id"), nb::arg("blob"))
      .def("recover_state", &recover_state, nb::arg("id"))
      .def(
          "recover_end", [](Store& s, uint64_t id, bool abort) { mirrors(s).get(id)->recover_end(abort); },
          nb::arg("id"), nb::arg("abort") = false, free_gil())
      .def("emit_recovering", &emit_recovering, nb::arg("id"), nb::arg("kind"), nb::arg("table"), nb::arg("lo"),
           nb::arg("hi"))
      .def("emit_recovering_slots", &emit_recovering_slots, nb::arg("id"), nb::arg("table"),
           nb::arg("slots").noconvert())
      .def("missing_all", &missing_all, nb::arg("table"), nb::arg("keys").noconvert())
      .def("missing", &missing, nb::arg("partition"), nb::arg("table"), nb::arg("keys").noconvert());
}

void bind_gf256(nb::module_& m) {
  m.def("gf_add_mul", &gf_add_mul, nb::arg("dst").noconvert(), nb::arg("src").noconvert(), nb::arg("weight"));
  m.def("gf_mul", &gf_mul_all, nb::arg("dst").noconvert(), nb::arg("weight"));
  m.def("gf_isa", []() { return gf_kernels().name; });
}

}  // namespace everstep
