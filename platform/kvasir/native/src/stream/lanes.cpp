#include "lanes.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "framing.hpp"
#include "piece.hpp"
#include "progress.hpp"
#include "relay.hpp"
#include "wire.hpp"

namespace kvasir {

namespace {

#ifndef SO_COOKIE
#define SO_COOKIE 57
#endif

// Buffers reused for each piece.
struct Scratch {
  Framer framer;
  std::vector<std::uint32_t> ids;
};

class Fan;

// Zero if the kernel has no SO_COOKIE, or `fd` is not a socket.
std::uint64_t cookie_of(int fd) {
  std::uint64_t cookie = 0;
  socklen_t size = sizeof cookie;
  return ::getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 && size == sizeof cookie ? cookie : 0;
}

// `text` is valid UTF-8.
std::size_t characters_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

// The fast path of one stream; subclasses define how a piece reaches the client.
class Lane {
 public:
  explicit Lane(bool open) : open_(open) {}
  Lane(const Lane &) = delete;
  Lane &operator=(const Lane &) = delete;
  virtual ~Lane() { close(); }

  bool open() const { return open_; }
  void close();

  // Sends the piece and returns true, or changes nothing and returns false.
  bool take(const Piece &piece, double now, Scratch &scratch);

 private:
  friend class Fan;

  // Whether a piece can be sent without overtaking earlier bytes.
  virtual bool free() const = 0;
  virtual void measure(std::size_t count, double now) = 0;
  // May destroy the lane.
  virtual void send(const Piece &piece, Scratch &scratch) = 0;

  bool open_;
  Fan *fan_ = nullptr;
  std::string worker_, leg_;
  py::object held_tokens_;
  StreamTokens *tokens_ = nullptr;
  std::uint64_t epoch_ = 0;
};

// A lane to a client of this process.
class SocketLane : public Lane {
 public:
  SocketLane(int fd, bool plain, py::object pending, py::object write, std::string before, std::string after,
             bool chunked, py::object gaps)
      : Lane(cookie_of(fd) != 0),
        fd_(fd),
        cookie_(cookie_of(fd)),
        plain_(plain),
        pending_(std::move(pending)),
        write_(std::move(write)),
        before_(std::move(before)),
        after_(std::move(after)),
        chunked_(chunked),
        held_gaps_(std::move(gaps)),
        gaps_(held_gaps_.cast<StreamGaps &>()) {}

 private:
  // No bytes are pending in Python's buffers, and the descriptor is still the client's socket: descriptors are
  // reused.
  bool free() const override {
    PyObject *waiting = PyObject_CallNoArgs(pending_.ptr());
    const long bytes = waiting ? PyLong_AsLong(waiting) : -1;
    Py_XDECREF(waiting);
    if (PyErr_Occurred()) PyErr_Clear();
    return bytes == 0 && cookie_of(fd_) == cookie_;
  }
  void measure(std::size_t count, double now) override { gaps_.add(count, now); }
  void send(const Piece &piece, Scratch &scratch) override;

  int fd_;
  std::uint64_t cookie_;
  bool plain_;
  py::object pending_, write_;
  std::string before_, after_;
  bool chunked_;
  py::object held_gaps_;
  StreamGaps &gaps_;
};

// A lane to a client of another process.
class RelayLane : public Lane {
 public:
  RelayLane(py::object relay, std::string request)
      : Lane(true), held_(std::move(relay)), relay_(held_.cast<Relay &>()), request_(std::move(request)) {}

 private:
  bool free() const override { return true; }
  void measure(std::size_t, double) override {}
  void send(const Piece &piece, Scratch &) override { relay_.add(request_, piece); }

  py::object held_;
  Relay &relay_;
  std::string request_;
};

// Lanes by worker and leg. It does not own them: a lane removes itself when it closes.
class Fan {
 public:
  Fan() = default;
  Fan(const Fan &) = delete;
  Fan &operator=(const Fan &) = delete;
  ~Fan() {
    for (auto &[name, legs] : workers_)
      for (auto &[leg, lane] : legs) {
        lane->fan_ = nullptr;
        lane->open_ = false;
      }
  }

  void add(const std::string &worker, const std::string &leg, py::object tokens, Lane &lane) {
    auto &known = tokens.cast<StreamTokens &>();
    if (lane.fan_) throw py::value_error("the lane has its place already");
    if (!lane.open_) return;
    auto &legs = workers_[worker];
    if (legs.count(leg)) throw py::value_error("a leg has one lane");
    lane.worker_ = worker;
    lane.leg_ = leg;
    lane.held_tokens_ = std::move(tokens);
    lane.tokens_ = &known;
    lane.epoch_ = known.epoch();
    lane.fan_ = this;
    legs.emplace(lane.leg_, &lane);
  }

