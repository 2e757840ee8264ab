// What Python hands over in bulk: buffers of items of one width.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvasir {

namespace py = pybind11;

// A one-dimensional contiguous buffer of items of `width` bytes, held while this lives.
class Items {
 public:
  Items(const py::handle &object, std::size_t width, const char *what, bool writable = false) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) != 0) {
      PyErr_Clear();
      fail(what, width);
    }
    held_ = true;
    const bool raw = view_.itemsize == 1 && (!view_.format || view_.format[0] == 'B' || view_.format[0] == 'c');
    if (view_.ndim != 1 || (static_cast<std::size_t>(view_.itemsize) != width && !raw) ||
        static_cast<std::size_t>(view_.len) % width || (writable && reinterpret_cast<std::uintptr_t>(view_.buf) % width))
      fail(what, width);
    count_ = static_cast<std::size_t>(view_.len) / width;
  }
  Items(const Items &) = delete;
  Items &operator=(const Items &) = delete;
  ~Items() {
    if (held_) PyBuffer_Release(&view_);
  }

  std::size_t count() const { return count_; }
  const char *data() const { return static_cast<const char *>(view_.buf); }
  void *writable() const { return view_.buf; }

 private:
  [[noreturn]] void fail(const char *what, std::size_t width) {
    if (held_) PyBuffer_Release(&view_);
    held_ = false;
    throw py::value_error(std::string(what) + " must be one contiguous buffer of " + std::to_string(width) +
                          "-byte items");
  }

  Py_buffer view_{};
  bool held_ = false;
  std::size_t count_ = 0;
};

}  // namespace kvasir
