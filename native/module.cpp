// The Python face of the kernels. Every array is checked here (dtype, shape, layout, bounds); wrong ones are a
// ValueError, never a crash: they may have come over the wire. Everything long runs without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

#include "arrays.h"
#include "crc32c.h"
#include "replication_module.h"
#include "group_module.h"
#include "mirror_module.h"
#include "route.h"
#include "rows.h"
#include "span_copier_module.h"
#include "store.h"

namespace nb = nanobind;
using namespace everstep;

namespace {

void check_inverse(const int32_t* inverse, size_t n, size_t u) {
  // One unsigned maximum catches negatives too; vectorised, far cheaper than the gather behind it.
  uint32_t top = 0;
  for (size_t i = 0; i < n; ++i) top = uint32_t(inverse[i]) > top ? uint32_t(inverse[i]) : top;
  if (n && top >= u) malformed("inverse points outside of rows");
}

const int64_t* check_offsets(const std::optional<Input>& offsets, size_t n, size_t bags) {
  if (!offsets) {
    if (n != bags) malformed("without offsets there is one bag per id");
    return nullptr;
  }
  const int64_t* o = vec<int64_t>(*offsets, "offsets");
  if (offsets->shape(0) != bags + 1) malformed("offsets must have one entry more than there are bags");
  if (o[0] != 0 || o[bags] != int64_t(n)) malformed("offsets must begin at 0 and end at the number of ids");
  for (size_t i = 0; i < bags; ++i) {
    if (o[i] > o[i + 1]) malformed("offsets must not decrease");
  }
  return o;
}

bool is_mean(const std::string& mode) {
  if (mode != "sum" && mode != "mean") malformed("mode is neither sum nor mean");
  return mode == "mean";
}

const float* check_weights(const std::optional<Input>& weights, size_t n, bool mean) {
  if (!weights) return nullptr;
  if (mean) malformed("weights go with sum only");
  const float* w = vec<float>(*weights, "weights");
  if (weights->shape(0) != n) malformed("weights must have one entry per id");
  return w;
}

bool store_declare(Store& s, int64_t table, int64_t dim, int optimizer, nb::dict o, int init, double a, double b,
                   std::tuple<uint32_t, uint32_t, uint32_t> life, int64_t candidates) {
  auto number = [&](const char* name) { return nb::cast<double>(o[name]); };
  Optimizer opt;
  opt.kind = optimizer;
  auto flag = [&](const char* name) { return nb::cast<bool>(o[name]); };
  opt.nesterov = flag("nesterov");
  opt.amsgrad = flag("amsgrad");
  opt.centered = flag("centered");
  opt.decoupled = flag("decoupled");
  const bool dense = flag("dense");
  opt.lr = number("lr");
  opt.eps = number("eps");
  opt.beta1 = number("beta1");
  opt.beta2 = number("beta2");
  opt.momentum = number("momentum");
  opt.dampening = number("dampening");
  opt.weight_decay = number("weight_decay");
  opt.alpha = number("alpha");
  opt.lr_decay = number("lr_decay");
  opt.momentum_decay = number("momentum_decay");
  opt.counts = opt.kind == kAdagrad && opt.lr_decay > 0;
  opt.initial_accumulator = number("initial_accumulator");
  opt.l1 = number("l1");
  opt.l2 = number("l2");
  opt.beta = number("beta");
  if (dim < 1) malformed("dim must be in 1..65536");
  const uint32_t id = table_arg(table), counted = table_arg(candidates);
  nb::gil_scoped_release free;
  const auto [admit_after, expire_batches, expire_s] = life;
  return s.declare(id, size_t(dim), opt, Init{init, a, b}, LifeCycle{admit_after, expire_batches, expire_s}, counted,
                   dense);
}

nb::object store_open(Store& s, int64_t shard, int64_t start, int64_t lease) {
  std::vector<int32_t> partitions;
  std::vector<int64_t> marks;
  bool ok;
  {
    nb::gil_scoped_release free;
    ok = s.open(shard, start, lease, partitions, marks);
  }
  if (!ok) return nb::none();
  return nb::make_tuple(own_vector(std::move(partitions)), own_vector(std::move(marks)));
}

nb::object store_watermarks(Store& s, int64_t shard) {
  std::vector<int32_t> partitions;
  std::vector<int64_t> marks;
  bool ok;
  {
    nb::gil_scoped_release free;
    ok = s.watermarks(shard, partitions, marks);
  }
  if (!ok) return nb::none();
  return nb::make_tuple(own_vector(std::move(partitions)), own_vector(std::move(marks)));
}

void store_pull(Store& s, int64_t table, const Input& keys, const Output& out) {
  const int64_t* k = vec<int64_t>(keys, "keys");
  float* o = mat<float>(out, "out");
  const uint32_t id = table_arg(table);
  if (out.shape(0) != keys.shape(0) || out.shape(1) != s.dim_of(id)) malformed("out must be [keys, dim of the table]");
  const size_t n = keys.shape(0);
  nb::gil_scoped_release free;
  s.pull(id, k, n, o);
}

// Of (shard, lo, hi, lease, learnt) each.
std::vector<Span> spans_of(nb::handle spans) {
  std::vector<Span> out;
  for (nb::handle item : spans) {
    if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 5) malformed("a span is (shard, lo, hi, lease, learnt)");
    nb::tuple t = nb::cast<nb::tuple>(item);
    out.push_back(Span{nb::cast<int64_t>(t[0]), nb::cast<int64_t>(t[1]), nb::cast<int64_t>(t[2]),
                       nb::cast<int64_t>(t[3]), nb::cast<bool>(t[4])});
  }
  return out;
}

