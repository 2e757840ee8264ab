// Deltas for the client of another process: see Relay in _native.pyi.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "piece.hpp"
#include "wire.hpp"

namespace kvasir {

namespace py = pybind11;

// Collects deltas for another process in one message; `wake` is called when the first one is added.
class Relay {
 public:
  explicit Relay(py::object wake) : wake_(std::move(wake)) {}

  void add(std::string_view request, const Piece &piece) {
    const bool first = batch_.empty();
    const std::size_t offset = piece.offset ? 1 + varint_size(piece.offset) : 0;
    const auto field = [](std::string_view bytes) {
      return bytes.empty() ? 0 : 1 + varint_size(bytes.size()) + bytes.size();
    };
    append_varint(1 << 3 | Fields::kBytes, batch_);
    append_varint(field(request) + offset + field(piece.ids) + field(piece.text), batch_);
    append_field(1, request, batch_);
    if (piece.offset) {
      batch_.push_back(3 << 3 | Fields::kVarint);
      append_varint(piece.offset, batch_);
    }
    if (!piece.ids.empty()) append_field(4, piece.ids, batch_);
    if (!piece.text.empty()) append_field(5, piece.text, batch_);
    if (first) wake_();
  }

  // Empties the buffer into a SessionResponse with a StepBatch.
  py::bytes take() {
    std::string frame, message;
    append_field(3, batch_, frame);
    append_field(2, frame, message);
    batch_.clear();
    return py::bytes(message);
  }

  std::size_t size() const { return batch_.size(); }

 private:
  py::object wake_;
  std::string batch_;
};

}  // namespace kvasir
