#include "process.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "items.hpp"

namespace kvasir {

namespace {

constexpr std::size_t kUnit = 1 << 20;

struct Kernel {
  int operator()(iovec *local, iovec *remote, std::size_t vectors, std::size_t bytes) const {
    const ssize_t got = process_vm_readv(process, local, vectors, remote, vectors, 0);
    if (got < 0) return errno;
    return static_cast<std::size_t>(got) == bytes ? 0 : EFAULT;
  }

  int process;
};

}  // namespace

const int ProcessRead::kCancelled = ECANCELED;

ProcessRead::ProcessRead(int process, const Words &sources, const Words &targets, const Words &lengths,
                         std::size_t rows, std::size_t parts)
    : process_(process), pieces_(sources, targets, lengths, rows, parts), sums_(rows * parts, kChecksumSeed) {
  rows_of_unit_ = std::max<std::size_t>(1, kUnit / std::max<std::size_t>(1, pieces_.bytes / rows));
  units_ = (rows + rows_of_unit_ - 1) / rows_of_unit_;
}

bool ProcessRead::step() {
  const std::size_t unit = next_.fetch_add(1);
  if (unit >= units_) return false;
  if (!error_.load()) {
    const std::size_t first = unit * rows_of_unit_;
    if (const int error = read(first, std::min(pieces_.rows, first + rows_of_unit_))) fail(error);
  }
  ended_.fetch_add(1);
  return unit + 1 < units_;
}

int ProcessRead::state() const { return ended_.load() < units_ ? -1 : error_.load(); }

void ProcessRead::fail(int error) {
  int none = 0;
  error_.compare_exchange_strong(none, error);
}

int ProcessRead::read(std::size_t first, std::size_t last) {
  Kernel kernel{process_};
  return pieces_.fill(kernel, first, last, sums_.data(), error_);
}

void ProcessReader::begin(const std::shared_ptr<ProcessRead> &read) {
  const std::lock_guard<std::mutex> held(lock_);
  if (closed_) {
    read->cancel();
    while (read->step()) {
    }
    return;
  }
  while (threads_.size() < most_) threads_.emplace_back(&ProcessReader::work, this);
  waiting_.push_back(read);
  changed_.notify_all();
}

void ProcessReader::close() {
  {
    const std::lock_guard<std::mutex> held(lock_);
    closed_ = true;
    for (const auto &read : waiting_) read->cancel();
    changed_.notify_all();
  }
  for (std::thread &thread : threads_) thread.join();
  threads_.clear();
}

void ProcessReader::work() {
  std::unique_lock<std::mutex> held(lock_);
  while (true) {
    changed_.wait(held, [this] { return closed_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const std::shared_ptr<ProcessRead> read = waiting_.front();
    held.unlock();
    while (read->step()) {
    }
    held.lock();
    if (!waiting_.empty() && waiting_.front() == read) waiting_.pop_front();
  }
}

void bind_process(py::module_ &m) {
  py::class_<ProcessRead, std::shared_ptr<ProcessRead>>(m, "ProcessRead")
      .def("state", &ProcessRead::state)
      .def("cancel", &ProcessRead::cancel)
      .def("sums", [](const ProcessRead &read) {
        if (read.state()) throw py::value_error("the read has not succeeded");
        const auto &sums = read.sums();
        return py::module_::import("array").attr("array")(
            "Q", py::bytes(reinterpret_cast<const char *>(sums.data()), 8 * sums.size()));
      });
  py::class_<ProcessReader>(m, "ProcessReader")
      .def(py::init<std::size_t>(), py::arg("threads"))
      .def(
          "begin",
          [](ProcessReader &reader, int process, const py::object &sources, const py::object &targets,
             const py::object &lengths, std::size_t rows, std::size_t parts, std::size_t at_once) {
            const Items from(sources, 8, "sources"), to(targets, 8, "targets"), bytes(lengths, 8, "lengths");
            const py::gil_scoped_release released;
            const auto words = [](const Items &items) { return Words(items.data(), items.count()); };
            const auto read = std::make_shared<ProcessRead>(process, words(from), words(to), words(bytes), rows, parts);
            if (read->bytes() > at_once) {
              reader.begin(read);
            } else {
              while (read->step()) {
              }
            }
            return read;
          },
          py::arg("process"), py::arg("sources"), py::arg("targets"), py::arg("lengths"), py::arg("rows"),
          py::arg("parts"), py::arg("at_once"))
      .def("close", &ProcessReader::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace kvasir
