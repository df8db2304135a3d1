#include "span_copier_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <tuple>
#include <utility>
#include <vector>

#include "span_copier.h"

namespace everstep {

namespace {

void load(SpanCopier& copier, const Input& from, const Input& at, const Input& sizes, const Output& into,
          const Output& sums) {
  const uint64_t* address = vec<uint64_t>(from, "from");
  const int64_t* place = vec<int64_t>(at, "at");
  const int64_t* size = vec<int64_t>(sizes, "sizes");
  const size_t n = from.shape(0);
  if (at.shape(0) != n || sizes.shape(0) != n) malformed("from, at and sizes must be of one length");
  check<uint8_t>(into, "into", 1);
  check_dense(into, "into");
  check<uint32_t>(sums, "sums", 1);
  check_dense(sums, "sums");
  const size_t total = into.shape(0), block = copier.block_bytes();
  if (sums.shape(0) != (total + block - 1) / block) malformed("sums must have an entry for each block");
  std::vector<CopyPiece> pieces;
  pieces.reserve(n);
  size_t end = 0;
  for (size_t i = 0; i < n; ++i) {
    if (place[i] < 0 || size[i] < 0 || size_t(place[i]) < end || size_t(size[i]) > total ||
        size_t(place[i]) > total - size_t(size[i])) {
      malformed("pieces must ascend, not overlap, and lie inside of into");
    }
    if (size[i] && !address[i]) malformed("a piece without memory");
    end = size_t(place[i]) + size_t(size[i]);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): of tensors, by their own word
    if (size[i]) pieces.push_back({reinterpret_cast<const uint8_t*>(address[i]), size_t(place[i]), size_t(size[i])});
  }
  auto* target = static_cast<uint8_t*>(into.data());
  auto* checks = static_cast<uint32_t*>(sums.data());
  nb::gil_scoped_release free;
  copier.load(std::move(pieces), target, total, checks);
}

std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, double> counts(SpanCopier& copier) {
  const CopyCounts c = copier.counts();
  return {c.inside, c.late, c.stalled, c.late_blocks, c.busy_s};
}

}  // namespace

void bind_span_copier(nb::module_& m) {
  nb::class_<SpanCopier>(m, "SpanCopier")
      .def(
          "__init__",
          [](SpanCopier* self, int64_t block_bytes) {
            if (block_bytes < 1 || block_bytes > (int64_t(1) << 30)) malformed("block_bytes must be in 1..2^30");
            new (self) SpanCopier(size_t(block_bytes));
          },
          nb::arg("block_bytes"))
      .def("load", &load, nb::arg("from_").noconvert(), nb::arg("at").noconvert(), nb::arg("sizes").noconvert(),
           nb::arg("into").noconvert(), nb::arg("sums").noconvert())
      .def("open", &SpanCopier::open, nb::arg("limit_bytes"))
      .def("close", &SpanCopier::close, nb::call_guard<nb::gil_scoped_release>())
      .def("finish", &SpanCopier::finish, nb::call_guard<nb::gil_scoped_release>())
      .def("drop", &SpanCopier::drop, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("left", &SpanCopier::left)
      .def("counts", &counts);
}

}  // namespace everstep