// Options that a part goes by; none: the table's own.
void options_of(nb::handle given, PushPart& part) {
  if (!nb::isinstance<nb::tuple>(given)) malformed("the options of a part are a tuple");
  nb::tuple t = nb::cast<nb::tuple>(given);
  const size_t n = nb::len(t);
  if (n == 0) return;
  if (n != kOptions) malformed("a part has 0 or " + std::to_string(kOptions) + " options");
  double all[kOptions];
  for (size_t i = 0; i < n; ++i) all[i] = nb::cast<double>(t[i]);
  std::memcpy(&part.options, all, sizeof(all));
  part.has_options = true;
}

nb::tuple store_push(Store& s, nb::handle spans, const nb::bytes& partitions, const nb::list& parts, uint32_t now_s,
                     int64_t step) {
  const std::vector<Span> consumed = spans_of(spans);
  std::vector<PushPart> work;
  std::vector<Input> alive;  // arrays stay alive although the GIL is not held
  for (nb::handle item : parts) {
    if (!nb::isinstance<nb::tuple>(item) || nb::len(item) < 4 || nb::len(item) > 5)
      malformed("a part is (table, keys, grads, lr[, options])");
    nb::tuple t = nb::cast<nb::tuple>(item);
    Input keys, grads;
    if (!nb::try_cast<Input>(t[1], keys, false) || !nb::try_cast<Input>(t[2], grads, false))
      malformed("keys and grads must be arrays");
    PushPart part;
    part.table = table_arg(nb::cast<int64_t>(t[0]));
    part.keys = vec<int64_t>(keys, "keys");
    part.grads = mat<float>(grads, "grads");
    part.n = keys.shape(0);
    part.dim = grads.shape(1);
    part.lr = nb::cast<double>(t[3]);
    if (nb::len(t) == 5) options_of(t[4], part);
    if (grads.shape(0) != part.n) malformed("grads must have one row per key");
    work.push_back(part);
    alive.push_back(std::move(keys));
    alive.push_back(std::move(grads));
  }
  const std::string bitmap = bytes_of(partitions);
  PushOutcome out;
  {
    nb::gil_scoped_release free;
    out = s.push(consumed, bitmap, work, now_s, step);
  }
  return nb::make_tuple(out.applied, out.repeats, out.gap, out.fenced, out.nonfinite,
                        nb::bytes(out.partitions.data(), out.partitions.size()), out.moved);
}

