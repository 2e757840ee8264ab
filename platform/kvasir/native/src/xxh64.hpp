// XXH64 as specified in xxHash's "XXHash fast digest algorithm" document (Yann Collet, 2014).
// Written out here because the chain hashes short runs, where a call into a shared library costs as
// much as the hash. Little-endian hosts only, checked at compile time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "block hashes are defined over little-endian bytes");

namespace kvasir {

class Xxh64 {
  static constexpr std::uint64_t P1 = 0x9E3779B185EBCA87ULL, P2 = 0xC2B2AE3D27D4EB4FULL,
                                 P3 = 0x165667B19E3779F9ULL, P4 = 0x85EBCA77C2B2AE63ULL,
                                 P5 = 0x27D4EB2F165667C5ULL;

  static std::uint64_t rotl(std::uint64_t x, int r) { return (x << r) | (x >> (64 - r)); }
  static std::uint64_t round(std::uint64_t acc, std::uint64_t lane) { return rotl(acc + lane * P2, 31) * P1; }
  static std::uint64_t merge(std::uint64_t acc, std::uint64_t lane) { return (acc ^ round(0, lane)) * P1 + P4; }
  static std::uint64_t read64(const unsigned char *p) { std::uint64_t v; std::memcpy(&v, p, 8); return v; }
  static std::uint32_t read32(const unsigned char *p) { std::uint32_t v; std::memcpy(&v, p, 4); return v; }

 public:
  // The digest of `head` (8 bytes) followed by `size` bytes at `body`, with `size` a multiple of 4.
  // Keeping the head apart saves copying the parent's hash in front of every block's tokens.
  static std::uint64_t of(std::uint64_t head, const unsigned char *body, std::size_t size) {
    const std::size_t total = size + 8;
    const unsigned char *p = body, *end = body + size;
    std::uint64_t h;
    bool head_pending = true;
    if (total >= 32) {
      std::uint64_t v1 = P1 + P2, v2 = P2, v3 = 0, v4 = 0 - P1;
      v1 = round(v1, head);
      v2 = round(v2, read64(p));
      v3 = round(v3, read64(p + 8));
      v4 = round(v4, read64(p + 16));
      p += 24;
      head_pending = false;
      for (; end - p >= 32; p += 32) {
        v1 = round(v1, read64(p));
        v2 = round(v2, read64(p + 8));
        v3 = round(v3, read64(p + 16));
        v4 = round(v4, read64(p + 24));
      }
      h = rotl(v1, 1) + rotl(v2, 7) + rotl(v3, 12) + rotl(v4, 18);
      h = merge(merge(merge(merge(h, v1), v2), v3), v4);
    } else {
      h = P5;
    }
    h += total;
    if (head_pending) h = rotl(h ^ round(0, head), 27) * P1 + P4;
    for (; end - p >= 8; p += 8) h = rotl(h ^ round(0, read64(p)), 27) * P1 + P4;
    for (; end - p >= 4; p += 4) h = rotl(h ^ (read32(p) * P1), 23) * P2 + P3;
    h ^= h >> 33;
    h *= P2;
    h ^= h >> 29;
    h *= P3;
    return h ^ (h >> 32);
  }
};

}  // namespace kvasir
