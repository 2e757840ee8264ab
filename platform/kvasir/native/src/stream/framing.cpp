#include "framing.hpp"

#include <algorithm>
#include <cstddef>

namespace kvasir {

namespace py = pybind11;

namespace {

constexpr char kHex[] = "0123456789abcdef";

bool plain(char c) { return static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\'; }

// Characters with an escape of two characters, and its second one.
constexpr std::string_view kEscaped = "\"\\\b\f\n\r\t", kEscapes = "\"\\bfnrt";

void escape(char c, std::string &out) {
  out.push_back('\\');
  const std::size_t at = kEscaped.find(c);
  if (at != std::string_view::npos) {
    out.push_back(kEscapes[at]);
    return;
  }
  out.append("u00");
  out.push_back(kHex[c >> 4]);
  out.push_back(kHex[c & 15]);
}

// Writes `text`, valid UTF-8, to `out` as a JSON string.
void quote(std::string_view text, std::string &out) {
  out.assign(1, '"');
  for (auto at = text.begin(); at != text.end();) {
    const auto end = std::find_if_not(at, text.end(), plain);
    out.append(at, end);
    at = end;
    if (at != text.end()) escape(*at++, out);
  }
  out.push_back('"');
}

void append_size(std::size_t value, std::string &out) {
  char digits[16];
  std::size_t count = 0;
  do digits[count++] = kHex[value & 15];
  while (value >>= 4);
  while (count) out.push_back(digits[--count]);
  out.append("\r\n");
}

Framer &framer() {
  thread_local Framer kept;
  return kept;
}

py::bytes as_bytes(std::string_view data) { return py::bytes(data.data(), data.size()); }

}  // namespace

std::string_view Framer::frame(std::string_view before, std::string_view text, std::string_view after,
                               bool chunked) {
  quote(text, quoted_);
  frame_.clear();
  if (chunked) append_size(before.size() + quoted_.size() + after.size(), frame_);
  frame_.append(before).append(quoted_).append(after);
  if (chunked) frame_.append("\r\n");
  return frame_;
}

std::string_view Framer::chunk(std::string_view data) {
  frame_.clear();
  append_size(data.size(), frame_);
  frame_.append(data).append("\r\n");
  return frame_;
}

void bind_framing(py::module_ &m) {
  m.def(
      "frame_piece",
      [](const py::bytes &before, const py::str &text, const py::bytes &after, bool chunked) {
        Py_ssize_t size = 0;
        const char *data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
        if (!data) throw py::error_already_set();
        return as_bytes(
            framer().frame(before, std::string_view(data, static_cast<std::size_t>(size)), after, chunked));
      },
      py::arg("before"), py::arg("text"), py::arg("after"), py::arg("chunked"));
  m.def(
      "http_chunk", [](const py::bytes &data) { return as_bytes(framer().chunk(data)); }, py::arg("data"));
}

}  // namespace kvasir
