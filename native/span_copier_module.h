// The Python face of the copier of idle spans.
#pragma once
#include <nanobind/nanobind.h>

#include "arrays.h"

namespace everstep {

void bind_span_copier(nb::module_& m);

}  // namespace everstep
