// A reader of the needed subset of msgpack: https://github.com/msgpack/msgpack/blob/master/spec.md. Reads no
// byte past the end and at most kDepth levels of nesting. Throws std::invalid_argument.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace kvasir {

class MsgPack {
 public:
  MsgPack(const char *data, std::size_t size)
      : at_(reinterpret_cast<const unsigned char *>(data)), end_(at_ + size), begin_(at_) {}

  bool done() const { return at_ == end_; }

  std::size_t array() { return container(0x90, 0xdc, "an array"); }
  std::size_t map() { return container(0x80, 0xde, "a map"); }
  bool is_map() { return (peek() & 0xf0) == 0x80 || peek() == 0xde || peek() == 0xdf; }
  bool is_array() { return (peek() & 0xf0) == 0x90 || peek() == 0xdc || peek() == 0xdd; }
  bool is_string() { return (peek() & 0xe0) == 0xa0 || (peek() >= 0xd9 && peek() <= 0xdb); }
  bool is_bytes() { return peek() >= 0xc4 && peek() <= 0xc6; }
  bool nil() {
    if (peek() != 0xc0) return false;
    ++at_;
    return true;
  }

  std::uint64_t integer() {
    const unsigned char type = byte();
    if (type < 0x80) return type;
    switch (type) {
      case 0xcc: return big(1);
      case 0xcd: return big(2);
      case 0xce: return big(4);
      case 0xcf: return big(8);
      case 0xd3: return big(8);  // a negative hash is its two's complement
      default: fail("an unsigned integer");
    }
  }
  // Token ids are most of an event. Branches on their lengths, which follow no order, would be predicted wrongly half of
  // the time, so an id is decoded without one where eight bytes can be read.
  void tokens(std::uint32_t *out, std::size_t count) {
    std::size_t i = 0;
    for (; i < count && end_ - at_ >= 8; ++i) {
      const bool small = *at_ < 0x80;
      if (!small && (*at_ < 0xcc || *at_ > 0xce)) fail("a token id");
      const unsigned bytes = small ? 0 : 1u << (*at_ - 0xcc);
      out[i] = static_cast<std::uint32_t>((big_endian(at_) << (small ? 0 : 8)) >> (small ? 56 : 64 - 8 * bytes));
      at_ += 1 + bytes;
    }
    for (; i < count; ++i) {
      const unsigned char type = byte();
      std::uint64_t value;
      if (type < 0x80) value = type;
      else if (type == 0xcd) value = big(2);
      else if (type == 0xce) value = big(4);
      else if (type == 0xcc) value = big(1);
      else fail("a token id");
      out[i] = static_cast<std::uint32_t>(value);
    }
  }
  std::string_view string() {
    const unsigned char type = byte();
    if ((type & 0xe0) == 0xa0) return raw(type & 0x1f);
    if (type == 0xd9) return raw(big(1));
    if (type == 0xda) return raw(big(2));
    if (type == 0xdb) return raw(big(4));
    fail("a string");
  }
  std::string_view bytes() {
    const unsigned char type = byte();
    if (type == 0xc4) return raw(big(1));
    if (type == 0xc5) return raw(big(2));
    if (type == 0xc6) return raw(big(4));
    fail("bytes");
  }
  void skip(unsigned depth = 0) {
    if (depth > kDepth) fail("less nesting");
    if (is_map()) {
      for (std::size_t n = map(); n > 0; --n) skip(depth + 1), skip(depth + 1);
    } else if (is_array()) {
      for (std::size_t n = array(); n > 0; --n) skip(depth + 1);
    } else if (is_string()) {
      string();
    } else if (is_bytes()) {
      bytes();
    } else {
      scalar();
    }
  }
  static std::uint64_t big_endian(const void *at) {
    std::uint64_t word;
    std::memcpy(&word, at, 8);
    return __builtin_bswap64(word);
  }
  [[noreturn]] void fail(const char *expected) const {
    throw std::invalid_argument("event: expected " + std::string(expected) + " at byte " +
                                std::to_string(at_ - begin_));
  }

 private:
  static constexpr unsigned kDepth = 16;

  unsigned char peek() const {
    if (at_ == end_) fail("more");
    return *at_;
  }
  unsigned char byte() {
    const unsigned char value = peek();
    ++at_;
    return value;
  }
  std::uint64_t big(unsigned size) {
    if (static_cast<std::size_t>(end_ - at_) < size) fail("more");
    std::uint64_t value = 0;
    for (unsigned i = 0; i < size; ++i) value = value << 8 | at_[i];
    at_ += size;
    return value;
  }
  std::string_view raw(std::uint64_t size) {
    if (static_cast<std::uint64_t>(end_ - at_) < size) fail("more");
    const std::string_view view(reinterpret_cast<const char *>(at_), size);
    at_ += size;
    return view;
  }
  std::size_t container(unsigned char fixed, unsigned char wide, const char *what) {
    const unsigned char type = byte();
    std::uint64_t size;
    if ((type & 0xf0) == fixed) size = type & 0x0f;
    else if (type == wide) size = big(2);
    else if (type == wide + 1) size = big(4);
    else fail(what);
    // Each item takes at least one byte: a larger count is malformed, and must not allocate memory.
    if (size > static_cast<std::uint64_t>(end_ - at_)) fail("fewer items");
    return size;
  }
  void scalar() {
    const unsigned char type = byte();
    if (type < 0x80 || type >= 0xe0 || type == 0xc0 || type == 0xc2 || type == 0xc3) return;
    switch (type) {
      case 0xcc: case 0xd0: big(1); return;
      case 0xcd: case 0xd1: big(2); return;
      case 0xca: case 0xce: case 0xd2: big(4); return;
      case 0xcb: case 0xcf: case 0xd3: big(8); return;
      case 0xd4: raw(2); return;
      case 0xd5: raw(3); return;
      case 0xd6: raw(5); return;
      case 0xd7: raw(9); return;
      case 0xd8: raw(17); return;
      case 0xc7: raw(big(1) + 1); return;
      case 0xc8: raw(big(2) + 1); return;
      case 0xc9: raw(big(4) + 1); return;
      default: fail("a value");
    }
  }

  const unsigned char *at_, *end_, *begin_;
};

}  // namespace kvasir
