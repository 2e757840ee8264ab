// Progress of streams, which the fast path and the ordinary path both add to: see StreamTokens and StreamGaps
// in _native.pyi.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "items.hpp"

namespace kvasir {

// What the client has of one choice: the number of its tokens, their ids from `start` on, and its characters.
class StreamTokens {
 public:
  explicit StreamTokens(std::uint64_t start) : start_(start) {}

  void add(const std::vector<std::uint32_t> &ids, std::uint64_t text) {
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    characters += text;
  }
  std::uint64_t count() const { return start_ + ids_.size(); }
  // Token ids `from` to `to` as an array('I'), within what is held.
  py::object slice(std::uint64_t from, std::uint64_t to) const {
    const std::size_t begin = std::min<std::uint64_t>(from < start_ ? 0 : from - start_, ids_.size());
    const std::size_t end = std::min<std::uint64_t>(to < start_ ? 0 : to - start_, ids_.size());
    py::object made = py::module_::import("array").attr("array")("I");
    if (end > begin)
      made.attr("frombytes")(
          py::bytes(reinterpret_cast<const char *>(ids_.data() + begin), (end - begin) * sizeof(std::uint32_t)));
    return made;
  }
  // Lanes that were added before send nothing more.
  void fence() { ++epoch_; }
  std::uint64_t epoch() const { return epoch_; }

  std::uint64_t characters = 0;

 private:
  std::uint64_t start_, epoch_ = 0;
  std::vector<std::uint32_t> ids_;
};

// How many tokens of one choice have been measured, and when the last came; counts the gaps in a histogram.
class StreamGaps {
 public:
  StreamGaps(const py::object &bounds, const py::object &counts, const py::object &total)
      : bounds_(bounds, 8, "bounds"), counts_(counts, 8, "counts", true), total_(total, 8, "total", true) {
    if (counts_.count() != bounds_.count() + 1 || total_.count() != 1)
      throw py::value_error("a histogram has a count more than bounds, and one total");
  }

  void add(std::size_t tokens, double now) {
    if (!tokens) return;
    if (count) {
      const double gap = (now - last_s) / static_cast<double>(tokens);
      const auto *bounds = reinterpret_cast<const double *>(bounds_.data());
      auto *counts = static_cast<std::uint64_t *>(counts_.writable());
      counts[std::lower_bound(bounds, bounds + bounds_.count(), gap) - bounds] += tokens;
      *static_cast<double *>(total_.writable()) += gap * static_cast<double>(tokens);
    }
    count += tokens;
    last_s = now;
  }

  std::uint64_t count = 0;
  double last_s = 0.0;

 private:
  Items bounds_, counts_, total_;
};

void bind_progress(py::module_ &m);

}  // namespace kvasir
