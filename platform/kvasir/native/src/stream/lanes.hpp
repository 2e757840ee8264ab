// The fast path of plain deltas from a worker's message to the client's socket: see Lane and Fan in _native.pyi.
#pragma once

#include <pybind11/pybind11.h>

namespace kvasir {

void bind_lanes(pybind11::module_ &m);

}  // namespace kvasir
