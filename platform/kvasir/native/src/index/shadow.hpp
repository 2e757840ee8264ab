// A worker's record of its engine's blocks: see Shadow in _native.pyi.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "keys.hpp"
#include "msgpack.hpp"
#include "tree.hpp"

namespace kvasir {

class Shadow {
 public:
  using RootOf = std::function<std::uint64_t(const std::string &, const std::string &)>;

  Shadow(std::size_t ranks, RootOf root_of) : root_of_(std::move(root_of)), tree_(~std::uint64_t{0}, 0) {
    for (std::size_t i = 0; i < ranks; ++i) groups_.push_back(tree_.add_group());
    keys_.resize(ranks);
  }

  std::size_t store(std::size_t rank, unsigned medium, std::optional<std::uint64_t> parent, const char *keys,
                    std::size_t count, const unsigned char *tokens, std::size_t block_size,
                    const std::string &salt, const std::string &adapter) {
    check(rank, medium);
    if (!count) return 0;
    std::uint64_t above;
    if (!parent) {
      above = root(salt, adapter);
    } else if (const KeyMap::Held *held = known(rank, *parent)) {
      above = held->name;
    } else {
      unnamed_ += count;
      return 0;
    }
    return record(rank, medium, above, keys, count, tokens, block_size);
  }

  std::size_t record(std::size_t rank, unsigned medium, std::uint64_t above, const char *keys, std::size_t count,
                     const unsigned char *tokens, std::size_t block_size) {
    names_.resize(count);
    chain(above, tokens, block_size, count, names_.data());
    KeyMap &map = keys_[rank][medium];
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t key;
      std::memcpy(&key, keys + 8 * i, 8);
      map.add(key, names_[i]);
    }
    const char *raw = reinterpret_cast<const char *>(names_.data());
    if (tree_.store(groups_[rank], medium, above, raw, count))
      log_.stored(medium, static_cast<unsigned>(rank), above, names_.data(), count);
    return count;
  }

  std::size_t remove(std::size_t rank, unsigned medium, const char *keys, std::size_t count) {
    check(rank, medium);
    KeyMap &map = keys_[rank][medium];
    names_.clear();
    std::size_t found = 0;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t key;
      std::memcpy(&key, keys + 8 * i, 8);
      KeyMap::Held *held = map.find(key);
      if (!held) continue;
      ++found;
      if (--held->copies) continue;
      held->copies = 1;  // erase requires an entry in use
      names_.push_back(held->name);
      map.erase(held);
    }
    if (names_.empty()) return found;
    const char *raw = reinterpret_cast<const char *>(names_.data());
    if (tree_.remove(groups_[rank], medium, raw, names_.size()))
      log_.removed(medium, static_cast<unsigned>(rank), names_.data(), names_.size());
    return found;
  }

  void clear(std::size_t rank, unsigned medium) {
    check(rank, medium);
    keys_[rank][medium].clear();
    if (!tree_.held(groups_[rank], medium)) return;
    tree_.clear(groups_[rank], medium);
    log_.cleared(medium, static_cast<unsigned>(rank));
  }

  std::size_t ingest(std::size_t rank, const char *payload, std::size_t size);

  std::string take_log() {
    // Memory of cleared blocks is reclaimed incrementally, in calls that happen regularly.
    tree_.sweep(4096);
    return log_.take();
  }
  std::int64_t export_from(std::size_t rank, std::uint32_t cursor, std::uint64_t limit, LogWriter &log) const {
    check(rank, 0);
    return tree_.export_from(groups_[rank], static_cast<unsigned>(rank), cursor, limit, log);
  }
  std::uint64_t held(std::size_t rank, unsigned medium) const {
    check(rank, medium);
    return tree_.held(groups_[rank], medium);
  }
  std::uint64_t unnamed() const { return unnamed_; }

 private:
  static constexpr std::size_t kRoots = 4096;
  struct Event {
    enum Kind { kStore, kRemove, kClear, kTier } kind = kClear;
    bool typed = false, other_group = false;
    unsigned medium = 0;
    std::optional<std::uint64_t> parent, root;
    std::size_t keys_at = 0, keys = 0, tokens_at = 0, tokens = 0, block_size = 0;
    std::string salt, adapter;
    std::vector<std::string> extras;
    std::optional<std::string_view> log;  // part of the message

    bool fits() const { return block_size && tokens / block_size == keys && !(tokens % block_size); }
  };

  void check(std::size_t rank, unsigned medium) const {
    if (rank >= groups_.size() || medium >= kMedia) throw Missing("no rank or medium of that number");
  }
  const KeyMap::Held *known(std::size_t rank, std::uint64_t key) {
    for (KeyMap &map : keys_[rank])
      if (const KeyMap::Held *held = map.find(key)) return held;
    return nullptr;
  }
  std::uint64_t root(const std::string &salt, const std::string &adapter) {
    const std::string key = std::to_string(salt.size()) + '/' + salt + adapter;
    const auto found = roots_.find(key);
    if (found != roots_.end()) return found->second;
    if (roots_.size() >= kRoots) roots_.clear();
    return roots_[key] = root_of_(salt, adapter);
  }
  // Keys and tokens of the events of one message. Not shared, because computing a root runs Python.
  struct Payload {
    std::vector<std::uint64_t> keys;
    std::vector<std::uint32_t> tokens;
  };
  static std::uint64_t key_of(MsgPack &in);
  static Event event(MsgPack &in, Payload &payload);
  static void field(MsgPack &in, std::string_view name, Event &event, Payload &payload);
  static void extra_keys(MsgPack &in, Event &event);
  static void check_tier(MsgPack &in, const Event &event);
  void follow(std::size_t rank, const Event &event, const Payload &payload);
  void follow_tier(std::size_t rank, std::string_view log);

  RootOf root_of_;
  Tree tree_;
  std::vector<std::uint32_t> groups_;
  std::vector<std::array<KeyMap, kMedia>> keys_;
  std::unordered_map<std::string, std::uint64_t> roots_;
  LogWriter log_;
  std::uint64_t unnamed_ = 0;
  std::vector<std::uint64_t> names_;
  Payload spare_;  // kept to reuse its memory
};

}  // namespace kvasir
