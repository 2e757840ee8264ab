// MessagePack as msgspec writes it; `_figures.pyi` is the contract.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace figures {

namespace py = pybind11;

// Bytes that grow at their end.
class Buffer {
 public:
  explicit Buffer(std::size_t capacity) : bytes_(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(capacity))) {
    if (!bytes_) throw py::error_already_set();
    capacity_ = capacity;
  }
  Buffer(const Buffer &) = delete;
  ~Buffer() { Py_XDECREF(bytes_); }

  std::size_t size() const { return size_; }

  // Where so many bytes are to be written, which count as written.
  char *more(std::size_t count) {
    if (__builtin_expect(capacity_ - size_ < count, 0)) resize(2 * capacity_ + count);
    char *at = PyBytes_AS_STRING(bytes_) + size_;
    size_ += count;
    return at;
  }

  void append(const char *from, std::size_t count) { std::memcpy(more(count), from, count); }

  // What was written; nothing can be written any more.
  py::bytes take() {
    resize(size_);
    return py::reinterpret_steal<py::bytes>(std::exchange(bytes_, nullptr));
  }

 private:
  void resize(std::size_t capacity) {
    if (_PyBytes_Resize(&bytes_, static_cast<Py_ssize_t>(capacity))) throw py::error_already_set();
    capacity_ = capacity;
  }

  PyObject *bytes_;
  std::size_t capacity_ = 0, size_ = 0;
};

class Packer {
 public:
  explicit Packer(py::object encode) : encode_(std::move(encode)) {}

  // All values, one after the other, and where each begins and the last ends, as uint64.
  py::tuple of(const py::object &values) {
    const auto listed = py::reinterpret_steal<py::object>(PySequence_Fast(values.ptr(), "values must be a sequence"));
    if (!listed) throw py::error_already_set();
    const py::ssize_t count = PySequence_Fast_GET_SIZE(listed.ptr());
    Buffer out(expected_);
    std::vector<std::uint64_t> ends(static_cast<std::size_t>(count) + 1);
    for (py::ssize_t at = 0; at < count; ++at) {
      write(out, PySequence_Fast_GET_ITEM(listed.ptr(), at));
      ends[static_cast<std::size_t>(at) + 1] = out.size();
    }
    // The next are probably as many and as large.
    expected_ = out.size() + out.size() / 8 + 64;
    const char *bounds = reinterpret_cast<const char *>(ends.data());
    return py::make_tuple(out.take(), py::bytes(bounds, ends.size() * sizeof(std::uint64_t)));
  }

 private:
  struct Field {
    std::string key;  // packed
    Py_ssize_t offset;
  };
  struct Fields {
    py::object type;  // kept, so that no other has its address
    bool plain = false;
    std::vector<Field> fields;
  };

