#include "tree.hpp"

#include "runs.hpp"

namespace kvasir {

// -- groups and slots --------------------------------------------------------------------------------

std::uint32_t Tree::add_group() {
  std::uint32_t number = 0;
  while (number < groups_.size() && (groups_[number].live || groups_[number].unswept)) ++number;
  if (number >= kMaxGroups) throw std::overflow_error(std::to_string(kMaxGroups) + " groups exist, the most there can be");
  if (number == groups_.size()) {
    groups_.emplace_back();
    scratch_.resize(groups_.size() * kSlots);
  }
  groups_[number].live = true;
  ++live_groups_;
  return number;
}

std::uint16_t Tree::slot_for(std::uint32_t number, unsigned medium) {
  std::uint16_t &slot = groups_[number].slots[medium];
  if (!slot) {
    // If owners are dropped faster than sweeps run, sweep here.
    while (free_slots_.empty() && slots_.size() > 0xFFFF && unswept_) sweep(0xFFFF);
    if (!free_slots_.empty()) {
      slot = free_slots_.back();
      free_slots_.pop_back();
    } else {
      if (slots_.size() > 0xFFFF) throw std::overflow_error("too many owners wait to be swept");
      slot = static_cast<std::uint16_t>(slots_.size());
      slots_.emplace_back();
    }
    slots_[slot] = Slot{true, static_cast<std::uint16_t>(number), static_cast<std::uint8_t>(medium), 0};
  }
  return slot;
}

void Tree::retire(std::uint16_t &slot) {
  if (!slot) return;
  Slot &gone = slots_[slot];
  gone.live = false;
  blocks_ -= gone.held;
  unswept_ += gone.held;
  groups_[gone.group].unswept += gone.held;
  if (!gone.held) free_slots_.push_back(slot);
  slot = 0;
}

void Tree::slot_entry_gone(std::uint16_t slot, std::uint64_t count) {
  Slot &gone = slots_[slot];
  gone.held -= count;
  unswept_ -= count;
  groups_[gone.group].unswept -= count;
  if (!gone.held) free_slots_.push_back(slot);
}

void Tree::drop_group(std::uint32_t number) {
  Group &gone = group(number);
  for (std::uint16_t &slot : gone.slots) retire(slot);
  blocks_ -= gone.predicted;
  predicted_ -= gone.predicted;
  unswept_ += gone.predicted;
  gone.unswept += gone.predicted;
  gone.predicted = 0;
  gone.live = false;
  ++gone.life;
  --live_groups_;
}

std::uint64_t Tree::sweep(std::uint64_t budget) {
  // Reading a page is cheap; removing a pair may also remove its name from the table.
  constexpr std::uint64_t kLook = 1, kPair = 24;
  std::uint64_t work = 0;
  const std::uint64_t most = std::min(budget, ~std::uint64_t{0} / 4) * 4;
  while (unswept_ && work < most) {
    if (sweep_at_ >= pages_.end()) sweep_at_ = 0;
    const std::uint32_t number = sweep_at_++;
    Page &page = pages_[number];
    work += kLook;
    if (!page.count) continue;
    const std::uint64_t before = unswept_;
    for (unsigned i = page.owners.size(); i-- > 0;) {
      Entry *entry = page.owners.data() + i;
      if (slots_[entry->slot].live) continue;
      slot_entry_gone(entry->slot, ones(entry->mask));
      page.owners.remove(entry, pages_.spilled());
    }
    for (std::uint32_t i = page.predictions; i != kNone;) {
      const std::uint32_t next = predictions_[i].next;
      if (dead(predictions_[i])) drop_prediction(i);
      i = next;
    }
    if (before != unswept_) prune(number);
    work += kPair * (before - unswept_);
  }
  pages_.trim();
  return unswept_;
}

std::uint64_t Tree::held(std::uint32_t number, unsigned slot) const {
  const Group &known = const_cast<Tree *>(this)->group(number);
  if (slot >= kSlots) throw Missing("no slot " + std::to_string(slot));
  if (slot == kMedia) return known.predicted;
  return known.slots[slot] ? slots_[known.slots[slot]].held : 0;
}

// -- pages --------------------------------------------------------------------------------------------

std::uint32_t Tree::append(std::uint32_t number, std::uint64_t parent, std::uint64_t name) {
  const bool room = number != kNoPage && pages_[number].count < kPageNames;
  if (!room) {
    const std::uint32_t made = pages_.allocate(parent);
    if (number != kNoPage) pages_[number].next = made;
    number = made;
  }
  Page &page = pages_[number];
  pages_.names(number)[page.count] = name;
  table_.insert(name, pack(number, page.count));
  page.count = page.count + 1;
  return number;
}

void Tree::prune(std::uint32_t number) {
  Page &page = pages_[number];
  if (!page.count || page.owners.size() || page.predictions) return;
  for (unsigned i = 0; i < page.count; ++i) table_.prefetch(pages_.names(number)[i]);
  for (unsigned i = 0; i < page.count; ++i) table_.erase(pages_.names(number)[i], pack(number, i));
  pages_.release(number);
}

// -- reports of workers ------------------------------------------------------------------------------

std::uint64_t Tree::apply(const std::vector<std::uint32_t> &groups, const char *log, std::size_t size) {
  Record record;
  for (LogReader reader(log, size); reader.next(record);) {
    if (record.head.rank >= groups.size()) throw Missing("rank " + std::to_string(record.head.rank));
    group(groups[record.head.rank]);
    // Output blocks come one in a record, so nothing else fetches their slots ahead.
    if (record.head.count) table_.prefetch(record.name(0));
  }
  std::uint64_t changed = 0;
  for (LogReader reader(log, size); reader.next(record);) {
    const std::uint32_t number = groups[record.head.rank];
    const unsigned medium = record.head.medium;
    switch (record.head.kind) {
      case Change::kStored: changed += store(number, medium, record.parent, record.names, record.head.count); break;
      case Change::kRemoved: changed += remove(number, medium, record.names, record.head.count); break;
      case Change::kCleared: changed += clear(number, medium); break;
    }
  }
  return changed;
}

std::uint64_t Tree::store(std::uint32_t number, unsigned medium, std::uint64_t parent, const char *names,
                          std::size_t count) {
  group(number);
  const std::uint16_t slot = slot_for(number, medium);
  std::uint64_t stored = 0;
  bool full = false;
  lay(parent, names, count, [&](std::uint32_t page, unsigned at, unsigned run) {
    std::uint16_t mask = bits(at, run);
    Owners &owners = pages_[page].owners;
    Entry *entry = owners.find(slot);
    std::uint16_t fresh = entry ? static_cast<std::uint16_t>(mask & ~entry->mask) : mask;
    const std::uint64_t room = capacity_ - std::min(capacity_, blocks_);
    while (ones(fresh) > room) {
      fresh = static_cast<std::uint16_t>(fresh & ~(1u << (31 - __builtin_clz(fresh))));
      full = true;
    }
    if (fresh) {
      if (entry) entry->mask = static_cast<std::uint16_t>(entry->mask | fresh);
      else owners.add(Entry{slot, fresh}, pages_.spilled());
      slots_[slot].held += ones(fresh);
      blocks_ += ones(fresh);
      stored += ones(fresh);
    }
    if (full) prune(page);
    return !full;
  });
  if (full) throw std::overflow_error("the tree holds " + std::to_string(capacity_) + " blocks, its capacity");
  return stored;
}

std::uint64_t Tree::remove(std::uint32_t number, unsigned medium, const char *names, std::size_t count) {
  const std::uint16_t slot = group(number).slots[medium];
  if (!slot) return 0;
  std::uint64_t removed = 0;
  trace<false>(names, count, [&](std::uint32_t page, unsigned at, unsigned run) {
    Entry *entry = pages_[page].owners.find(slot);
    if (!entry) return;
    const auto gone = static_cast<std::uint16_t>(entry->mask & bits(at, run));
    entry->mask = static_cast<std::uint16_t>(entry->mask & ~gone);
    slots_[slot].held -= ones(gone);
    blocks_ -= ones(gone);
    removed += ones(gone);
    if (entry->mask) return;
    pages_[page].owners.remove(entry, pages_.spilled());
    prune(page);
  });
  pages_.trim();
  return removed;
}

std::uint64_t Tree::clear(std::uint32_t number, unsigned medium) {
  std::uint16_t &slot = group(number).slots[medium];
  const std::uint64_t held = slot ? slots_[slot].held : 0;
  retire(slot);
  return held;
}

std::int64_t Tree::export_from(std::uint32_t number, unsigned rank, std::uint32_t cursor, std::uint64_t limit,
                               LogWriter &log) const {
  const Group &known = const_cast<Tree *>(this)->group(number);
  std::uint64_t written = 0;
  for (; cursor < pages_.end(); ++cursor) {
    if (written >= limit) return cursor;
    const Page &page = pages_[cursor];
    if (!page.count) continue;
    const std::uint64_t *names = pages_.names(cursor);
    for (unsigned i = 0; i < page.owners.size(); ++i) {
      const Entry entry = page.owners.data()[i];
      const Slot &slot = slots_[entry.slot];
      if (!slot.live || slot.group != number || known.slots[slot.medium] != entry.slot) continue;
      for (unsigned at = 0; at < page.count;) {
        const unsigned run = run_of(entry.mask, at);
        if (run) log.stored(slot.medium, rank, at ? names[at - 1] : page.parent, names + at, run);
        written += run;
        at += run ? run : 1;
      }
    }
  }
  return -1;
}

// -- views -------------------------------------------------------------------------------------------

TreeStats Tree::stats() const {
  TreeStats stats{};
  stats.blocks = blocks_;
  stats.predicted = predicted_;
  stats.names = table_.size();
  stats.nodes = pages_.used();
  stats.groups = live_groups_;
  stats.unswept = unswept_;
  stats.expired = expired_;
  stats.evicted = evicted_;
  stats.bytes = pages_.bytes() + table_.bytes() + predictions_.size() * sizeof(Prediction) +
                groups_.capacity() * sizeof(Group) + slots_.capacity() * sizeof(Slot);
  return stats;
}

void Tree::check() const {
  auto require = [](bool holds, const char *what) {
    if (!holds) throw std::logic_error(what);
  };
  std::vector<std::uint64_t> held(slots_.size()), predicted(groups_.size()), unswept(groups_.size());
  std::uint64_t names = 0, used = 0, listed = 0;
  for (std::uint32_t number = 0; number < pages_.end(); ++number) {
    const Page &page = pages_[number];
    if (!page.count) continue;
    ++used;
    names += page.count;
    require(page.owners.size() || page.predictions, "a page that nobody holds");
    for (unsigned i = 0; i < page.count; ++i)
      require(find(pages_.names(number)[i]) == pack(number, i), "a name that is not found where it is");
    for (unsigned i = 0; i < page.owners.size(); ++i) {
      const Entry entry = page.owners.data()[i];
      require(entry.mask && !(entry.mask >> page.count), "a hold on names that are not there");
      held[entry.slot] += ones(entry.mask);
      if (!slots_[entry.slot].live) unswept[slots_[entry.slot].group] += ones(entry.mask);
    }
    for (std::uint32_t i = page.predictions; i != kNone; i = predictions_[i].next) {
      const Prediction &p = predictions_[i];
      require(p.page == number && p.mask && !(p.mask >> page.count), "a prediction of names that are not there");
      (dead(p) ? unswept : predicted)[p.group] += ones(p.mask);
      ++listed;
    }
  }
  require(names == table_.size(), "names and the table differ");
  require(used == pages_.used(), "pages are miscounted");
  std::uint64_t blocks = 0, waiting = 0, foreseen = 0;
  for (std::size_t i = 1; i < slots_.size(); ++i) {
    require(held[i] == slots_[i].held, "an owner's blocks are miscounted");
    if (slots_[i].live) blocks += held[i];
  }
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    require(predicted[i] == groups_[i].predicted, "a group's predictions are miscounted");
    require(unswept[i] == groups_[i].unswept, "what waits to be swept is miscounted");
    foreseen += predicted[i];
    waiting += unswept[i];
  }
  require(blocks + foreseen == blocks_ && foreseen == predicted_ && waiting == unswept_, "totals are miscounted");
  require(blocks_ <= capacity_ && predicted_ <= predicted_capacity_, "a capacity is exceeded");
  double last = 0;
  std::uint32_t older = kNone;
  for (std::uint32_t i = oldest_; i != kNone; older = i, i = predictions_[i].newer, --listed) {
    require(predictions_[i].older == older && (i == oldest_ || predictions_[i].time >= last), "ages are out of order");
    last = predictions_[i].time;
  }
  require(listed == 0 && newest_ == older, "predictions and their ages differ");
}

}  // namespace kvasir
