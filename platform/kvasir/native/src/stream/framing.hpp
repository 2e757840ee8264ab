// The bytes of one streamed piece on a client's connection: see frame_piece and http_chunk in _native.pyi.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

namespace kvasir {

class Framer {
 public:
  // `before`, `text` (valid UTF-8) as a JSON string, and `after`, in chunked coding if `chunked`. The result
  // lives until the next call.
  std::string_view frame(std::string_view before, std::string_view text, std::string_view after, bool chunked);
  // `data`, not empty, in chunked coding.
  std::string_view chunk(std::string_view data);

 private:
  std::string quoted_, frame_;
};

void bind_framing(pybind11::module_ &m);

}  // namespace kvasir
