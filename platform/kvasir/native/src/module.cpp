// The native half of kvasir.native; `_native.pyi` is its contract, `_twin.py` the same in Python.
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "xxh64.hpp"

namespace py = pybind11;

namespace {

py::list chain_hashes(const py::buffer &tokens, std::size_t block_size, std::uint64_t root) {
  if (block_size == 0) throw py::value_error("block_size must be at least 1");
  const py::buffer_info info = tokens.request();
  if (info.itemsize != 4 || info.ndim != 1 || (info.size > 1 && info.strides[0] != 4))
    throw py::value_error("tokens must be one contiguous buffer of uint32");
  const auto *bytes = static_cast<const unsigned char *>(info.ptr);
  const std::size_t blocks = static_cast<std::size_t>(info.size) / block_size;
  py::list chain(blocks);
  std::uint64_t parent = root;
  for (std::size_t i = 0; i < blocks; ++i) {
    parent = kvasir::Xxh64::of(parent, bytes + i * block_size * 4, block_size * 4);
    chain[i] = parent;
  }
  return chain;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.def("chain_hashes", &chain_hashes, py::arg("tokens"), py::arg("block_size"), py::arg("root"));
}