  void remove(const Lane &lane) {
    const auto legs = workers_.find(lane.worker_);
    legs->second.erase(lane.leg_);
    if (legs->second.empty()) workers_.erase(legs);
  }

  py::tuple take(const std::string &worker, const py::bytes &frame, double now);

  std::size_t size() const {
    std::size_t lanes = 0;
    for (const auto &[name, legs] : workers_) lanes += legs.size();
    return lanes;
  }

 private:
  Lane *find(const std::string &worker, std::string_view leg) const {
    const auto legs = workers_.find(worker);
    if (legs == workers_.end()) return nullptr;
    const auto lane = legs->second.find(leg);
    return lane == legs->second.end() ? nullptr : lane->second;
  }

  std::unordered_map<std::string, std::unordered_map<std::string_view, Lane *>> workers_;
  Scratch scratch_;
};

void Lane::close() {
  open_ = false;
  if (fan_) {
    fan_->remove(*this);
    fan_ = nullptr;
  }
}

bool Lane::take(const Piece &piece, double now, Scratch &scratch) {
  if (!piece.plain || piece.offset != tokens_->count() || epoch_ != tokens_->epoch() || !free()) return false;
  scratch.ids.clear();
  Fields ids(piece.ids);
  for (std::uint64_t id; ids.item(id);) scratch.ids.push_back(static_cast<std::uint32_t>(id));
  if (ids.broken()) return false;
  tokens_->add(scratch.ids, characters_of(piece.text));
  measure(scratch.ids.size(), now);
  // Last, because this may destroy the lane.
  send(piece, scratch);
  return true;
}

void SocketLane::send(const Piece &piece, Scratch &scratch) {
  if (piece.text.empty()) return;
  const std::string_view frame = scratch.framer.frame(before_, piece.text, after_, chunked_);
  const ssize_t sent = plain_ ? ::send(fd_, frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
  const std::size_t left = frame.size() - static_cast<std::size_t>(std::max<ssize_t>(sent, 0));
  if (!left) return;
  // Python's transport sends the rest, and handles a failed socket.
  const py::object write = write_;
  write(py::bytes(frame.data() + frame.size() - left, left));
}

py::tuple Fan::take(const std::string &worker, const py::bytes &frame, double now) {
  std::string_view batch;
  if (!workers_.count(worker) || !inner(std::string_view(frame), 2, batch) || !inner(batch, 3, batch))
    return py::make_tuple(py::none(), true);
  py::list others;
  bool changes = false;
  std::size_t at = 0;
  Fields field(batch);
  for (; field.next();) {
    if (field.number != 1) {
      // Any field except the load.
      changes = changes || field.number != 2;
      continue;
    }
    const Piece piece = read_piece(field.bytes);
    Lane *lane = find(worker, piece.leg);
    if (!lane || !lane->take(piece, now, scratch_)) {
      // Later deltas of this stream must not overtake it.
      if (lane) lane->close();
      others.append(at);
    }
    ++at;
  }
  return py::make_tuple(std::move(others), changes);
}

}  // namespace

void bind_lanes(py::module_ &m) {
  py::class_<Lane>(m, "Lane")
      .def_property_readonly("open", &Lane::open)
      .def("close", &Lane::close);
  py::class_<SocketLane, Lane>(m, "SocketLane")
      .def(py::init<int, bool, py::object, py::object, std::string, std::string, bool, py::object>(),
           py::kw_only(), py::arg("fd"), py::arg("plain"), py::arg("pending"), py::arg("write"), py::arg("before"),
           py::arg("after"), py::arg("chunked"), py::arg("gaps"));
  py::class_<Relay>(m, "Relay")
      .def(py::init<py::object>(), py::arg("wake"))
      .def("lane",
           [](py::object relay, std::string request) {
             return std::make_unique<RelayLane>(std::move(relay), std::move(request));
           },
           py::arg("request"))
      .def("take", &Relay::take)
      .def("__len__", &Relay::size);
  py::class_<RelayLane, Lane>(m, "RelayLane");
  py::class_<Fan>(m, "Fan")
      .def(py::init<>())
      .def("add", &Fan::add, py::arg("worker"), py::arg("leg"), py::arg("tokens"), py::arg("lane"))
      .def("take", &Fan::take, py::arg("worker"), py::arg("frame"), py::arg("now"))
      .def("__len__", &Fan::size);
}

}  // namespace kvasir
