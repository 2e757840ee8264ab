// Finds the length of the prompt prefix that each owner holds.
#include "tree.hpp"

namespace kvasir {

namespace {

using Depths = std::uint32_t __attribute__((vector_size(16), aligned(4)));

// Extends the depths that equal `depth` by the runs of their media; true if a depth reaches the end of the run.
inline bool advance(std::uint32_t *at, std::uint32_t depth, Depths runs, std::uint32_t run) {
  Depths &depths = *reinterpret_cast<Depths *>(at);
  depths += runs & (depths == depth);
  return depths[3] == depth + run;
}

}  // namespace

struct Tree::Match {
  std::uint32_t *depths;
  std::uint32_t depth = 0;
  bool alive = false;
  // A span of consecutive pages that the same owners hold in full, applied to the owners' depths once.
  const Entry *span = nullptr;
  unsigned span_owners = 0;
  std::uint32_t span_from = 0, span_run = 0;
};

void Tree::end_span(Match &m) const {
  for (unsigned i = 0; m.span_run && i < m.span_owners; ++i) {
    const Slot &slot = slots_[m.span[i].slot];
    if (!slot.live) continue;
    std::uint32_t *depths = m.depths + 4 * slot.group;
    for (unsigned medium = slot.medium; medium < kMedia; ++medium)
      if (depths[medium] == m.span_from) depths[medium] += m.span_run;
  }
  m.span = nullptr;
  m.span_run = 0;
}

void Tree::match_page(Match &m, std::uint32_t number, unsigned at, unsigned run) {
  const Page &page = pages_[number];
  const Entry *entries = page.owners.data();
  const unsigned owners = page.owners.size();
  const bool whole = run == kPageNames && !page.predictions;
  if (m.span && whole && owners == m.span_owners && !std::memcmp(entries, m.span, owners * sizeof(Entry))) {
    m.span_run += run;
    return;
  }
  end_span(m);
  m.alive = false;
  touched_.clear();
  bool full = whole;
  for (unsigned i = 0; i < owners; ++i) {
    const Slot &slot = slots_[entries[i].slot];
    full &= entries[i].mask == kFullMask;
    if (!slot.live) continue;
    const Group &known = groups_[slot.group];
    const bool only_device = !page.predictions && !(known.slots[1] | known.slots[2] | known.slots[3]);
    if (only_device) {
      const std::uint32_t r = std::min(run_of(entries[i].mask, at), run);
      m.alive |= advance(m.depths + 4 * slot.group, m.depth, Depths{r, r, r, r}, run);
    } else {
      std::uint16_t *masks = &scratch_[slot.group * kSlots];
      if (!(masks[0] | masks[1] | masks[2] | masks[3] | masks[4])) touched_.push_back(slot.group);
      masks[slot.medium] = static_cast<std::uint16_t>(masks[slot.medium] | entries[i].mask);
    }
  }
  for (std::uint32_t i = page.predictions; i != kNone; i = predictions_[i].next) {
    const Prediction &p = predictions_[i];
    if (dead(p)) continue;
    std::uint16_t *masks = &scratch_[p.group * kSlots];
    if (!(masks[0] | masks[1] | masks[2] | masks[3] | masks[4])) touched_.push_back(p.group);
    masks[kMedia] = static_cast<std::uint16_t>(masks[kMedia] | p.mask);
  }
  for (const std::uint32_t group : touched_) {
    std::uint16_t *masks = &scratch_[group * kSlots];
    std::uint16_t upto = masks[kMedia];
    Depths runs;
    for (unsigned medium = 0; medium < kMedia; ++medium) {
      upto = static_cast<std::uint16_t>(upto | masks[medium]);
      runs[medium] = std::min(run_of(upto, at), run);
      masks[medium] = 0;
    }
    masks[kMedia] = 0;
    m.alive |= advance(m.depths + 4 * group, m.depth, runs, run);
  }
  if (full && m.alive) m.span = entries, m.span_owners = owners, m.span_from = m.depth + run;
}

std::uint32_t Tree::match(const char *names, std::size_t count, std::uint32_t *depths, std::size_t room) {
  std::size_t highest = groups_.size();
  while (highest && !groups_[highest - 1].live) --highest;
  if (room < 4 * highest) throw std::invalid_argument("depths needs room for " + std::to_string(highest) + " groups");
  std::memset(depths, 0, room * sizeof *depths);
  if (!count) return 0;
  Match m{depths};
  std::uint32_t place = find(name_at(names, 0));
  while (place != NameTable::kNowhere) {
    const std::uint32_t number = place / kPageNames;
    const unsigned at = place % kPageNames;
    const Page &page = pages_[number];
    if (page.next < pages_.end()) {
      __builtin_prefetch(&pages_[page.next]);
      __builtin_prefetch(pages_.names(page.next) + kPageNames - 1);
    }
    const std::uint64_t *held = pages_.names(number) + at;
    const unsigned most = static_cast<unsigned>(std::min<std::size_t>(page.count - at, count - m.depth));
    unsigned run = most;
    // A name identifies its whole prefix: if the last names are equal, all are.
    if (held[most - 1] != name_at(names, m.depth + most - 1)) {
      run = 1;
      while (run < most && held[run] == name_at(names, m.depth + run)) ++run;
    }
    match_page(m, number, at, run);
    m.depth += run;
    if (!m.alive || m.depth == count) break;
    const std::uint64_t name = name_at(names, m.depth);
    place = follows(number, at + run - 1, name) ? pack(page.next, 0) : find(name);
  }
  end_span(m);
  std::uint32_t deepest = 0;
  for (std::size_t i = 0; i < highest; ++i) deepest = std::max(deepest, depths[4 * i + 3]);
  return deepest;
}

}  // namespace kvasir