  void write(Buffer &out, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyUnicode_Type) return text(out, value);
    if (type == &PyFloat_Type) return number(out, PyFloat_AS_DOUBLE(value));
    if (type == &PyLong_Type) return integer(out, value);
    if (value == Py_None) return byte(out, 0xc0);
    if (type == &PyBool_Type) return byte(out, value == Py_True ? 0xc3 : 0xc2);
    if (type == &PyBytes_Type)
      return counted(out, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), 0, 0, {0xc4, 0xc5, 0xc6});
    if (PyTuple_Check(value) || type == &PyList_Type) return array(out, value);
    const Fields &found = fields_of(type);
    if (found.plain) return map(out, value, found);
    other(out, value);
  }

  static void byte(Buffer &out, unsigned value) { *out.more(1) = static_cast<char>(value); }

  static std::uint8_t swapped(std::uint8_t value) { return value; }
  static std::uint16_t swapped(std::uint16_t value) { return __builtin_bswap16(value); }
  static std::uint32_t swapped(std::uint32_t value) { return __builtin_bswap32(value); }
  static std::uint64_t swapped(std::uint64_t value) { return __builtin_bswap64(value); }

  template <typename T>
  static void big_endian(Buffer &out, unsigned head, T value) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the engine's processors are little-endian");
    char *at = out.more(1 + sizeof value);
    *at = static_cast<char>(head);
    const T turned = swapped(value);
    std::memcpy(at + 1, &turned, sizeof turned);
  }

  static void number(Buffer &out, double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    big_endian(out, 0xcb, bits);
  }

  void integer(Buffer &out, PyObject *value) {
    int overflow = 0;
    const long long found = PyLong_AsLongLongAndOverflow(value, &overflow);
    // Those beyond are rare, and too large ones an error.
    if (overflow) return other(out, value);
    if (found >= 0) {
      const auto size = static_cast<std::uint64_t>(found);
      if (size < 0x80) return byte(out, static_cast<unsigned>(size));
      if (size <= 0xff) return big_endian(out, 0xcc, static_cast<std::uint8_t>(size));
      if (size <= 0xffff) return big_endian(out, 0xcd, static_cast<std::uint16_t>(size));
      if (size <= 0xffffffff) return big_endian(out, 0xce, static_cast<std::uint32_t>(size));
      return big_endian(out, 0xcf, size);
    }
    const auto bits = static_cast<std::uint64_t>(found);
    if (found >= -32) return byte(out, static_cast<unsigned>(bits & 0xff));
    if (found >= INT8_MIN) return big_endian(out, 0xd0, static_cast<std::uint8_t>(bits));
    if (found >= INT16_MIN) return big_endian(out, 0xd1, static_cast<std::uint16_t>(bits));
    if (found >= INT32_MIN) return big_endian(out, 0xd2, static_cast<std::uint32_t>(bits));
    big_endian(out, 0xd3, bits);
  }

  struct Heads {
    unsigned one, two, four;  // of a length in so many bytes; 0 if there is none
  };

  static void length(Buffer &out, Py_ssize_t size, unsigned fixed, Py_ssize_t below, const Heads &heads) {
    const auto count = static_cast<std::uint64_t>(size);
    if (size < below) return byte(out, fixed | static_cast<unsigned>(count));
    if (heads.one && count <= 0xff) return big_endian(out, heads.one, static_cast<std::uint8_t>(count));
    if (count <= 0xffff) return big_endian(out, heads.two, static_cast<std::uint16_t>(count));
    if (count <= 0xffffffff) return big_endian(out, heads.four, static_cast<std::uint32_t>(count));
    throw py::value_error("more than MessagePack can count");
  }

  static void counted(Buffer &out, const char *from, Py_ssize_t size, unsigned fixed, Py_ssize_t below,
                      const Heads &heads) {
    length(out, size, fixed, below, heads);
    out.append(from, static_cast<std::size_t>(size));
  }

  static void text(Buffer &out, PyObject *value) {
    if (PyUnicode_IS_COMPACT_ASCII(value)) {
      const auto *found = reinterpret_cast<const char *>(PyUnicode_1BYTE_DATA(value));
      return counted(out, found, PyUnicode_GET_LENGTH(value), 0xa0, 32, {0xd9, 0xda, 0xdb});
    }
    Py_ssize_t size = 0;
    const char *found = PyUnicode_AsUTF8AndSize(value, &size);
    if (!found) throw py::error_already_set();
    counted(out, found, size, 0xa0, 32, {0xd9, 0xda, 0xdb});
  }

  void array(Buffer &out, PyObject *value) {
    const Deeper deeper;
    length(out, PySequence_Fast_GET_SIZE(value), 0x90, 16, {0, 0xdc, 0xdd});
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(value); ++at)
      write(out, PySequence_Fast_GET_ITEM(value, at));
  }

  void map(Buffer &out, PyObject *value, const Fields &found) {
    const Deeper deeper;
    length(out, static_cast<Py_ssize_t>(found.fields.size()), 0x80, 16, {0, 0xde, 0xdf});
    for (const Field &each : found.fields) {
      PyObject *held = *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(value) + each.offset);
      if (!held) throw py::attribute_error("a field has no value");
      out.append(each.key.data(), each.key.size());
      write(out, held);
    }
  }

  void other(Buffer &out, PyObject *value) {
    const py::object made = encode_(py::handle(value));
    if (!PyBytes_Check(made.ptr())) throw py::type_error("what is encoded must be bytes");
    out.append(PyBytes_AS_STRING(made.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(made.ptr())));
  }

  // Structs of msgspec without options that change what is written.
  const Fields &fields_of(PyTypeObject *type) {
    const auto known = types_.find(type);
    if (known != types_.end()) return known->second;
    Fields &made = types_[type];
    made.type = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject *>(type));
    const py::object config = py::getattr(made.type, "__struct_config__", py::none());
    if (config.is_none()) return made;
    for (const char *option : {"array_like", "omit_defaults"})
      if (config.attr(option).cast<bool>()) return made;
    if (!config.attr("tag").is_none()) return made;
    const py::tuple names = made.type.attr("__struct_fields__"), keys = made.type.attr("__struct_encode_fields__");
    for (std::size_t at = 0; at < names.size(); ++at) {
      const py::object member = made.type.attr(py::object(names[at]));
      if (Py_TYPE(member.ptr()) != &PyMemberDescr_Type) return made;
      const PyMemberDef *slot = reinterpret_cast<PyMemberDescrObject *>(member.ptr())->d_member;
      if (slot->type != T_OBJECT_EX) return made;
      Buffer key(64);
      text(key, py::object(keys[at]).ptr());
      made.fields.push_back({std::string(key.take()), slot->offset});
    }
    made.plain = true;
    return made;
  }

  struct Deeper {
    Deeper() {
      if (Py_EnterRecursiveCall(" while a value is packed")) throw py::error_already_set();
    }
    ~Deeper() { Py_LeaveRecursiveCall(); }
  };

  py::object encode_;
  std::size_t expected_ = 1024;
  std::unordered_map<PyTypeObject *, Fields> types_;
};

}  // namespace figures
