// Reads KV in the memory of another process of this machine: see ProcessReader in _native.pyi.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "segments.hpp"

namespace kvasir {

// The read of some blocks: `rows` of them, in pieces that are grouped by region. Threads take its units in
// turn; a unit is some rows, and all of their pieces.
class ProcessRead {
 public:
  // Throws std::invalid_argument before any byte is read.
  ProcessRead(int process, const Words &sources, const Words &targets, const Words &lengths, std::size_t rows,
              std::size_t parts);

  // Reads one unit. Returns whether another is left.
  bool step();
  void cancel() {
    if (state() < 0) fail(kCancelled);
  }
  // -1 while it runs; then 0, or the number of the first error.
  int state() const;
  std::size_t bytes() const { return pieces_.bytes; }
  // One for each part of each row; valid once the state is 0.
  const std::vector<std::uint64_t> &sums() const { return sums_; }

  static const int kCancelled;

 private:
  int read(std::size_t first, std::size_t last);
  void fail(int error);

  const int process_;
  const Pieces pieces_;
  std::vector<std::uint64_t> sums_;
  std::size_t rows_of_unit_ = 1, units_ = 0;
  std::atomic<std::size_t> next_{0}, ended_{0};
  std::atomic<int> error_{0};
};

// Threads that read; they start with the first large read.
class ProcessReader {
 public:
  explicit ProcessReader(std::size_t threads) : most_(threads) {}
  ProcessReader(const ProcessReader &) = delete;
  ProcessReader &operator=(const ProcessReader &) = delete;
  ~ProcessReader() { close(); }

  void begin(const std::shared_ptr<ProcessRead> &read);
  void close();

 private:
  void work();

  const std::size_t most_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<ProcessRead>> waiting_;
  std::vector<std::thread> threads_;
  bool closed_ = false;
};

void bind_process(pybind11::module_ &m);

}  // namespace kvasir
