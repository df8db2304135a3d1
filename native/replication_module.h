// Differences between ps: what is owed, who brings it, what takes it.
#pragma once
#include <nanobind/nanobind.h>

#include "arrays.h"

namespace everstep {

void bind_replication(nb::module_& m);

}  // namespace everstep
