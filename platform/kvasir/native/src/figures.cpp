#include "figures.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <limits>
#include <string>
#include <vector>

namespace kvasir {

namespace py = pybind11;

namespace {

class Figures {
 public:
  explicit Figures(const std::vector<std::string> &paths) {
    for (const std::string &path : paths) {
      std::vector<py::object> names;
      for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
        end = path.find('.', begin);
        const std::string name = path.substr(begin, end == std::string::npos ? end : end - begin);
        PyObject *interned = PyUnicode_InternFromString(name.c_str());
        if (!interned) throw py::error_already_set();
        names.push_back(py::reinterpret_steal<py::object>(interned));
      }
      paths_.push_back(std::move(names));
    }
  }

  py::array_t<double> of(const py::sequence &objects) const {
    const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(objects.ptr(), "objects must be a sequence"));
    if (!fast) throw py::error_already_set();
    // A property may run code that changes a list.
    const auto held = py::reinterpret_steal<py::object>(PySequence_Tuple(fast.ptr()));
    if (!held) throw py::error_already_set();
    const py::ssize_t count = PyTuple_GET_SIZE(held.ptr());
    py::array_t<double> columns({static_cast<py::ssize_t>(paths_.size()), count});
    double *out = columns.mutable_data();
    for (py::ssize_t at = 0; at < count; ++at)
      for (std::size_t path = 0; path < paths_.size(); ++path)
        out[static_cast<py::ssize_t>(path) * count + at] = number(PyTuple_GET_ITEM(held.ptr(), at), paths_[path]);
    return columns;
  }

 private:
  static double number(PyObject *object, const std::vector<py::object> &names) {
    py::object found = py::reinterpret_borrow<py::object>(object);
    for (const py::object &name : names) {
      found = py::reinterpret_steal<py::object>(PyObject_GetAttr(found.ptr(), name.ptr()));
      if (!found) throw py::error_already_set();
    }
    if (found.is_none()) return std::numeric_limits<double>::quiet_NaN();
    const double value = PyFloat_AsDouble(found.ptr());
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  std::vector<std::vector<py::object>> paths_;
};

}  // namespace

void bind_figures(py::module_ &m) {
  py::class_<Figures>(m, "Figures")
      .def(py::init<const std::vector<std::string> &>(), py::arg("paths"))
      .def("of", &Figures::of, py::arg("objects"));
}

}  // namespace kvasir
