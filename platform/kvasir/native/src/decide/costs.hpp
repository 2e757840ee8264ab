// The arithmetic of the router's cost model; kvasir_router.decide.cost says what it means.
#pragma once

#include <pybind11/pybind11.h>

namespace kvasir {

void bind_costs(pybind11::module_ &m);

}  // namespace kvasir