// The parts of a request (messages.Part) whose arrays lie in `memory`. With the GIL; every bound is checked.
std::vector<PushPart> parts_in(Store& s, nb::handle parts, const Py_buffer& memory) {
  std::vector<PushPart> out;
  const auto* base = static_cast<const uint8_t*>(memory.buf);
  auto place = [&](nb::handle part, const char* name, int64_t count, size_t item) {
    const int64_t at = nb::cast<int64_t>(nb::getattr(part, name));
    if (at < 0 || at > memory.len || uint64_t(memory.len - at) / item < uint64_t(count))
      malformed(std::string(name) + " " + std::to_string(at) + ": they do not fit into the " +
                std::to_string(memory.len) + " bytes that came with the request");
    if (count && reinterpret_cast<uintptr_t>(base + at) % item) malformed(std::string(name) + " is not aligned");
    return base + at;
  };
  for (nb::handle item : parts) {
    PushPart part;
    part.table = table_arg(nb::cast<int64_t>(nb::getattr(item, "table")));
    part.dim = s.dim_of(part.table);
    const int64_t n = nb::cast<int64_t>(nb::getattr(item, "n"));
    if (n < 0 || n > memory.len / 8)
      malformed("a part of " + std::to_string(n) + " keys in " + std::to_string(memory.len) + " bytes");
    part.n = size_t(n);
    part.keys = reinterpret_cast<const int64_t*>(place(item, "keys_at", n, sizeof(int64_t)));
    part.grads = reinterpret_cast<const float*>(place(item, "rows_at", n * int64_t(part.dim), sizeof(float)));
    part.lr = nb::cast<double>(nb::getattr(item, "lr"));
    options_of(nb::getattr(item, "options"), part);
    out.push_back(part);
  }
  return out;
}

