// KV over a connected socket: see send_pieces and receive_pieces in _native.pyi.
#pragma once

#include <pybind11/pybind11.h>

namespace kvasir {

void bind_sockets(pybind11::module_ &m);

}  // namespace kvasir
