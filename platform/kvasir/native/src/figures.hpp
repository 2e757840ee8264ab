// Numbers of many Python objects as columns, for arithmetic on all of them at once.
#pragma once

#include <pybind11/pybind11.h>

namespace kvasir {

void bind_figures(pybind11::module_ &m);

}  // namespace kvasir
