// Blocks that the router predicts, each prediction with a number and a time, in a list by age.
#include "runs.hpp"
#include "tree.hpp"

namespace kvasir {

std::uint32_t Tree::new_prediction() {
  if (free_prediction_ != kNone) {
    const std::uint32_t index = free_prediction_;
    free_prediction_ = predictions_[index].next;
    return index;
  }
  if (predictions_.size() >> 27) throw std::overflow_error("too many predictions");
  predictions_.emplace_back();
  return static_cast<std::uint32_t>(predictions_.size() - 1);
}

void Tree::unlink(std::uint32_t index) {
  Prediction &p = predictions_[index];
  (p.older ? predictions_[p.older].newer : oldest_) = p.newer;
  (p.newer ? predictions_[p.newer].older : newest_) = p.older;
  Page &page = pages_[p.page];
  if (page.predictions == index) {
    page.predictions = p.next & 0x7FFFFFF;
  } else {
    std::uint32_t i = page.predictions;
    while (predictions_[i].next != index) i = predictions_[i].next;
    predictions_[i].next = p.next;
  }
  p = Prediction();
  p.next = free_prediction_;
  free_prediction_ = index;
}

// Drops a prediction of a group that was dropped; its pairs count as unswept until then.
void Tree::drop_prediction(std::uint32_t index) {
  const Prediction &p = predictions_[index];
  unswept_ -= ones(p.mask);
  groups_[p.group].unswept -= ones(p.mask);
  unlink(index);
}

// Removes bits from a live prediction; the page may be released.
void Tree::forget(std::uint32_t index, std::uint16_t mask) {
  Prediction &p = predictions_[index];
  const std::uint32_t page = p.page;
  const unsigned count = ones(static_cast<std::uint16_t>(p.mask & mask));
  p.mask = static_cast<std::uint16_t>(p.mask & ~mask);
  groups_[p.group].predicted -= count;
  predicted_ -= count;
  blocks_ -= count;
  if (p.mask) return;
  unlink(index);
  prune(page);
}

std::uint16_t Tree::take_over(std::uint32_t page, std::uint16_t number, std::uint16_t mask) {
  std::uint16_t taken = 0;
  for (std::uint32_t i = pages_[page].predictions; i != kNone;) {
    Prediction &p = predictions_[i];
    const std::uint32_t next = p.next;
    if (p.group == number && !dead(p)) {
      taken = static_cast<std::uint16_t>(taken | (p.mask & mask));
      p.mask = static_cast<std::uint16_t>(p.mask & ~mask);
      if (!p.mask) unlink(i);
    }
    i = next;
  }
  return taken;
}

std::uint64_t Tree::predict(std::uint32_t number, const char *names, std::size_t count, double now) {
  group(number);
  count = std::min<std::size_t>(count, predicted_capacity_);
  const std::uint64_t prediction = ++numbered_;
  std::vector<std::pair<std::uint32_t, std::uint16_t>> path;
  path.reserve(count / kPageNames + 2);
  lay(0, names, count, [&](std::uint32_t page, unsigned at, unsigned run) {
    path.emplace_back(page, bits(at, run));
    return true;
  });
  for (std::size_t i = path.size(); i-- > 0;) {
    const auto [page, mask] = path[i];
    const std::uint16_t known = take_over(page, static_cast<std::uint16_t>(number), mask);
    const std::uint32_t index = new_prediction();
    Prediction &p = predictions_[index];
    p.number = prediction, p.time = now, p.page = page, p.life = groups_[number].life;
    p.group = static_cast<std::uint16_t>(number), p.mask = mask;
    p.next = pages_[page].predictions;
    pages_[page].predictions = index & 0x7FFFFFF;
    p.older = newest_, p.newer = kNone;
    (newest_ ? predictions_[newest_].newer : oldest_) = index;
    newest_ = index;
    const unsigned fresh = ones(static_cast<std::uint16_t>(mask & ~known));
    groups_[number].predicted += fresh;
    predicted_ += fresh;
    blocks_ += fresh;
  }
  make_room();
  return prediction;
}

void Tree::make_room() {
  while (oldest_ && (predicted_ > predicted_capacity_ || (predicted_ && blocks_ > capacity_))) {
    const Prediction &p = predictions_[oldest_];
    if (dead(p)) {
      const std::uint32_t page = p.page;
      drop_prediction(oldest_);
      prune(page);
      continue;
    }
    // Evict the deepest block first.
    forget(oldest_, static_cast<std::uint16_t>(1u << (31 - __builtin_clz(p.mask))));
    ++evicted_;
  }
}

std::uint64_t Tree::settle(std::uint32_t number, const char *names, std::size_t count, std::uint64_t prediction) {
  if (number >= groups_.size() || !groups_[number].live) return 0;
  const std::uint64_t before = predicted_;
  trace<true>(names, count, [&](std::uint32_t page, unsigned at, unsigned run) {
    for (std::uint32_t i = pages_[page].predictions; i != kNone; i = predictions_[i].next) {
      const Prediction &p = predictions_[i];
      if (p.number != prediction || p.group != number || dead(p)) continue;
      forget(i, static_cast<std::uint16_t>(p.mask & bits(at, run)));
      return;
    }
  });
  pages_.trim();
  return before - predicted_;
}

std::uint64_t Tree::expire(double before) {
  const std::uint64_t were = predicted_;
  while (oldest_) {
    const Prediction &p = predictions_[oldest_];
    if (p.time >= before) break;
    if (!dead(p)) {
      forget(oldest_, kFullMask);
      continue;
    }
    const std::uint32_t page = p.page;
    drop_prediction(oldest_);
    prune(page);
  }
  pages_.trim();
  expired_ += were - predicted_;
  return were - predicted_;
}

}  // namespace kvasir
