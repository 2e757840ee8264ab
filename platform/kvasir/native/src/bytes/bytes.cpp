#include "bytes.hpp"

#include <algorithm>
#include <stdexcept>

#include "hash.hpp"

// The widest multiplication of the CPU is selected when the module is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define KVASIR_FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVASIR_FOR_EACH_CPU
#endif

namespace kvasir {

namespace {

constexpr std::size_t kTiles = kChecksumLanes / kChecksumTile;
static_assert(kChecksumLanes % kChecksumTile == 0);

// Aligned so that the widest loads never cross cache lines.
struct alignas(64) Weights {
  std::uint64_t of_lane[kChecksumTile];
  std::uint64_t of_tile[kTiles];

  Weights() {
    for (std::size_t i = 0; i < kChecksumTile; ++i) of_lane[i] = mix((i + 1) * kGolden) | 1;
    of_tile[0] = 1;
    for (std::size_t i = 1; i < kTiles; ++i) of_tile[i] = mix((kChecksumTile + i) * kGolden) | 1;
  }
};

const Weights &weights() {
  // Never freed: threads that released the GIL may still read it when the process exits.
  static const Weights *const made = new Weights;
  return *made;
}

inline std::uint64_t lane(const unsigned char *bytes, std::size_t i) {
  std::uint32_t value;
  std::memcpy(&value, bytes + kLaneBytes * i, kLaneBytes);
  return value;
}

KVASIR_FOR_EACH_CPU
std::uint64_t weigh(const unsigned char *bytes, const std::uint64_t *weights, std::size_t lanes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < lanes; ++i) sum += lane(bytes, i) * weights[i];
  return sum;
}

// Four tiles at once: each weight is loaded once for all, and a single stream is half as fast when the bytes
// come from memory.
KVASIR_FOR_EACH_CPU
void weigh_four(const unsigned char *bytes, const std::uint64_t *weights, std::uint64_t *sums) {
  constexpr std::size_t n = kChecksumTile;
  std::uint64_t a = 0, b = 0, c = 0, d = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t weight = weights[i];
    a += lane(bytes, i) * weight;
    b += lane(bytes, i + n) * weight;
    c += lane(bytes, i + 2 * n) * weight;
    d += lane(bytes, i + 3 * n) * weight;
  }
  sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

void require(bool holds, const char *what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace

std::uint64_t checksum_weight(std::size_t lane) {
  const Weights &all = weights();
  return all.of_lane[lane % kChecksumTile] * all.of_tile[lane / kChecksumTile % kTiles];
}

std::uint64_t weigh_lanes(const unsigned char *bytes, std::size_t lanes, std::size_t first) {
  const Weights &all = weights();
  std::size_t tile = first / kChecksumTile, at = 0;
  std::uint64_t sum = 0;
  for (; lanes - at >= 4 * kChecksumTile; at += 4 * kChecksumTile, tile += 4) {
    std::uint64_t four[4];
    weigh_four(bytes + kLaneBytes * at, all.of_lane, four);
    for (std::size_t i = 0; i < 4; ++i) sum += four[i] * all.of_tile[(tile + i) % kTiles];
  }
  for (; at < lanes; at += kChecksumTile, ++tile)
    sum += weigh(bytes + kLaneBytes * at, all.of_lane, std::min(lanes - at, kChecksumTile)) *
           all.of_tile[tile % kTiles];
  return sum;
}

void copy_pieces(const Words &sources, const Words &targets, const Words &lengths) {
  require(sources.size() == targets.size() && sources.size() == lengths.size(),
          "sources, targets and lengths must be of one length");
  for (std::size_t i = 0; i < lengths.size(); ++i)
    require(!lengths[i] || (sources[i] && targets[i]), "a piece has no address");
  for (std::size_t i = 0; i < lengths.size();) {
    const std::uint64_t source = sources[i], target = targets[i];
    std::uint64_t length = lengths[i++];
    if (!length) continue;
    // Pieces adjacent on both sides are one copy; an empty piece may be anywhere.
    for (; i < lengths.size(); ++i) {
      if (!lengths[i]) continue;
      if (sources[i] != source + length || targets[i] != target + length) break;
      length += lengths[i];
    }
    std::memcpy(reinterpret_cast<void *>(target), reinterpret_cast<const void *>(source), length);
  }
}

void checksum_pieces(const Words &addresses, const Words &lengths, std::size_t group, std::uint64_t *out) {
  require(addresses.size() == lengths.size(), "addresses and lengths must be of one length");
  require(group && !(addresses.size() % group), "group must be at least 1 and divide the pieces");
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    require(!(lengths[i] % kLaneBytes), "lengths must be multiples of 4 bytes");
    require(!lengths[i] || addresses[i], "a piece has no address");
  }
  for (std::size_t i = 0; i < lengths.size();) {
    std::uint64_t sum = kChecksumSeed;
    for (const std::size_t end = i + group; i < end; ++i)
      sum = add_piece(sum, weigh_lanes(reinterpret_cast<const unsigned char *>(static_cast<std::uintptr_t>(addresses[i])),
                                       lengths[i] / kLaneBytes, 0));
    *out++ = sum;
  }
}

}  // namespace kvasir
