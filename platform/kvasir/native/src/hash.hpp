// The chain of block names; `_twin.chain_hashes` says what it is made of and where that comes from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "block names are defined over little-endian bytes");

namespace kvasir {

inline constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ULL;

inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

// SplitMix64's finalizer.
inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

inline std::uint64_t read_word(const unsigned char *p, std::size_t bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, p, bytes);
  return word;
}

// What the tokens of one block contribute; it does not depend on the parent, so that the digests of
// neighbouring blocks are computed while the chain waits for its multiplications.
inline std::uint64_t digest(const unsigned char *tokens, std::size_t block_size) {
  std::uint64_t sum = block_size, low_key = kGolden, high_key = 2 * kGolden;
  std::size_t left = block_size * 4;
  for (; left >= 16; left -= 16, tokens += 16) {
    sum += fold(read_word(tokens, 8) ^ low_key, read_word(tokens + 8, 8) ^ high_key);
    low_key += 2 * kGolden;
    high_key += 2 * kGolden;
  }
  if (left) {
    const std::uint64_t low = read_word(tokens, left < 8 ? left : 8);
    const std::uint64_t high = left > 8 ? read_word(tokens + 8, left - 8) : 0;
    sum += fold(low ^ low_key, high ^ high_key);
  }
  return sum;
}

inline std::uint64_t chain(std::uint64_t parent, const unsigned char *tokens, std::size_t block_size) {
  return mix(parent ^ digest(tokens, block_size));
}

inline void chain(std::uint64_t root, const unsigned char *tokens, std::size_t block_size, std::size_t blocks,
                  std::uint64_t *names) {
  for (std::size_t i = 0; i < blocks; ++i, tokens += block_size * 4)
    names[i] = root = chain(root, tokens, block_size);
}

}  // namespace kvasir
