#include "shadow.hpp"

namespace kvasir {

// The low 64 bits of a hash, given as bytes in big-endian order or as an integer.
std::uint64_t Shadow::key_of(MsgPack &in) {
  if (!in.is_bytes()) return in.integer();
  const std::string_view bytes = in.bytes();
  if (bytes.size() >= 8) return MsgPack::big_endian(bytes.data() + bytes.size() - 8);
  std::uint64_t key = 0;
  for (const char each : bytes) key = key << 8 | static_cast<unsigned char>(each);
  return key;
}

void Shadow::field(MsgPack &in, std::string_view name, Event &event, Payload &payload) {
  if (name == "type") {
    const std::string_view type = in.string();
    if (type == "BlockStored") event.kind = Event::kStore;
    else if (type == "BlockRemoved") event.kind = Event::kRemove;
    else if (type == "AllBlocksCleared") event.kind = Event::kClear;
    else if (type == "KvasirTierChanged") event.kind = Event::kTier;
    else in.fail("a known type of event");
    event.typed = true;
  } else if (name == "block_hashes") {
    event.keys_at = payload.keys.size();
    event.keys = in.array();
    for (std::size_t i = 0; i < event.keys; ++i) payload.keys.push_back(key_of(in));
  } else if (name == "parent_block_hash") {
    if (!in.nil()) event.parent = key_of(in);
  } else if (name == "token_ids") {
    event.tokens = in.array();
    event.tokens_at = payload.tokens.size();
    payload.tokens.resize(event.tokens_at + event.tokens);
    in.tokens(payload.tokens.data() + event.tokens_at, event.tokens);
  } else if (name == "block_size") {
    event.block_size = in.integer();
  } else if (name == "medium") {
    if (in.nil()) return;
    const std::string_view medium = in.string();
    event.medium = medium == "GPU" ? 0 : medium == "CPU" ? 1 : medium == "STORAGE" ? 2 : 3;
  } else if (name == "lora_name") {
    if (!in.nil()) event.adapter = std::string(in.string());
  } else if (name == "extra_keys") {
    if (!in.nil()) extra_keys(in, event);
  } else if (name == "group_idx") {
    if (!in.nil()) event.other_group = in.integer() != 0;
  } else if (name == "log") {
    event.log.reset();
    if (in.is_bytes()) event.log = in.bytes();
    else in.skip();
  } else {
    in.skip();
  }
}

void Shadow::check_tier(MsgPack &in, const Event &event) {
  if (!event.log) in.fail("a log");
  bool below = true;
  try {
    Record record;
    for (LogReader reader(event.log->data(), event.log->size()); reader.next(record);)
      below = below && record.head.medium != kDevice;
  } catch (const std::invalid_argument &error) {
    throw std::invalid_argument("event: " + std::string(error.what()));
  }
  if (!below) in.fail("a log of media below the device");
}

// One entry per block; the strings of the first are the adapter's name, if any, and the salt.
void Shadow::extra_keys(MsgPack &in, Event &event) {
  for (std::size_t i = 0, blocks = in.array(); i < blocks; ++i) {
    if (i || !in.is_array()) {
      in.skip();
      continue;
    }
    for (std::size_t left = in.array(); left > 0; --left) {
      if (in.is_string()) event.extras.emplace_back(in.string());
      else in.skip();
    }
  }
}

Shadow::Event Shadow::event(MsgPack &in, Payload &payload) {
  Event event;
  for (std::size_t fields = in.map(); fields > 0; --fields) {
    const std::string_view name = in.string();
    field(in, name, event, payload);
  }
  if (!event.typed) in.fail("a type");
  if (event.kind == Event::kTier) check_tier(in, event);
  std::size_t first = 0;
  if (!event.adapter.empty() && !event.extras.empty() && event.extras[0] == event.adapter) first = 1;
  if (event.extras.size() > first) event.salt = event.extras.back();
  return event;
}

std::size_t Shadow::ingest(std::size_t rank, const char *data, std::size_t size) {
  check(rank, 0);
  Payload payload = std::move(spare_);
  payload.keys.clear();
  payload.tokens.clear();
  MsgPack in(data, size);
  const std::size_t parts = in.array();
  if (parts < 2) in.fail("a time and a list of events");
  in.skip();
  std::vector<Event> events;
  for (std::size_t left = in.array(); left > 0; --left) events.push_back(event(in, payload));
  for (std::size_t i = 2; i < parts; ++i) in.skip();
  if (!in.done()) in.fail("the end");
  // Compute all roots before the first change: computing one may raise.
  for (Event &each : events)
    if (each.kind == Event::kStore && !each.other_group && !each.parent && each.keys && each.fits())
      each.root = root(each.salt, each.adapter);
  for (const Event &each : events) follow(rank, each, payload);
  spare_ = std::move(payload);
  return events.size();
}

void Shadow::follow(std::size_t rank, const Event &event, const Payload &payload) {
  if (event.other_group) return;
  const char *keys = reinterpret_cast<const char *>(payload.keys.data() + event.keys_at);
  const auto *tokens = reinterpret_cast<const unsigned char *>(payload.tokens.data() + event.tokens_at);
  if (event.kind == Event::kClear) {
    clear(rank, kDevice);
  } else if (event.kind == Event::kTier) {
    follow_tier(rank, *event.log);
  } else if (event.kind == Event::kRemove) {
    remove(rank, event.medium, keys, event.keys);
  } else if (!event.fits()) {
    unnamed_ += event.keys;
  } else if (event.root) {
    record(rank, event.medium, *event.root, keys, event.keys, tokens, event.block_size);
  } else {
    store(rank, event.medium, event.parent, keys, event.keys, tokens, event.block_size, event.salt, event.adapter);
  }
}

// Tiers report names instead of keys, and have no ranks.
void Shadow::follow_tier(std::size_t rank, std::string_view log) {
  const auto number = static_cast<unsigned>(rank);
  Record record;
  for (LogReader reader(log.data(), log.size()); reader.next(record);) {
    const unsigned medium = record.head.medium;
    names_.resize(record.head.count);
    if (!names_.empty()) std::memcpy(names_.data(), record.names, 8 * names_.size());
    switch (record.head.kind) {
      case Change::kStored:
        if (tree_.store(groups_[rank], medium, record.parent, record.names, names_.size()))
          log_.stored(medium, number, record.parent, names_.data(), names_.size());
        break;
      case Change::kRemoved:
        if (tree_.remove(groups_[rank], medium, record.names, names_.size()))
          log_.removed(medium, number, names_.data(), names_.size());
        break;
      case Change::kCleared: clear(rank, medium); break;
    }
  }
}

}  // namespace kvasir