// Memory of somebody else, held while this lives. With the GIL.
struct Memory {
  Memory(nb::handle from, int flags) {
    if (PyObject_GetBuffer(from.ptr(), &view, flags)) throw nb::python_error();
  }
  ~Memory() { PyBuffer_Release(&view); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Py_buffer view{};
};

void store_pull_at(Store& s, nb::handle parts, nb::handle memory) {
  Memory held(memory, PyBUF_WRITABLE);
  const std::vector<PushPart> work = parts_in(s, parts, held.view);
  nb::gil_scoped_release free;
  for (const PushPart& p : work) s.pull(p.table, p.keys, p.n, const_cast<float*>(p.grads));
}

nb::tuple store_push_at(Store& s, nb::handle spans, nb::handle parts, nb::handle memory, uint32_t now_s, int64_t step) {
  const std::vector<Span> consumed = spans_of(spans);
  Memory held(memory, PyBUF_SIMPLE);
  const std::vector<PushPart> work = parts_in(s, parts, held.view);
  PushOutcome out;
  {
    nb::gil_scoped_release free;
    out = s.push(consumed, {}, work, now_s, step);
  }
  return nb::make_tuple(out.applied, out.repeats, out.gap, out.fenced, out.nonfinite,
                        nb::bytes(out.partitions.data(), out.partitions.size()), out.moved);
}

int64_t store_put_absent(Store& s, int64_t table, const Input& keys, const Input& rows, uint32_t now_s) {
  const int64_t* k = vec<int64_t>(keys, "keys");
  const float* r = mat<float>(rows, "rows");
  const uint32_t id = table_arg(table);
  const size_t n = keys.shape(0);
  if (rows.shape(0) != n || rows.shape(1) != s.dim_of(id)) malformed("rows must be [keys, dim of the table]");
  nb::gil_scoped_release free;
  return s.put_absent(id, k, r, n, now_s);
}

int64_t store_assign(Store& s, int64_t table, const Input& keys, const Input& rows) {
  const int64_t* k = vec<int64_t>(keys, "keys");
  const float* r = mat<float>(rows, "rows");
  const uint32_t id = table_arg(table);
  const size_t n = keys.shape(0);
  if (rows.shape(0) != n || rows.shape(1) != s.dim_of(id)) malformed("rows must be [keys, dim of the table]");
  nb::gil_scoped_release free;
  return s.assign(id, k, r, n);
}

void store_locate(Store& s, int64_t table, const Input& keys, const Output& slots) {
  const int64_t* k = vec<int64_t>(keys, "keys");
  check<int64_t>(slots, "slots", 1);
  check_dense(slots, "slots");
  if (slots.shape(0) != keys.shape(0)) malformed("slots must have one entry per key");
  const uint32_t id = table_arg(table);
  const size_t n = keys.shape(0);
  auto* to = static_cast<int64_t*>(slots.data());
  nb::gil_scoped_release free;
  s.locate(id, k, n, to);
}

nb::tuple store_scan(Store& s, int64_t table, int64_t partition, int64_t slot, int64_t limit, bool with_state) {
  if (limit < 1) malformed("limit must be positive");
  const uint32_t id = table_arg(table);
  const size_t dim = s.dim_of(id), width = with_state ? s.state_of(id) : 0;
  std::vector<int64_t> keys;
  std::vector<float> values, state;
  int64_t next = -1;
  size_t n;
  {
    nb::gil_scoped_release free;
    const size_t count = s.count(id, partition);
    // Rows made between here and the copy are found by the next piece.
    const size_t most = std::max<size_t>(std::min<size_t>(size_t(limit), count), 1);
    keys.resize(most);
    values.resize(most * dim);
    state.resize(most * width);
    n = s.scan(id, partition, slot, most, keys.data(), values.data(), width ? state.data() : nullptr, next);
  }
  nb::object held = with_state ? nb::cast(own_array(std::move(state), {n, width})) : nb::none();
  return nb::make_tuple(own_array(std::move(keys), {n}), own_array(std::move(values), {n, dim}), held, next);
}

nb::ndarray<nb::numpy, uint64_t> store_fingerprints(Store& s) {
  std::vector<uint64_t> out(s.n_partitions());
  {
    nb::gil_scoped_release free;
    s.fingerprints(out.data());
  }
  return own_vector(std::move(out));
}

nb::dict store_counts(Store& s) {
  std::vector<std::pair<uint32_t, uint64_t>> rows;
  {
    nb::gil_scoped_release free;
    rows = s.rows_by_table();
  }
  nb::dict by_table;
  for (auto& [id, n] : rows) by_table[nb::int_(id)] = n;
  nb::dict out;
  out["rows"] = by_table;
  out["bytes"] = s.mapped_bytes();
  out["pushes"] = s.pushes();
  out["pulls"] = s.pulls();
  return out;
}

nb::tuple route(const Input& ids, int64_t n_partitions, int64_t table, const Input& partition_ps, int64_t n_ps) {
  const int64_t* i = vec<int64_t>(ids, "ids");
  const int32_t* ps = vec<int32_t>(partition_ps, "partition_ps");
  if (n_partitions < 1 || n_partitions > 4096 || partition_ps.shape(0) != size_t(n_partitions))
    malformed("partition_ps must have one entry per partition, of at most 4096");
  const size_t n = ids.shape(0);
  if (n >= (size_t(1) << 31)) malformed("too many ids in one batch");
  int32_t top = -1;
  for (int64_t b = 0; b < n_partitions; ++b) {
    if (ps[b] < 0) malformed("partition_ps must not be negative");
    top = std::max(top, ps[b]);
  }
  if (n_ps < 0) n_ps = int64_t(top) + 1;
  if (n_ps <= top || n_ps > 65536) malformed("partition_ps must be below n_ps");
  const uint32_t id = table_arg(table);
  std::vector<int64_t> keys, counts;
  std::vector<int32_t> inverse;
  {
    nb::gil_scoped_release free;
    counts.resize(size_t(n_ps));
    inverse.resize(n);
    unique_route(i, n, uint32_t(n_partitions), id, ps, uint32_t(n_ps), keys, inverse.data(), counts.data());
  }
  return nb::make_tuple(own_vector(std::move(keys)), own_vector(std::move(inverse)), own_vector(std::move(counts)));
}

void gather_rows(const Input& rows, const Input& inverse, const Output& out) {
  const float* r = mat<float>(rows, "rows");
  const int32_t* inv = vec<int32_t>(inverse, "inverse");
  const size_t stride = row_stride(out, "out"), n = inverse.shape(0), dim = rows.shape(1), u = rows.shape(0);
  if (out.shape(0) != n || out.shape(1) != dim) malformed("out must be [inverse, dim]");
  auto* o = static_cast<float*>(out.data());
  nb::gil_scoped_release free;
  check_inverse(inv, n, u);
  row_kernels().gather(r, inv, n, dim, o, stride);
}

// Rows of several pieces of memory, as if they stood one behind the other: piece i begins at row starts[i], and what
// its last row lacks is zero.
void gather_pieces(const std::vector<Input>& pieces, const Input& starts, const Input& index, const Output& out) {
  const int64_t* begins = vec<int64_t>(starts, "starts");
  const int32_t* at = vec<int32_t>(index, "index");
  float* o = mat<float>(out, "out");
  const size_t n = index.shape(0), dim = out.shape(1), n_pieces = pieces.size();
  if (out.shape(0) != n || dim == 0) malformed("out must be [index, dim]");
  if (starts.shape(0) != n_pieces || n_pieces == 0) malformed("starts must have one entry per piece");
  std::vector<const float*> data(n_pieces);
  std::vector<size_t> sizes(n_pieces);
  for (size_t i = 0; i < n_pieces; ++i) {
    if (pieces[i].dtype() != nb::dtype<float>()) malformed("a piece has the wrong dtype");
    check_dense(pieces[i], "a piece");
    if (begins[i] < 0 || (i ? begins[i] <= begins[i - 1] : begins[i] != 0))
      malformed("starts must begin with 0 and rise");
    data[i] = static_cast<const float*>(pieces[i].data());
    sizes[i] = pieces[i].size();
  }
  nb::gil_scoped_release free;
  for (size_t k = 0; k < n; ++k) {
    if (at[k] < 0) malformed("index must not be negative");
    const size_t i = size_t(std::upper_bound(begins, begins + n_pieces, int64_t(at[k])) - begins) - 1;
    const size_t from = (size_t(at[k]) - size_t(begins[i])) * dim;
    if (from && from >= sizes[i]) malformed("index has a row behind the end of its piece");
    const size_t there = std::min(dim, sizes[i] - from);
    float* to = o + k * dim;
    if (there) std::memcpy(to, data[i] + from, there * sizeof(float));
    std::fill(to + there, to + dim, 0.0F);
  }
}

template <class T>
bool same_items(const Input& a, const int64_t* known) {
  const auto* data = static_cast<const T*>(a.data());
  const size_t rows = a.ndim() ? a.shape(0) : 1, cols = a.ndim() > 1 ? a.shape(1) : 1;
  const int64_t down = a.ndim() ? a.stride(0) : 0, right = a.ndim() > 1 ? a.stride(1) : 0;
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < cols; ++c)
      if (int64_t(data[int64_t(r) * down + int64_t(c) * right]) != known[r * cols + c]) return false;
  return true;
}

