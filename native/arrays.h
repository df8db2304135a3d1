// Arrays of NumPy at the border: dtype, shape, layout and bounds are checked here; a wrong one is Malformed
// (ValueError).
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "store.h"

namespace everstep {

namespace nb = nanobind;

using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using Output = nb::ndarray<nb::device::cpu>;

[[noreturn]] inline void malformed(const std::string& what) { throw Malformed(what); }

template <class T, class Array>
void check(const Array& a, const char* name, size_t ndim) {
  if (a.dtype() != nb::dtype<T>()) malformed(std::string(name) + " has the wrong dtype");
  if (a.ndim() != ndim) malformed(std::string(name) + " must have " + std::to_string(ndim) + " dimension(s)");
}

template <class Array>
void check_dense(const Array& a, const char* name) {
  if (a.size() == 0) return;  // the strides of an array without items say nothing
  int64_t expect = 1;
  for (size_t d = a.ndim(); d-- > 0;) {
    if (a.shape(d) > 1 && a.stride(d) != expect) malformed(std::string(name) + " must be C-contiguous");
    expect *= int64_t(a.shape(d));
  }
}

template <class T>
const T* vec(const Input& a, const char* name) {
  check<T>(a, name, 1);
  check_dense(a, name);
  return static_cast<const T*>(a.data());
}

template <class T, class Array>
auto mat(const Array& a, const char* name) {
  check<T>(a, name, 2);
  check_dense(a, name);
  using P = std::conditional_t<std::is_same_v<Array, Input>, const T*, T*>;
  return static_cast<P>(a.data());
}

// Rows without gaps inside, but with any distance between them (a slice of columns): the distance, in floats.
template <class Array>
size_t row_stride(const Array& a, const char* name) {
  check<float>(a, name, 2);
  if (a.size() == 0) return a.shape(1);
  if (a.shape(1) > 1 && a.stride(1) != 1) malformed(std::string(name) + " must be contiguous within a row");
  if (a.shape(0) <= 1) return a.shape(1);
  if (a.stride(0) < int64_t(a.shape(1))) malformed(std::string(name) + " must have rows that do not overlap");
  return size_t(a.stride(0));
}

template <class T>
nb::ndarray<nb::numpy, T> own_array(std::vector<T>&& from, std::initializer_list<size_t> shape) {
  auto* held = new std::vector<T>(std::move(from));
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(held->data(), shape, owner);
}

template <class T>
nb::ndarray<nb::numpy, T> own_vector(std::vector<T>&& from) {
  const size_t n = from.size();
  return own_array(std::move(from), {n});
}

inline std::string bytes_of(const nb::bytes& b) { return std::string(b.c_str(), b.size()); }

inline uint32_t table_arg(int64_t table) {
  if (table < 0 || table > 0xffffffffLL) malformed("table id out of range");
  return uint32_t(table);
}

// Methods of Store beyond those that workers ask for: differences, contents, images.
void bind_contents(nb::class_<Store>& store);

}  // namespace everstep
