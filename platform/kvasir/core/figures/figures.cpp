// Figures of many objects or arrays; `_figures.pyi` is the contract.

#include "packing.hpp"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

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

// A path of attributes; `of` is that of an object.
class Path {
 public:
  explicit Path(const std::vector<std::string> &names) {
    for (const std::string &name : names) parts_.emplace_back(name);
  }

  py::object of(py::object object) {
    for (Attribute &each : parts_) object = each.of(object);
    return object;
  }

 private:
  std::vector<Attribute> parts_;
};

std::vector<std::string> parts_of(const py::handle &path) {
  std::vector<std::string> names;
  for (const py::handle name : path.attr("split")(".")) names.push_back(name.cast<std::string>());
  return names;
}

class Arrays {
 public:
  explicit Arrays(const py::sequence &paths) {
    for (const py::handle path : paths) paths_.emplace_back(parts_of(path));
  }

  py::bytes joined(const py::object &object, const py::object &more) {
    const auto listed = py::reinterpret_steal<py::object>(PySequence_Fast(more.ptr(), "arrays must be a sequence"));
    if (!listed) throw py::error_already_set();
    const py::ssize_t count = PySequence_Fast_GET_SIZE(listed.ptr());
    std::vector<py::array> held;
    held.reserve(paths_.size() + static_cast<std::size_t>(count));
    for (Path &each : paths_) held.push_back(contiguous(each.of(object)));
    std::uint64_t columns = 0;
    for (py::ssize_t at = 0; at < count; ++at) {
      held.push_back(contiguous(py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(listed.ptr(), at))));
      if (at < 64 && !(held.back().flags() & py::array::c_style)) columns |= std::uint64_t{1} << at;
    }
    py::ssize_t total = sizeof columns;
    for (const auto &array : held) total += array.nbytes();
    auto made = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, total));
    if (!made) throw py::error_already_set();
    char *to = PyBytes_AS_STRING(made.ptr());
    for (const auto &array : held) {
      const py::ssize_t bytes = array.nbytes();
      std::memcpy(to, array.data(), static_cast<std::size_t>(bytes));
      to += bytes;
    }
    std::memcpy(to, &columns, sizeof columns);
    return made;
  }

 private:
  static py::array contiguous(const py::object &object) {
    if (!py::isinstance<py::array>(object)) throw py::type_error("only arrays can be joined");
    auto array = py::reinterpret_borrow<py::array>(object);
    if (array.flags() & (py::array::c_style | py::array::f_style)) return array;
    return py::array::ensure(array, py::array::c_style);
  }

  std::vector<Path> paths_;
};

class Fields {
 public:
  explicit Fields(const py::sequence &paths) {
    for (const py::handle path : paths) paths_.emplace_back(parts_of(path));
  }

  py::list of(const py::sequence &objects) {
    py::list made(objects.size());
    for (std::size_t at = 0; at < objects.size(); ++at) {
      const py::object object = objects[at];
      py::tuple fields(paths_.size());
      for (std::size_t field = 0; field < paths_.size(); ++field)
        PyTuple_SET_ITEM(fields.ptr(), static_cast<Py_ssize_t>(field), paths_[field].of(object).release().ptr());
      PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(at), fields.release().ptr());
    }
    return made;
  }

 private:
  std::vector<Path> paths_;
};

class Numbers {
 public:
  explicit Numbers(const py::sequence &paths) {
    std::vector<std::string> before;
    for (const py::handle path : paths) {
      const std::vector<std::string> names = parts_of(path);
      // Of paths into the same object that follow each other, it is looked up once.
      const bool same = names.size() > 1 && before.size() == names.size() &&
                        std::equal(names.begin(), names.end() - 1, before.begin());
      std::vector<Attribute> inner;
      if (!same)
        for (std::size_t at = 0; at + 1 < names.size(); ++at) inner.emplace_back(names[at]);
      paths_.push_back({std::move(inner), Attribute(names.back()), names.size() > 1});
      before = names;
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
        Figure &path = paths_[row];
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
  struct Figure {
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

  std::vector<Figure> paths_;
};

}  // namespace

PYBIND11_MODULE(_figures, m) {
  py::class_<Arrays>(m, "Arrays")
      .def(py::init<const py::sequence &>(), py::arg("paths"))
      .def("joined", &Arrays::joined, py::arg("object"), py::arg("more"));
  py::class_<Fields>(m, "Fields")
      .def(py::init<const py::sequence &>(), py::arg("paths"))
      .def("of", &Fields::of, py::arg("objects"));
  py::class_<figures::Packer>(m, "Packer")
      .def(py::init<py::object>(), py::arg("encode"))
      .def("of", &figures::Packer::of, py::arg("values"));
  py::class_<Numbers>(m, "Numbers")
      .def(py::init<const py::sequence &>(), py::arg("paths"))
      .def("of", &Numbers::of, py::arg("objects"));
}
