#include "bytes.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
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

// A table that grows without moving: it is allocated once, and uses memory only where it is written.
class Weights {
 public:
  const std::uint64_t *first(std::size_t count) {
    if (ready_.load(std::memory_order_acquire) < count) grow(count);
    return table_;
  }

 private:
  static constexpr std::size_t kLeast = 4096;

  void grow(std::size_t count) {
    const std::lock_guard<std::mutex> lock(growing_);
    const std::size_t ready = ready_.load(std::memory_order_relaxed);
    if (ready >= count) return;
    const std::size_t wanted = std::min(std::max({count, 2 * ready, kLeast}), kChecksumLanes);
    for (std::size_t i = ready; i < wanted; ++i) table_[i] = mix((i + 1) * kGolden) | 1;
    ready_.store(wanted, std::memory_order_release);
  }

  // Aligned so that the widest loads never cross cache lines.
  static constexpr std::align_val_t kAligned{64};

  std::uint64_t *const table_ = static_cast<std::uint64_t *>(::operator new(8 * kChecksumLanes, kAligned));
  std::atomic<std::size_t> ready_{0};
  std::mutex growing_;
};

constexpr std::size_t kNear = 4096;

inline std::uint64_t lane(const unsigned char *bytes, std::size_t i) {
  std::uint32_t value;
  std::memcpy(&value, bytes + 4 * i, 4);
  return value;
}

// Reads four streams at once: a single stream is half as fast when the bytes come from memory. For short
// pieces a single stream is faster.
KVASIR_FOR_EACH_CPU
std::uint64_t weigh(const unsigned char *bytes, const std::uint64_t *weights, std::size_t lanes) {
  const std::size_t quarter = lanes < kNear ? 0 : lanes / 4, half = 2 * quarter, third = 3 * quarter;
  std::uint64_t a = 0, b = 0, c = 0, d = 0;
  for (std::size_t i = 0; i < quarter; ++i) {
    a += lane(bytes, i) * weights[i];
    b += lane(bytes, i + quarter) * weights[i + quarter];
    c += lane(bytes, i + half) * weights[i + half];
    d += lane(bytes, i + third) * weights[i + third];
  }
  for (std::size_t i = 4 * quarter; i < lanes; ++i) a += lane(bytes, i) * weights[i];
  return a + b + c + d;
}

std::uint64_t checksum(std::uint64_t address, std::size_t lanes) {
  constexpr std::size_t kTile = 16384;
  static_assert(kChecksumLanes % kTile == 0);
  const auto *bytes = reinterpret_cast<const unsigned char *>(address);
  const std::uint64_t *weights = checksum_weights(std::min(lanes, kChecksumLanes));
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at < lanes; at += kTile)
    sum += weigh(bytes + 4 * at, weights + at % kChecksumLanes, std::min(lanes - at, kTile));
  return sum;
}

void require(bool holds, const char *what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace

const std::uint64_t *checksum_weights(std::size_t count) {
  // Never freed: threads that released the GIL may still read it when the process exits.
  static Weights *const weights = new Weights;
  return weights->first(count);
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
    require(!(lengths[i] % 4), "lengths must be multiples of 4 bytes");
    require(!lengths[i] || addresses[i], "a piece has no address");
  }
  for (std::size_t i = 0; i < lengths.size();) {
    std::uint64_t sum = kChecksumSeed;
    for (const std::size_t end = i + group; i < end; ++i)
      sum = sum * kChecksumFactor + checksum(addresses[i], lengths[i] / 4) + 1;
    *out++ = sum;
  }
}

}  // namespace kvasir
