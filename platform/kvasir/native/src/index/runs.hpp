// Iteration over names: consecutive names in one page are visited as one run.
#pragma once

#include "tree.hpp"

namespace kvasir {

template <class Visit>
void Tree::lay(std::uint64_t parent, const char *names, std::size_t count, Visit visit) {
  constexpr std::size_t kAhead = 24;
  std::size_t fetched = 0;
  const std::uint32_t above = find(parent);
  std::uint32_t page = kNoPage, run_page = kNoPage;
  unsigned at = 0, run_at = 0, run = 0;
  if (above != NameTable::kNowhere) page = above / kPageNames, at = above % kPageNames;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t name = name_at(names, i);
    if (page != kNoPage && at + 1 < pages_[page].count && pages_.names(page)[at + 1] == name) {
      ++at;
    } else if (page != kNoPage && follows(page, at, name)) {
      page = pages_[page].next, at = 0;
    } else {
      for (fetched = std::max(fetched, i + 1); fetched < count && fetched <= i + kAhead; ++fetched)
        table_.prefetch(name_at(names, fetched));
      const std::uint32_t place = find(name);
      if (place != NameTable::kNowhere) {
        page = place / kPageNames, at = place % kPageNames;
      } else {
        // A page can be extended only after its last name; elsewhere the chain branches.
        const bool last = page != kNoPage && at + 1 == pages_[page].count;
        page = append(last ? page : kNoPage, parent, name);
        at = pages_[page].count - 1;
      }
    }
    if (run && page == run_page && at == run_at + run) {
      ++run;
    } else {
      if (run && !visit(run_page, run_at, run)) {
        prune(page);
        return;
      }
      run_page = page, run_at = at, run = 1;
    }
    const unsigned rest = rest_of(page, at, names, i + 1, count);
    at += rest, run += rest, i += rest;
    parent = name_at(names, i);
  }
  if (run) visit(run_page, run_at, run);
}

template <bool kChain, class Visit>
void Tree::trace(const char *names, std::size_t count, Visit visit) const {
  constexpr std::size_t kAhead = 24;
  std::size_t fetched = 0;
  std::uint32_t page = kNoPage;
  unsigned at = 0, run = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t name = name_at(names, i);
    if (run && at + run < pages_[page].count && pages_.names(page)[at + run] == name) {
      ++run;
    } else {
      for (fetched = std::max(fetched, i + 1); fetched < count && fetched <= i + kAhead; ++fetched)
        table_.prefetch(name_at(names, fetched));
      const std::uint32_t place =
          run && follows(page, at + run - 1, name) ? pack(pages_[page].next, 0) : find(name);
      if (run) visit(page, at, run);
      run = 0;
      if (place == NameTable::kNowhere) continue;
      page = place / kPageNames, at = place % kPageNames, run = 1;
    }
    if constexpr (kChain) {
      const unsigned rest = rest_of(page, at + run - 1, names, i + 1, count);
      run += rest, i += rest;
    }
  }
  if (run) visit(page, at, run);
}

}  // namespace kvasir
