// Edges of the tree: runs of names in pages of 16, with the owners of each name.
//
// Names and owners are stored separately: a match that finds a page's last name equal reads no other name,
// because a name identifies its whole prefix. Pages are numbered, never move, and are allocated in chunks.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace kvasir {

inline constexpr unsigned kPageNames = 16;
inline constexpr std::uint32_t kNoPage = 0xFFFFFFFFu;
inline constexpr std::uint16_t kFullMask = 0xFFFF;

// The names of a page that one owner holds: bit i is the page's name i.
struct Entry {
  std::uint16_t slot, mask;
};

// Up to kInline owners are stored in the page itself, more in allocated memory. Unsorted.
class Owners {
 public:
  static constexpr unsigned kInline = 3;

  unsigned size() const { return size_; }
  const Entry *data() const { return size_ <= kInline && !spilled() ? inline_() : spill(); }
  Entry *data() { return const_cast<Entry *>(static_cast<const Owners *>(this)->data()); }

  Entry *find(std::uint16_t slot) {
    Entry *entries = data();
    for (unsigned i = 0; i < size_; ++i)
      if (entries[i].slot == slot) return entries + i;
    return nullptr;
  }
  void add(Entry entry, std::size_t &bytes) {
    if (!spilled() && size_ == kInline) resize(8, bytes);
    if (spilled() && size_ == capacity_ * 4u) resize(capacity_ * 8u, bytes);
    data()[size_++] = entry;
  }
  void remove(Entry *entry, std::size_t &bytes) {
    *entry = data()[size_ - 1];
    --size_;
    if (spilled() && size_ == 0) release(bytes);
  }
  void release(std::size_t &bytes) {
    if (!spilled()) return;
    bytes -= capacity_ * 4u * sizeof(Entry);
    std::free(spill());
    capacity_ = 0;
  }

 private:
  bool spilled() const { return capacity_ != 0; }
  const Entry *inline_() const { return reinterpret_cast<const Entry *>(storage_); }
  Entry *spill() const {
    Entry *entries;
    std::memcpy(&entries, storage_, sizeof entries);
    return entries;
  }
  void resize(unsigned capacity, std::size_t &bytes) {
    Entry *entries = static_cast<Entry *>(std::malloc(capacity * sizeof(Entry)));
    if (!entries) throw std::bad_alloc();
    std::memcpy(entries, data(), size_ * sizeof(Entry));
    const unsigned size = size_;
    release(bytes);
    bytes += capacity * sizeof(Entry);
    std::memcpy(storage_, &entries, sizeof entries);
    capacity_ = static_cast<std::uint16_t>(capacity / 4);
    size_ = static_cast<std::uint16_t>(size);
  }

  alignas(4) unsigned char storage_[kInline * sizeof(Entry)] = {};
  std::uint16_t size_ = 0, capacity_ = 0;  // capacity in units of four
};
static_assert(sizeof(Owners) == 16);

struct Page {
  Page() : predictions(0), count(0) {}

  std::uint64_t parent = 0;            // name before the page's first
  std::uint32_t next = kNoPage;        // hint: page of the last name's child
  std::uint32_t predictions : 27;      // first prediction of this page, 0: none
  std::uint32_t count : 5;             // number of names
  Owners owners;
};
static_assert(sizeof(Page) == 32, "a page's description is half a cache line");

class Pages {
 public:
  Pages() = default;
  Pages(const Pages &) = delete;
  Pages &operator=(const Pages &) = delete;
  ~Pages() {
    for (std::uint32_t i = 0; i < end_; ++i) (*this)[i].owners.release(spilled_);
    for (const Chunk &chunk : chunks_) {
      std::free(chunk.names);
      std::free(chunk.pages);
    }
  }

  Page &operator[](std::uint32_t page) { return chunks_[page >> kChunkBits].pages[page & kChunkMask]; }
  const Page &operator[](std::uint32_t page) const { return chunks_[page >> kChunkBits].pages[page & kChunkMask]; }
  std::uint64_t *names(std::uint32_t page) {
    return chunks_[page >> kChunkBits].names + std::size_t{kPageNames} * (page & kChunkMask);
  }
  const std::uint64_t *names(std::uint32_t page) const { return const_cast<Pages *>(this)->names(page); }

  // Page numbers are below this; released pages have no names.
  std::uint32_t end() const { return end_; }
  std::uint32_t used() const { return end_ - free_; }
  std::size_t bytes() const {
    return chunks_.size() * kChunkPages * (sizeof(Page) + kPageNames * sizeof(std::uint64_t)) + spilled_;
  }
  std::size_t &spilled() { return spilled_; }

  std::uint32_t allocate(std::uint64_t parent) {
    std::uint32_t page = first_free_;
    if (page != kNoPage) {
      first_free_ = (*this)[page].next;
      --free_;
    } else {
      if ((end_ & kChunkMask) == 0) add_chunk();
      page = end_++;
    }
    Page &made = *new (&(*this)[page]) Page();
    made.parent = parent;
    return page;
  }
  void release(std::uint32_t page) {
    Page &gone = (*this)[page];
    gone.owners.release(spilled_);
    gone.count = 0;
    gone.next = first_free_;
    first_free_ = page;
    ++free_;
  }
  // Frees all memory if no page is in use. Not to be called while released pages are read.
  void trim() {
    if (!end_ || used()) return;
    for (const Chunk &chunk : chunks_) {
      std::free(chunk.names);
      std::free(chunk.pages);
    }
    chunks_.clear();
    end_ = free_ = 0;
    first_free_ = kNoPage;
  }

 private:
  static constexpr unsigned kChunkBits = 12;
  static constexpr std::uint32_t kChunkPages = 1u << kChunkBits, kChunkMask = kChunkPages - 1;
  struct Chunk {
    std::uint64_t *names;
    Page *pages;
  };

  void add_chunk() {
    Chunk chunk;
    chunk.names = static_cast<std::uint64_t *>(std::aligned_alloc(64, kChunkPages * kPageNames * 8));
    chunk.pages = static_cast<Page *>(std::aligned_alloc(64, kChunkPages * sizeof(Page)));
    if (!chunk.names || !chunk.pages) throw std::bad_alloc();
    chunks_.push_back(chunk);
  }

  std::vector<Chunk> chunks_;
  std::uint32_t end_ = 0, free_ = 0, first_free_ = kNoPage;
  std::size_t spilled_ = 0;
};

}  // namespace kvasir
