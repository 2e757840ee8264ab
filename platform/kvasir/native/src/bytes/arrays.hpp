// What is read of arrays of numpy without a call of its own for each of them.
#pragma once

#include <pybind11/pybind11.h>

namespace kvasir {

void bind_arrays(pybind11::module_ &m);

}  // namespace kvasir
