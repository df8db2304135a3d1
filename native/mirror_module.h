// Methods of Store about mirrors, and the kernels of GF(2^8).
#pragma once
#include <nanobind/nanobind.h>

#include "arrays.h"

namespace everstep {

void bind_mirror(nb::class_<Store>& store);
void bind_gf256(nb::module_& m);

}  // namespace everstep
