// Pieces of memory that are filled from elsewhere, and summed while they are in the CPU's cache.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bytes.hpp"

namespace kvasir {

struct Piece {
  std::uint64_t source, target, length;
};

// A few pieces that a Source fills by one call, and that are then summed. A Source is called with vectors of the
// targets and of their sources, how many there are, and their bytes. It returns an error's number, or 0.
template <class Source>
class Segment {
 public:
  // Sums are added to `sums`, unless it is null.
  Segment(Source &source, std::uint64_t *sums) : source_(source), sums_(sums) {}

  // Adds what fits of a piece that has `left` bytes from its byte `at` on. Returns how many bytes that are: all, or
  // whole tiles.
  std::size_t add(std::uint64_t source, std::uint64_t target, std::size_t at, std::size_t left, std::size_t sum) {
    std::size_t size = std::min(left, kSegment - bytes_);
    if (size < left) size -= size % kTileBytes;
    if (!size || count_ == kVectors) return 0;
    const std::uint64_t from = source + at, to = target + at;
    if (vectors_ && end(remote_[vectors_ - 1]) == from && end(local_[vectors_ - 1]) == to) {
      remote_[vectors_ - 1].iov_len += size;
      local_[vectors_ - 1].iov_len += size;
    } else {
      remote_[vectors_] = {reinterpret_cast<void *>(from), size};
      local_[vectors_] = {reinterpret_cast<void *>(to), size};
      ++vectors_;
    }
    ranges_[count_++] = {reinterpret_cast<const unsigned char *>(to), size, at, sum, size == left};
    bytes_ += size;
    return size;
  }

  // Fills and sums what was added. Returns an error's number, or 0.
  int flush() {
    if (!bytes_) return 0;
    if (const int error = source_(local_, remote_, vectors_, bytes_)) return error;
    for (std::size_t i = 0; sums_ && i < count_; ++i) {
      const Range &range = ranges_[i];
      open_ += weigh_lanes(range.bytes, range.size / kLaneBytes, range.at / kLaneBytes);
      if (!range.last) continue;
      sums_[range.sum] = add_piece(sums_[range.sum], open_);
      open_ = 0;
    }
    vectors_ = count_ = bytes_ = 0;
    return 0;
  }

 private:
  // Bytes that stay in the second cache while the next are filled.
  static constexpr std::size_t kSegment = 256 << 10;
  static constexpr std::size_t kTileBytes = kChecksumTile * kLaneBytes;
  static constexpr std::size_t kVectors = 256;

  struct Range {
    const unsigned char *bytes;
    std::size_t size, at, sum;
    bool last;
  };

  static std::uint64_t end(const iovec &vector) {
    return reinterpret_cast<std::uint64_t>(vector.iov_base) + vector.iov_len;
  }

  Source &source_;
  std::uint64_t *const sums_;
  std::uint64_t open_ = 0;
  std::size_t vectors_ = 0, count_ = 0, bytes_ = 0;
  iovec remote_[kVectors], local_[kVectors];
  Range ranges_[kVectors];
};

// Blocks in pieces that are grouped by region; each region has one for each row.
struct Pieces {
  // Throws std::invalid_argument.
  Pieces(const Words &sources, const Words &targets, const Words &lengths, std::size_t rows, std::size_t parts)
      : rows(rows), parts(parts) {
    const auto require = [](bool holds, const char *what) {
      if (!holds) throw std::invalid_argument(what);
    };
    require(sources.size() == targets.size() && sources.size() == lengths.size(),
            "sources, targets and lengths must be of one length");
    require(rows && !(lengths.size() % rows), "rows must be at least 1 and divide the pieces");
    all.reserve(lengths.size());
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      require(!lengths[i] || (sources[i] && targets[i]), "a piece has no address");
      require(!parts || !(lengths[i] % (kLaneBytes * parts)), "lengths must be multiples of 4 bytes for each part");
      all.push_back({sources[i], targets[i], lengths[i]});
      bytes += lengths[i];
    }
  }

  // Fills the rows from `first` to `last`, until `stop` is set, and sums each part of them. Returns an error's
  // number, or 0.
  template <class Source>
  int fill(Source &source, std::size_t first, std::size_t last, std::uint64_t *sums, const std::atomic<int> &stop) const {
    Segment<Source> segment(source, parts ? sums : nullptr);
    const std::size_t cuts = std::max<std::size_t>(1, parts);
    for (std::size_t region = 0; region < all.size() / rows; ++region) {
      for (std::size_t row = first; row < last; ++row) {
        const Piece &piece = all[region * rows + row];
        const std::size_t size = piece.length / cuts;
        for (std::size_t part = 0; part < cuts; ++part) {
          const std::size_t sum = row * cuts + part;
          for (std::size_t at = 0; at < size;) {
            const std::size_t added = segment.add(piece.source + part * size, piece.target + part * size, at, size - at, sum);
            at += added;
            if (added) continue;
            if (stop.load()) return 0;
            if (const int error = segment.flush()) return error;
          }
          if (size || !parts) continue;
          // The sum of an empty piece counts as well, after those before it.
          if (const int error = segment.flush()) return error;
          sums[sum] = add_piece(sums[sum], 0);
        }
      }
    }
    return segment.flush();
  }

  std::size_t rows, parts, bytes = 0;
  std::vector<Piece> all;
};

}  // namespace kvasir
