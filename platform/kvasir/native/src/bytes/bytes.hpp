// Copies and checksums of KV bytes in many pieces per call: see copy_pieces and checksum_pieces in
// _native.pyi.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvasir {

inline constexpr std::uint64_t kChecksumSeed = 0x243F6A8885A308D3ULL;
inline constexpr std::uint64_t kChecksumFactor = 0xD1342543DE82EF95ULL;
inline constexpr std::size_t kChecksumLanes = std::size_t{1} << 20;
// Lanes whose weights are a table's; those of the next tiles are multiples of them, so that the table stays
// in the CPU's first cache.
inline constexpr std::size_t kChecksumTile = 1024;
inline constexpr std::size_t kLaneBytes = 4;

// 8-byte items in memory that may be unaligned.
class Words {
 public:
  Words(const char *data, std::size_t count) : data_(data), count_(count) {}

  std::size_t size() const { return count_; }
  std::uint64_t operator[](std::size_t i) const {
    std::uint64_t word;
    std::memcpy(&word, data_ + 8 * i, 8);
    return word;
  }

 private:
  const char *data_;
  std::size_t count_;
};

// The weight of a piece's lane. Thread-safe.
std::uint64_t checksum_weight(std::size_t lane);

// What `lanes` lanes at `bytes` add to the sum of a piece whose lane number `first`, a multiple of
// kChecksumTile, they begin with.
std::uint64_t weigh_lanes(const unsigned char *bytes, std::size_t lanes, std::size_t first);

// The sum of a group after a piece with the sum `piece`.
inline std::uint64_t add_piece(std::uint64_t sum, std::uint64_t piece) { return sum * kChecksumFactor + piece + 1; }

// All throw std::invalid_argument before any byte is read or written.
void copy_pieces(const Words &sources, const Words &targets, const Words &lengths);
// `out` has room for one checksum of each group.
void checksum_pieces(const Words &addresses, const Words &lengths, std::size_t group, std::uint64_t *out);

}  // namespace kvasir
