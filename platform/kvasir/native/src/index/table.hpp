// Maps a name to its place: an open-addressing table that never rehashes as a whole.
//
// Names should be hashes but come from workers, so they are hashed again (Fibonacci hashing), which spreads
// consecutive names too. The top bits select one of many small shards, each of which doubles independently: the
// longest stall is the copy of one shard. Within a shard, home slots follow the order of a 32-bit tag, so that
// growing is one linear pass that does not need the names.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "hash.hpp"

namespace kvasir {

class NameTable {
 public:
  static constexpr std::uint32_t kNowhere = 0xFFFFFFFFu;

  NameTable() : shards_(kShards) {}
  NameTable(const NameTable &) = delete;
  NameTable &operator=(const NameTable &) = delete;
  ~NameTable() {
    for (Shard &shard : shards_) std::free(shard.slots);
  }

  std::size_t bytes() const { return bytes_ + kShards * sizeof(Shard); }
  std::size_t size() const { return size_; }

  void prefetch(std::uint64_t name) const {
    const Shard &shard = shards_[shard_of(name)];
    if (shard.slots) __builtin_prefetch(shard.slots + home(shard, tag_of(name)));
  }

  // Returns the place of `name`, or kNowhere; `same(place)` returns whether the place has that name.
  template <class Same>
  std::uint32_t find(std::uint64_t name, Same same) const {
    const Shard &shard = shards_[shard_of(name)];
    if (!shard.used) return kNowhere;
    const std::uint32_t tag = tag_of(name);
    for (std::uint32_t i = home(shard, tag);; i = next(shard, i)) {
      const Slot &slot = shard.slots[i];
      if (slot.place == kNowhere) return kNowhere;
      if (slot.tag == tag && same(slot.place)) return slot.place;
    }
  }

  // `name` must not be in the table.
  void insert(std::uint64_t name, std::uint32_t place) {
    Shard &shard = shards_[shard_of(name)];
    if ((shard.used + 1) * 4 > shard.size * 3) resize(shard, shard.size ? 2 * shard.size : 8);
    put(shard, Slot{tag_of(name), place});
    ++shard.used;
    ++size_;
  }

  // Removes the entry of `name` at `place`, which must be there.
  void erase(std::uint64_t name, std::uint32_t place) {
    Shard &shard = shards_[shard_of(name)];
    std::uint32_t hole = home(shard, tag_of(name));
    while (shard.slots[hole].place != place) hole = next(shard, hole);
    for (std::uint32_t i = next(shard, hole);; i = next(shard, i)) {
      const Slot slot = shard.slots[i];
      if (slot.place == kNowhere) break;
      // An entry may move back only if its home is not between the hole and its slot.
      const std::uint32_t from = home(shard, slot.tag);
      const bool stays = hole <= i ? (hole < from && from <= i) : (hole < from || from <= i);
      if (stays) continue;
      shard.slots[hole] = slot;
      hole = i;
    }
    shard.slots[hole].place = kNowhere;
    --shard.used;
    --size_;
    if (shard.used < shard.size / 3) resize(shard, shard.used ? std::max(8u, shard.used + shard.used / 2 + 1) : 0);
  }

 private:
  static constexpr unsigned kShardBits = 12;
  static constexpr unsigned kShift = 64 - kShardBits;
  static constexpr std::size_t kShards = std::size_t{1} << kShardBits;

  struct Slot {
    std::uint32_t tag, place;
  };
  struct Shard {
    Slot *slots = nullptr;
    std::uint32_t size = 0, used = 0;
  };

  static std::size_t shard_of(std::uint64_t name) { return name * kGolden >> kShift; }
  static std::uint32_t tag_of(std::uint64_t name) { return static_cast<std::uint32_t>(name * kGolden >> 20); }
  static std::uint32_t home(const Shard &shard, std::uint32_t tag) {
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(tag) * shard.size) >> 32);
  }
  static std::uint32_t next(const Shard &shard, std::uint32_t i) { return i + 1 == shard.size ? 0 : i + 1; }
  static std::uint32_t put(Shard &shard, Slot slot) {
    std::uint32_t i = home(shard, slot.tag);
    while (shard.slots[i].place != kNowhere) i = next(shard, i);
    shard.slots[i] = slot;
    return i;
  }

  // Puts all entries of `from` into `to`, which is empty and larger than their number. They come almost in the
  // order of their homes, so that the next free slot is known and nothing has to be searched. A branch on which
  // slots are in use would be predicted wrongly for a quarter of them: one that is not is written, and the next
  // written over it.
  static void move(const Shard &from, Shard &to) {
    std::uint32_t first = 0;
    while (from.slots[first].place != kNowhere) ++first;  // entries before it may have homes at the end
    std::uint32_t free = 0, last = 0;                     // slots from home `last` to `free` are in use
    for (std::uint32_t n = 0, i = first; n < from.size; ++n, i = next(from, i)) {
      const Slot slot = from.slots[i];
      const std::uint32_t at_home = home(to, slot.tag), at = std::max(free, at_home);
      const bool used = slot.place != kNowhere;
      if (__builtin_expect(at >= to.size || (used && at_home < last), 0)) {
        if (used) free = std::max(free, put(to, slot) + 1);
        continue;
      }
      to.slots[at] = slot;
      free = used ? at + 1 : free;
      last = used ? at_home : last;
    }
  }

  void resize(Shard &shard, std::uint32_t size) {
    Shard made;
    made.size = size;
    made.used = shard.used;
    if (size) {
      made.slots = static_cast<Slot *>(std::malloc(size * sizeof(Slot)));
      if (!made.slots) throw std::bad_alloc();
    }
    if (size) std::memset(made.slots, 0xFF, size * sizeof(Slot));  // all places are kNowhere
    if (shard.used) move(shard, made);
    bytes_ += size * sizeof(Slot);
    bytes_ -= shard.size * sizeof(Slot);
    std::free(shard.slots);
    shard = made;
  }

  std::vector<Shard> shards_;
  std::size_t size_ = 0, bytes_ = 0;
};

}  // namespace kvasir
