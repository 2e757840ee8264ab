// Figures of many objects or arrays; `_figures.pyi` is the contract.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

py::bytes joined(const py::object &arrays) {
  const auto listed = py::reinterpret_steal<py::object>(PySequence_Fast(arrays.ptr(), "arrays must be a sequence"));
  if (!listed) throw py::error_already_set();
  const py::ssize_t count = PySequence_Fast_GET_SIZE(listed.ptr());
  std::vector<py::array> held;
  held.reserve(static_cast<std::size_t>(count));
  py::ssize_t total = 0;
  for (py::ssize_t at = 0; at < count; ++at) {
    const py::handle each = PySequence_Fast_GET_ITEM(listed.ptr(), at);
    if (!py::isinstance<py::array>(each)) throw py::type_error("only arrays can be joined");
    auto array = py::reinterpret_borrow<py::array>(each);
    if (!(array.flags() & (py::array::c_style | py::array::f_style)))
      array = py::array::ensure(array, py::array::c_style);
    total += array.nbytes();
    held.push_back(std::move(array));
  }
  auto made = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, total));
  if (!made) throw py::error_already_set();
  char *to = PyBytes_AS_STRING(made.ptr());
  for (const auto &array : held) {
    const py::ssize_t bytes = array.nbytes();
    std::memcpy(to, array.data(), static_cast<std::size_t>(bytes));
    to += bytes;
  }
  return made;
}

// One attribute of objects that are mostly of one class: of a class with slots, where it lies in its objects.
class Attribute {
 public:
  explicit Attribute(const std::string &name) : name_(py::reinterpret_steal<py::object>(interned(name))) {}

  py::object of(const py::object &object) {
    PyTypeObject *type = Py_TYPE(object.ptr());
    if (type != reinterpret_cast<PyTypeObject *>(type_.ptr())) find(type);
    if (slot_ >= 0) {
      PyObject *held = *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object.ptr()) + slot_);
      if (held) return py::reinterpret_borrow<py::object>(held);
    }
    return object.attr(name_);
  }

 private:
  static PyObject *interned(const std::string &name) {
    PyObject *made = PyUnicode_InternFromString(name.c_str());
    if (!made) throw py::error_already_set();
    return made;
  }

  void find(PyTypeObject *type) {
    type_ = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject *>(type));
    slot_ = -1;
    const py::object found = py::getattr(type_, name_, py::none());
    if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) return;
    const PyMemberDef *member = reinterpret_cast<PyMemberDescrObject *>(found.ptr())->d_member;
    if (member->type == T_OBJECT_EX) slot_ = member->offset;
  }

  py::object name_, type_;
  Py_ssize_t slot_ = -1;
};

class Numbers {
 public:
  explicit Numbers(const py::sequence &paths) {
    std::vector<std::string> before;
    for (const py::handle path : paths) {
      std::vector<std::string> names;
      for (const py::handle name : path.attr("split")(".")) names.push_back(name.cast<std::string>());
      // Of paths into the same object that follow each other, it is looked up once.
      const bool same = names.size() > 1 && before.size() == names.size() &&
                        std::equal(names.begin(), names.end() - 1, before.begin());
      std::vector<Attribute> inner;
      if (!same)
        for (std::size_t at = 0; at + 1 < names.size(); ++at) inner.emplace_back(names[at]);
      paths_.push_back({std::move(inner), Attribute(names.back()), names.size() > 1});
      before = std::move(names);
    }
  }

  py::array_t<double> of(const py::sequence &objects) {
    const py::ssize_t count = static_cast<py::ssize_t>(objects.size());
    py::array_t<double> made({static_cast<py::ssize_t>(paths_.size()), count});
    double *to = made.mutable_data();
    for (py::ssize_t at = 0; at < count; ++at) {
      const py::object object = objects[static_cast<std::size_t>(at)];
      py::object owner;
      for (std::size_t row = 0; row < paths_.size(); ++row) {
        Path &path = paths_[row];
        if (!path.inner.empty()) {
          owner = object;
          for (Attribute &each : path.inner) owner = each.of(owner);
        }
        to[static_cast<py::ssize_t>(row) * count + at] = number(path.last.of(path.nested ? owner : object));
      }
    }
    return made;
  }

 private:
  struct Path {
    std::vector<Attribute> inner;  // empty if it is that of the path before
    Attribute last;
    bool nested;
  };

  static double number(const py::object &value) {
    if (value.is_none()) return std::numeric_limits<double>::quiet_NaN();
    const double found = PyFloat_AsDouble(value.ptr());
    if (found == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return found;
  }

  std::vector<Path> paths_;
};

}  // namespace

PYBIND11_MODULE(_figures, m) {
  m.def("joined", &joined, py::arg("arrays"));
  py::class_<Numbers>(m, "Numbers")
      .def(py::init<const py::sequence &>(), py::arg("paths"))
      .def("of", &Numbers::of, py::arg("objects"));
}