// Whether ids (int64 or int32, at most two dimensions, any strides) are known (int64 [n]), in C order.
bool same_ids(const Input& ids, const Input& known) {
  const int64_t* k = vec<int64_t>(known, "known");
  if (ids.ndim() > 2) malformed("ids must have at most 2 dimensions");
  if (ids.size() != known.shape(0)) return false;
  if (ids.dtype() == nb::dtype<int64_t>()) return same_items<int64_t>(ids, k);
  if (ids.dtype() != nb::dtype<int32_t>()) malformed("ids has the wrong dtype");
  return same_items<int32_t>(ids, k);
}

void bag_forward(const Input& rows, const Input& inverse, const std::optional<Input>& offsets, const std::string& mode,
                 const std::optional<Input>& weights, const Output& out) {
  const float* r = mat<float>(rows, "rows");
  const int32_t* inv = vec<int32_t>(inverse, "inverse");
  const size_t stride = row_stride(out, "out"), n = inverse.shape(0), bags = out.shape(0), dim = rows.shape(1);
  const size_t u = rows.shape(0);
  if (out.shape(1) != dim) malformed("out must be [bags, dim]");
  const bool mean = is_mean(mode);
  const float* w = check_weights(weights, n, mean);
  const int64_t* offs = check_offsets(offsets, n, bags);
  auto* o = static_cast<float*>(out.data());
  nb::gil_scoped_release free;
  check_inverse(inv, n, u);
  row_kernels().bag_forward(r, inv, offs, bags, dim, mean, w, o, stride);
}

