// Reads the few fields of protobuf messages that a running stream needs, without copying, and writes some. Whoever calls has had
// the message checked by protobuf itself; bounds are kept all the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvasir {

// One message: `next` steps through its fields. After a step that fails, `broken` tells whether that was the end.
class Fields {
 public:
  explicit Fields(std::string_view message) : at_(message.data()), end_(message.data() + message.size()) {}

  bool next() {
    if (at_ == end_) return false;
    std::uint64_t key = 0;
    if (!varint(key)) return fail();
    number = static_cast<std::uint32_t>(key >> 3);
    kind = static_cast<unsigned>(key & 7);
    std::uint64_t size = 0;
    switch (kind) {
      case kVarint:
        return varint(value) || fail();
      case kFixed64:
        size = 8;
        break;
      case kBytes:
        if (!varint(size)) return fail();
        break;
      case kFixed32:
        size = 4;
        break;
      default:
        return fail();
    }
    if (size > static_cast<std::uint64_t>(end_ - at_)) return fail();
    bytes = std::string_view(at_, static_cast<std::size_t>(size));
    at_ += size;
    return true;
  }

  // The next item of a packed field; `at_` is only at its end.
  bool item(std::uint64_t &out) { return at_ != end_ && (varint(out) || fail()); }

  bool broken() const { return broken_; }

  static constexpr unsigned kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;
  std::uint32_t number = 0;
  unsigned kind = 0;
  std::uint64_t value = 0;
  std::string_view bytes;

 private:
  bool fail() {
    broken_ = true;
    return false;
  }
  bool varint(std::uint64_t &out) {
    std::uint64_t read = 0;
    for (unsigned shift = 0; shift < 64 && at_ != end_; shift += 7) {
      const auto byte = static_cast<unsigned char>(*at_++);
      read |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) {
        out = read;
        return true;
      }
    }
    return false;
  }

  const char *at_;
  const char *end_;
  bool broken_ = false;
};

inline void append_varint(std::uint64_t value, std::string &out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

inline std::size_t varint_size(std::uint64_t value) {
  std::size_t size = 1;
  while (value >>= 7) ++size;
  return size;
}

inline void append_field(std::uint32_t number, std::string_view bytes, std::string &out) {
  append_varint(number << 3 | Fields::kBytes, out);
  append_varint(bytes.size(), out);
  out.append(bytes);
}

}  // namespace kvasir
