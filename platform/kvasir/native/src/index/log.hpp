// Logs of KV changes, as kvasir.core.kv.KvEventKind describes them.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvasir {

inline constexpr unsigned kMedia = 4, kDevice = 0;

enum class Change : std::uint8_t { kStored = 1, kRemoved = 2, kCleared = 3 };

struct RecordHead {
  Change kind;
  std::uint8_t medium;
  std::uint16_t rank;
  std::uint32_t count;
};
static_assert(sizeof(RecordHead) == 8);

struct Record {
  RecordHead head;
  std::uint64_t parent;
  const char *names;  // head.count names, not aligned

  std::uint64_t name(std::size_t i) const {
    std::uint64_t value;
    std::memcpy(&value, names + 8 * i, 8);
    return value;
  }
};

// Parses a log. Throws std::invalid_argument if it is malformed.
class LogReader {
 public:
  LogReader(const char *data, std::size_t size) : at_(data), end_(data + size), begin_(data) {}

  bool next(Record &record) {
    if (at_ == end_) return false;
    if (left() < sizeof(RecordHead)) fail("half a record");
    std::memcpy(&record.head, at_, sizeof(RecordHead));
    const auto kind = static_cast<unsigned>(record.head.kind);
    if (kind < 1 || kind > 3 || record.head.medium >= kMedia) fail("an unknown kind or medium");
    const bool stored = record.head.kind == Change::kStored;
    const std::size_t words = static_cast<std::size_t>(record.head.count) + (stored ? 1 : 0);
    if (record.head.kind == Change::kCleared && record.head.count) fail("names in a cleared record");
    if ((left() - sizeof(RecordHead)) / 8 < words) fail("names that do not fit");
    at_ += sizeof(RecordHead);
    record.parent = 0;
    if (stored) std::memcpy(&record.parent, at_, 8);
    record.names = at_ + (stored ? 8 : 0);
    at_ += words * 8;
    return true;
  }

 private:
  std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }
  [[noreturn]] void fail(const char *what) const {
    throw std::invalid_argument("log: " + std::string(what) + " at byte " + std::to_string(at_ - begin_));
  }

  const char *at_, *end_, *begin_;
};

// Writes a log; merges entries that continue the last record into it.
class LogWriter {
 public:
  void stored(unsigned medium, unsigned rank, std::uint64_t parent, const std::uint64_t *names, std::size_t count) {
    if (!(joins(Change::kStored, medium, rank) && last_name() == parent)) {
      open(Change::kStored, medium, rank);
      append(&parent, 1);
    }
    add(names, count);
  }
  void removed(unsigned medium, unsigned rank, const std::uint64_t *names, std::size_t count) {
    if (!joins(Change::kRemoved, medium, rank)) open(Change::kRemoved, medium, rank);
    add(names, count);
  }
  void cleared(unsigned medium, unsigned rank) { open(Change::kCleared, medium, rank); }

  const std::string &data() const { return data_; }
  std::string take() {
    std::string taken;
    taken.swap(data_);
    head_ = kNone;
    return taken;
  }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  bool joins(Change kind, unsigned medium, unsigned rank) const {
    if (head_ == kNone) return false;
    RecordHead head;
    std::memcpy(&head, data_.data() + head_, sizeof head);
    return head.kind == kind && head.medium == medium && head.rank == rank && head.count < (1u << 30);
  }
  std::uint64_t last_name() const {
    std::uint64_t name;
    std::memcpy(&name, data_.data() + data_.size() - 8, 8);
    return name;
  }
  void open(Change kind, unsigned medium, unsigned rank) {
    head_ = data_.size();
    const RecordHead head{kind, static_cast<std::uint8_t>(medium), static_cast<std::uint16_t>(rank), 0};
    data_.append(reinterpret_cast<const char *>(&head), sizeof head);
  }
  void add(const std::uint64_t *names, std::size_t count) {
    append(names, count);
    RecordHead head;
    std::memcpy(&head, data_.data() + head_, sizeof head);
    head.count += static_cast<std::uint32_t>(count);
    std::memcpy(data_.data() + head_, &head, sizeof head);
  }
  void append(const std::uint64_t *names, std::size_t count) {
    data_.append(reinterpret_cast<const char *>(names), 8 * count);
  }

  std::string data_;
  std::size_t head_ = kNone;
};

}  // namespace kvasir