void bag_backward(const Input& grad, const Input& inverse, const std::optional<Input>& offsets, const std::string& mode,
                  const std::optional<Input>& weights, int64_t u, const Output& out, bool add) {
  const size_t stride = row_stride(grad, "grad_out"), bags = grad.shape(0), dim = grad.shape(1);
  const int32_t* inv = vec<int32_t>(inverse, "inverse");
  const size_t n = inverse.shape(0);
  float* o = mat<float>(out, "out");
  if (u < 0 || out.shape(0) != size_t(u) || out.shape(1) != dim) malformed("out must be [u, dim]");
  const bool mean = is_mean(mode);
  const float* w = check_weights(weights, n, mean);
  const int64_t* offs = check_offsets(offsets, n, bags);
  const auto* g = static_cast<const float*>(grad.data());
  nb::gil_scoped_release free;
  check_inverse(inv, n, size_t(u));
  row_kernels().bag_backward(g, stride, inv, offs, bags, dim, mean, w, o, size_t(u), add);
}

bool isfinite_all(const Input& x) {
  if (x.dtype() != nb::dtype<float>()) malformed("x has the wrong dtype");
  check_dense(x, "x");
  const auto* data = static_cast<const float*>(x.data());
  const size_t n = x.size();
  nb::gil_scoped_release free;
  return row_kernels().all_finite(data, n);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "everstep kernels";
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const NotOwned& e) {
      PyErr_SetString(PyExc_KeyError, e.what());
    }
  });
  // NOLINTNEXTLINE(bugprone-unused-raii,bugprone-throw-keyword-missing): its constructor adds it to the module
  nb::exception<Recovering>(m, "Recovering");
  // NOLINTNEXTLINE(bugprone-unused-raii,bugprone-throw-keyword-missing): its constructor adds it to the module
  nb::exception<Full>(m, "Full", PyExc_ValueError);

  nb::class_<Store> store(m, "Store");
  store
      .def(
          "__init__",
          [](Store* self, int64_t n_partitions, uint64_t seed) {
            if (n_partitions < 1 || n_partitions > 4096) malformed("n_partitions must be in 1..4096");
            new (self) Store(uint32_t(n_partitions), seed);
          },
          nb::arg("n_partitions"), nb::arg("seed"))
      .def_prop_ro("n_partitions", &Store::n_partitions)
      .def("n_tables", &Store::n_tables)
      .def("own", &Store::own, nb::arg("partitions"))
      .def("owned", &Store::owned)
      .def("_declare", &store_declare)
      .def(
          "dim", [](Store& s, int64_t table) { return s.dim_of(table_arg(table)); }, nb::arg("table"))
      .def(
          "state_floats", [](Store& s, int64_t table) { return s.state_of(table_arg(table)); }, nb::arg("table"))
      .def("open", &store_open, nb::arg("shard"), nb::arg("start"), nb::arg("lease"))
      .def("pull", &store_pull, nb::arg("table"), nb::arg("keys").noconvert(), nb::arg("out").noconvert())
      .def("_push", &store_push)
      .def("pull_at", &store_pull_at, nb::arg("parts"), nb::arg("memory"))
      .def("_push_at", &store_push_at)
      .def("assign", &store_assign, nb::arg("table"), nb::arg("keys").noconvert(), nb::arg("rows").noconvert())
      .def("put_absent", &store_put_absent, nb::arg("table"), nb::arg("keys").noconvert(), nb::arg("rows").noconvert(),
           nb::arg("now_s") = 0)
      .def("locate", &store_locate, nb::arg("table"), nb::arg("keys").noconvert(), nb::arg("slots").noconvert())
      .def("release", &Store::release, nb::arg("shards"), nb::call_guard<nb::gil_scoped_release>())
      .def("watermarks", &store_watermarks, nb::arg("shard"))
      .def("shards", &Store::shards, nb::call_guard<nb::gil_scoped_release>())
      .def("scan", &store_scan, nb::arg("table"), nb::arg("partition"), nb::arg("slot"), nb::arg("limit"),
           nb::arg("state") = false)
      .def("fingerprints", &store_fingerprints)
      .def(
          "initialise", [](Store& s, int64_t table) { s.initialise(table_arg(table)); }, nb::arg("table"))
      .def("initialised", &Store::initialised)
      .def(
          "expire",
          [](Store& s, int64_t partition, uint32_t now_s, uint32_t max_slots) {
            bool round = false;
            const size_t freed = s.expire(partition, now_s, max_slots, round);
            return std::make_pair(freed, round);
          },
          nb::arg("partition"), nb::arg("now_s"), nb::arg("max_slots") = 65536,
          nb::call_guard<nb::gil_scoped_release>())
      .def("_set_limit", &Store::set_limit)
      .def("used_bytes", &Store::used_bytes)
      .def("_begin_cold",
           [](Store& s, const std::string& folder) {
             try {
               s.begin_cold(folder);
             } catch (const std::system_error& error) {
               return error.code().value();
             }
             return 0;
           })
      .def("cool", &Store::cool, nb::arg("target"), nb::call_guard<nb::gil_scoped_release>())
      .def("grow_older", &Store::grow_older, nb::call_guard<nb::gil_scoped_release>())
      .def("_cold_counts",
           [](const Store& s) {
             const ColdCounts c = s.cold_counts();
             return std::make_tuple(c.lookups, c.misses, c.written_bytes, c.disk_bytes, c.error);
           })
      .def("_counts", &store_counts);
  bind_contents(store);
  bind_mirror(store);
  bind_gf256(m);
  bind_replication(m);
  bind_group(m);
  bind_span_copier(m);

  m.def("unique_route", &route, nb::arg("ids").noconvert(), nb::arg("n_partitions"), nb::arg("table_id"),
        nb::arg("partition_ps").noconvert(), nb::arg("n_ps") = -1);
  m.def("gather_rows", &gather_rows, nb::arg("rows").noconvert(), nb::arg("inverse").noconvert(),
        nb::arg("out").noconvert());
  m.def("gather_pieces", &gather_pieces, nb::arg("pieces").noconvert(), nb::arg("starts").noconvert(),
        nb::arg("index").noconvert(), nb::arg("out").noconvert());
  m.def("same_ids", &same_ids, nb::arg("ids").noconvert(), nb::arg("known").noconvert());
  m.def("bag_forward", &bag_forward, nb::arg("rows").noconvert(), nb::arg("inverse").noconvert(),
        nb::arg("offsets").noconvert().none(), nb::arg("mode"), nb::arg("weights").noconvert().none(),
        nb::arg("out").noconvert());
  m.def("bag_backward", &bag_backward, nb::arg("grad_out").noconvert(), nb::arg("inverse").noconvert(),
        nb::arg("offsets").noconvert().none(), nb::arg("mode"), nb::arg("weights").noconvert().none(), nb::arg("u"),
        nb::arg("out").noconvert(), nb::arg("add") = false);
  m.def("isfinite_all", &isfinite_all, nb::arg("x").noconvert());
  m.def(
      "crc32c",
      [](nb::handle data, uint32_t crc) {
        Py_buffer view;
        if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
        if (view.len < 4096) {  // the GIL costs more than that
          crc = crc32c(view.buf, size_t(view.len), crc);
        } else {
          nb::gil_scoped_release free;
          crc = crc32c(view.buf, size_t(view.len), crc);
        }
        PyBuffer_Release(&view);
        return crc;
      },
      nb::arg("data"), nb::arg("crc") = 0);
  m.def("crc32c_isa", []() { return crc32c_isa(); });
  m.def("isa", []() { return row_kernels().name; });
}
