// An engine's block keys, each with its name and the number of copies that the engine holds. Sharded like the
// name table, so that an insertion waits for at most one shard to grow.
#pragma once

#include <cstdint>
#include <vector>

#include "hash.hpp"

namespace kvasir {

class KeyMap {
 public:
  struct Held {
    std::uint64_t key, name;
    std::uint32_t copies = 0;  // 0: free
  };

  KeyMap() : shards_(kShards) {}

  Held *find(std::uint64_t key) {
    Shard &shard = shards_[shard_of(key)];
    if (shard.slots.empty()) return nullptr;
    Held &held = at(shard, key);
    return held.copies ? &held : nullptr;
  }
  // Add a copy; `name` is used only if the key is not in the map.
  void add(std::uint64_t key, std::uint64_t name) {
    Shard &shard = shards_[shard_of(key)];
    if ((shard.used + 1) * 4 > shard.slots.size() * 3) grow(shard);
    Held &held = at(shard, key);
    if (!held.copies) {
      held.key = key, held.name = name;
      ++shard.used;
    }
    ++held.copies;
  }
  void erase(Held *held) {
    Shard &shard = shards_[shard_of(held->key)];
    const std::size_t mask = shard.slots.size() - 1;
    std::size_t hole = static_cast<std::size_t>(held - shard.slots.data());
    for (std::size_t i = (hole + 1) & mask; shard.slots[i].copies; i = (i + 1) & mask) {
      const std::size_t home = mix(shard.slots[i].key) & mask;
      if (((i - home) & mask) < ((i - hole) & mask)) continue;
      shard.slots[hole] = shard.slots[i];
      hole = i;
    }
    shard.slots[hole].copies = 0;
    --shard.used;
  }
  void clear() {
    for (Shard &shard : shards_) shard = Shard();
  }

 private:
  static constexpr std::size_t kShards = 256;
  struct Shard {
    std::vector<Held> slots;
    std::size_t used = 0;
  };

  static std::size_t shard_of(std::uint64_t key) { return mix(key) >> 56; }
  static Held &at(Shard &shard, std::uint64_t key) {
    const std::size_t mask = shard.slots.size() - 1;
    std::size_t i = mix(key) & mask;
    while (shard.slots[i].copies && shard.slots[i].key != key) i = (i + 1) & mask;
    return shard.slots[i];
  }
  static void grow(Shard &shard) {
    std::vector<Held> old(shard.slots.empty() ? 8 : shard.slots.size() * 2);
    old.swap(shard.slots);
    for (const Held &held : old)
      if (held.copies) at(shard, held.key) = held;
  }

  std::vector<Shard> shards_;
};

}  // namespace kvasir
