// What the members of a group (mode allreduce) do in every step on the script's thread.
#pragma once
#include <nanobind/nanobind.h>

#include "arrays.h"

namespace everstep {

void bind_group(nb::module_& m);

}  // namespace everstep
