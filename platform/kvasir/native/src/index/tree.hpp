// The prefix tree: see PrefixTree in _native.pyi for the contract, docs/adr/0006 for the design.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "log.hpp"
#include "pages.hpp"
#include "table.hpp"

namespace kvasir {

inline constexpr unsigned kSlots = kMedia + 1;

struct Missing : std::out_of_range {
  using std::out_of_range::out_of_range;
};

struct TreeStats {
  std::uint64_t blocks, predicted, names, nodes, groups, unswept, expired, evicted, bytes;
};

class Tree {
 public:
  Tree(std::uint64_t capacity, std::uint64_t predicted_capacity)
      : capacity_(capacity), predicted_capacity_(predicted_capacity) {
    slots_.resize(1);  // number 0 is unused
  }

  std::uint32_t add_group();
  void drop_group(std::uint32_t group);
  std::uint64_t sweep(std::uint64_t budget);
  std::uint64_t apply(const std::vector<std::uint32_t> &groups, const char *log, std::size_t size);
  std::uint64_t store(std::uint32_t group, unsigned medium, std::uint64_t parent, const char *names, std::size_t count);
  std::uint64_t remove(std::uint32_t group, unsigned medium, const char *names, std::size_t count);
  std::uint64_t clear(std::uint32_t group, unsigned medium);
  std::uint64_t predict(std::uint32_t group, const char *names, std::size_t count, double now);
  std::uint64_t settle(std::uint32_t group, const char *names, std::size_t count, std::uint64_t prediction);
  std::uint64_t expire(double before);
  std::uint32_t match(const char *names, std::size_t count, std::uint32_t *depths, std::size_t room);
  std::uint64_t held(std::uint32_t group, unsigned slot) const;
  std::int64_t export_from(std::uint32_t group, unsigned rank, std::uint32_t cursor, std::uint64_t limit,
                           LogWriter &log) const;
  TreeStats stats() const;
  void check() const;

 private:
  static constexpr std::uint32_t kMaxGroups = 8191;
  static constexpr std::uint32_t kNone = 0;

  struct Group {
    bool live = false;
    std::uint32_t life = 0;  // number of dropped groups with this number
    std::uint16_t slots[kMedia] = {0, 0, 0, 0};
    std::uint64_t predicted = 0;
    std::uint64_t unswept = 0;  // pairs of dropped groups with this number
  };
  // The owner of entries. The number of a dropped slot is reused after its last entry is swept.
  struct Slot {
    bool live = false;
    std::uint16_t group = 0;
    std::uint8_t medium = 0;
    std::uint64_t held = 0;
  };
  // The names of one page that belong to one prediction; in a list of its page and in one by age.
  struct Prediction {
    std::uint64_t number = 0;
    double time = 0;
    std::uint32_t page = kNoPage, life = 0;
    std::uint16_t group = 0, mask = 0;
    std::uint32_t next = kNone, older = kNone, newer = kNone;
  };
  struct Place {
    std::uint32_t page, at;
  };

  static std::uint32_t pack(std::uint32_t page, unsigned at) { return page * kPageNames + at; }
  static Place unpack(std::uint32_t place) { return {place / kPageNames, place % kPageNames}; }
  static std::uint64_t name_at(const char *names, std::size_t i) {
    std::uint64_t name;
    std::memcpy(&name, names + 8 * i, 8);
    return name;
  }
  static std::uint16_t bits(unsigned from, unsigned count) {
    return static_cast<std::uint16_t>(((1u << count) - 1u) << from);
  }
  static unsigned ones(std::uint16_t mask) { return static_cast<unsigned>(__builtin_popcount(mask)); }
  static unsigned run_of(std::uint16_t mask, unsigned from) {
    return static_cast<unsigned>(__builtin_ctz(~(static_cast<std::uint32_t>(mask) >> from)));
  }

  std::uint32_t find(std::uint64_t name) const {
    return table_.find(name, [&](std::uint32_t place) {
      return pages_.names(place / kPageNames)[place % kPageNames] == name;
    });
  }
  Group &group(std::uint32_t number) {
    if (number >= groups_.size() || !groups_[number].live) throw Missing("no group " + std::to_string(number));
    return groups_[number];
  }
  std::uint16_t slot_for(std::uint32_t group, unsigned medium);
  void retire(std::uint16_t &slot);
  void slot_entry_gone(std::uint16_t slot, std::uint64_t count);

  // Calls visit(page, first position, count) for each run of names in one page, inserting missing names.
  // visit returns false to stop.
  template <class Visit>
  void lay(std::uint64_t parent, const char *names, std::size_t count, Visit visit);
  // The same for existing names; others are skipped. kChain: each name is the child of the one before.
  template <bool kChain, class Visit>
  void trace(const char *names, std::size_t count, Visit visit) const;
  std::uint32_t append(std::uint32_t page, std::uint64_t parent, std::uint64_t name);
  void prune(std::uint32_t page);

  std::uint16_t take_over(std::uint32_t page, std::uint16_t group, std::uint16_t mask);
  void unlink(std::uint32_t index);
  void drop_prediction(std::uint32_t index);
  void forget(std::uint32_t index, std::uint16_t mask);
  void make_room();
  std::uint32_t new_prediction();
  bool dead(const Prediction &p) const { return groups_[p.group].life != p.life; }

  struct Match;
  void match_page(Match &m, std::uint32_t page, unsigned at, unsigned run);
  void end_span(Match &m) const;
  bool follows(std::uint32_t page, unsigned at, std::uint64_t name) const {
    const Page &here = pages_[page];
    return at + 1 == here.count && here.next < pages_.end() && pages_[here.next].count &&
           pages_.names(here.next)[0] == name;
  }
  // Number of names from `i` that follow in the page after position `at`: all of the rest of the page, if its
  // last name is equal (a name identifies its whole prefix), otherwise 0.
  unsigned rest_of(std::uint32_t page, unsigned at, const char *names, std::size_t i, std::size_t count) const {
    const unsigned rest = pages_[page].count - 1 - at;
    return rest && i + rest <= count && name_at(names, i + rest - 1) == pages_.names(page)[at + rest] ? rest : 0;
  }

  std::uint64_t capacity_, predicted_capacity_;
  std::uint64_t blocks_ = 0, predicted_ = 0, unswept_ = 0, expired_ = 0, evicted_ = 0, numbered_ = 0;
  std::uint32_t live_groups_ = 0, sweep_at_ = 0;
  Pages pages_;
  NameTable table_;
  std::vector<Group> groups_;
  std::vector<Slot> slots_;
  std::vector<std::uint16_t> free_slots_;
  std::deque<Prediction> predictions_ = std::deque<Prediction>(1);  // a deque grows without moving its elements
  std::uint32_t free_prediction_ = kNone, oldest_ = kNone, newest_ = kNone;
  std::vector<std::uint16_t> scratch_;
  std::vector<std::uint32_t> touched_;
};

}  // namespace kvasir
