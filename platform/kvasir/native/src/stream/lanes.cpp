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

#include "items.hpp"
#include "wire.hpp"

namespace kvasir {

namespace {

#ifndef SO_COOKIE
#define SO_COOKIE 57
#endif

constexpr char kHex[] = "0123456789abcdef";

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

// Writes `text`, valid UTF-8, to `out` as a JSON string.
void quote(std::string_view text, std::string &out) {
  out.assign(1, '"');
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != '"' && byte != '\\') {
      out.push_back(c);
      continue;
    }
    out.push_back('\\');
    switch (c) {
      case '"':
      case '\\':
        out.push_back(c);
        break;
      case '\b':
        out.push_back('b');
        break;
      case '\f':
        out.push_back('f');
        break;
      case '\n':
        out.push_back('n');
        break;
      case '\r':
        out.push_back('r');
        break;
      case '\t':
        out.push_back('t');
        break;
      default:
        out.append("u00");
        out.push_back(kHex[byte >> 4]);
        out.push_back(kHex[byte & 15]);
    }
  }
  out.push_back('"');
}

void append_hex(std::size_t value, std::string &out) {
  char digits[16];
  std::size_t count = 0;
  do digits[count++] = kHex[value & 15];
  while (value >>= 4);
  while (count) out.push_back(digits[--count]);
}

// The fields of a plain delta; `plain` is false if the delta has any other.
struct Piece {
  std::string_view leg, ids, text;
  std::uint64_t offset = 0;
  bool plain = true;
};

Piece read_piece(std::string_view message) {
  Piece piece;
  Fields field(message);
  while (field.next()) {
    if (field.number == 1 && field.kind == Fields::kBytes) {
      piece.leg = field.bytes;
    } else if (field.number == 2 && field.kind == Fields::kVarint) {
      piece.plain = piece.plain && field.value == 0;
    } else if (field.number == 3 && field.kind == Fields::kVarint) {
      piece.offset = field.value;
    } else if (field.number == 4 && field.kind == Fields::kBytes && piece.ids.empty()) {
      piece.ids = field.bytes;
    } else if (field.number == 5 && field.kind == Fields::kBytes) {
      piece.text = field.bytes;
    } else {
      piece.plain = false;
    }
  }
  piece.plain = piece.plain && !field.broken();
  return piece;
}

// Finds the only message in field `number` of `message`; false if there is none or more than one.
bool inner(std::string_view message, std::uint32_t number, std::string_view &out) {
  std::string_view found;
  bool there = false;
  Fields field(message);
  while (field.next()) {
    if (field.number != number || field.kind != Fields::kBytes) continue;
    if (there) return false;
    there = true;
    found = field.bytes;
  }
  out = found;
  return there && !field.broken();
}

// Buffers reused for each piece.
struct Scratch {
  std::string text, frame;
  std::vector<std::uint32_t> ids;
};

void append_varint(std::uint64_t value, std::string &out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

std::size_t varint_size(std::uint64_t value) {
  std::size_t size = 1;
  while (value >>= 7) ++size;
  return size;
}

void append_field(std::uint32_t number, std::string_view bytes, std::string &out) {
  append_varint(number << 3 | Fields::kBytes, out);
  append_varint(bytes.size(), out);
  out.append(bytes);
}

// What the client has of one choice: the number of its tokens, their ids from `start` on, and its characters.
class StreamTokens {
 public:
  explicit StreamTokens(std::uint64_t start) : start_(start) {}

  void add(const std::vector<std::uint32_t> &ids, std::uint64_t text) {
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    characters += text;
  }
  std::uint64_t count() const { return start_ + ids_.size(); }
  // Token ids `from` to `to` as an array('I'), within what is held.
  py::object slice(std::uint64_t from, std::uint64_t to) const {
    const std::size_t begin = std::min<std::uint64_t>(from < start_ ? 0 : from - start_, ids_.size());
    const std::size_t end = std::min<std::uint64_t>(to < start_ ? 0 : to - start_, ids_.size());
    py::object made = py::module_::import("array").attr("array")("I");
    if (end > begin)
      made.attr("frombytes")(
          py::bytes(reinterpret_cast<const char *>(ids_.data() + begin), (end - begin) * sizeof(std::uint32_t)));
    return made;
  }
  // Lanes that were added before send nothing more.
  void fence() { ++epoch_; }
  std::uint64_t epoch() const { return epoch_; }

  std::uint64_t characters = 0;

 private:
  std::uint64_t start_, epoch_ = 0;
  std::vector<std::uint32_t> ids_;
};

// How many tokens of one choice have been measured, and when the last came; counts the gaps in a histogram.
class StreamGaps {
 public:
  StreamGaps(const py::object &bounds, const py::object &counts, const py::object &total)
      : bounds_(bounds, 8, "bounds"), counts_(counts, 8, "counts", true), total_(total, 8, "total", true) {
    if (counts_.count() != bounds_.count() + 1 || total_.count() != 1)
      throw py::value_error("a histogram has a count more than bounds, and one total");
  }

  void add(std::size_t tokens, double now) {
    if (!tokens) return;
    if (count) {
      const double gap = (now - last_s) / static_cast<double>(tokens);
      const auto *bounds = reinterpret_cast<const double *>(bounds_.data());
      auto *counts = static_cast<std::uint64_t *>(counts_.writable());
      counts[std::lower_bound(bounds, bounds + bounds_.count(), gap) - bounds] += tokens;
      *static_cast<double *>(total_.writable()) += gap * static_cast<double>(tokens);
    }
    count += tokens;
    last_s = now;
  }

  std::uint64_t count = 0;
  double last_s = 0.0;

 private:
  Items bounds_, counts_, total_;
};

class Fan;

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
  SocketLane(int fd, py::object pending, py::object write, std::string before, std::string after, bool chunked,
             py::object gaps)
      : Lane(cookie_of(fd) != 0),
        fd_(fd),
        cookie_(cookie_of(fd)),
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
  py::object pending_, write_;
  std::string before_, after_;
  bool chunked_;
  py::object held_gaps_;
  StreamGaps &gaps_;
};

// Collects deltas for another process in one message; `wake` is called when the first one is added.
class Relay {
 public:
  explicit Relay(py::object wake) : wake_(std::move(wake)) {}

  void add(std::string_view request, const Piece &piece) {
    const bool first = batch_.empty();
    const std::size_t offset = piece.offset ? 1 + varint_size(piece.offset) : 0;
    const auto field = [](std::string_view bytes) {
      return bytes.empty() ? 0 : 1 + varint_size(bytes.size()) + bytes.size();
    };
    append_varint(1 << 3 | Fields::kBytes, batch_);
    append_varint(field(request) + offset + field(piece.ids) + field(piece.text), batch_);
    append_field(1, request, batch_);
    if (piece.offset) {
      batch_.push_back(3 << 3 | Fields::kVarint);
      append_varint(piece.offset, batch_);
    }
    if (!piece.ids.empty()) append_field(4, piece.ids, batch_);
    if (!piece.text.empty()) append_field(5, piece.text, batch_);
    if (first) wake_();
  }

  // Empties the buffer into a SessionResponse with a StepBatch.
  py::bytes take() {
    std::string frame, message;
    append_field(3, batch_, frame);
    append_field(2, frame, message);
    batch_.clear();
    return py::bytes(message);
  }

  std::size_t size() const { return batch_.size(); }

 private:
  py::object wake_;
  std::string batch_;
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
  quote(piece.text, scratch.text);
  std::string &frame = scratch.frame;
  frame.clear();
  if (chunked_) {
    append_hex(before_.size() + scratch.text.size() + after_.size(), frame);
    frame.append("\r\n");
  }
  frame.append(before_).append(scratch.text).append(after_);
  if (chunked_) frame.append("\r\n");
  const ssize_t sent = ::send(fd_, frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
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
  py::class_<StreamTokens>(m, "StreamTokens")
      .def(py::init<std::uint64_t>(), py::arg("start") = 0)
      .def(
          "add",
          [](StreamTokens &self, const py::iterable &ids, std::uint64_t characters) {
            std::vector<std::uint32_t> added;
            for (const auto &id : ids) added.push_back(id.cast<std::uint32_t>());
            self.add(added, characters);
          },
          py::arg("ids"), py::arg("characters"))
      .def("slice", &StreamTokens::slice, py::arg("begin"), py::arg("end"))
      .def("fence", &StreamTokens::fence)
      .def_property_readonly("count", &StreamTokens::count)
      .def_property_readonly("tokens", [](const StreamTokens &self) { return self.slice(0, self.count()); })
      .def_readonly("characters", &StreamTokens::characters);
  py::class_<StreamGaps>(m, "StreamGaps")
      .def(py::init<const py::object &, const py::object &, const py::object &>(), py::arg("bounds"),
           py::arg("counts"), py::arg("total"))
      .def("add", &StreamGaps::add, py::arg("tokens"), py::arg("now"))
      .def_readonly("count", &StreamGaps::count)
      .def_property_readonly("last_s", [](const StreamGaps &self) -> py::object {
        return self.count ? py::object(py::float_(self.last_s)) : py::object(py::none());
      });
  py::class_<Lane>(m, "Lane")
      .def_property_readonly("open", &Lane::open)
      .def("close", &Lane::close);
  py::class_<SocketLane, Lane>(m, "SocketLane")
      .def(py::init<int, py::object, py::object, std::string, std::string, bool, py::object>(), py::kw_only(),
           py::arg("fd"), py::arg("pending"), py::arg("write"), py::arg("before"), py::arg("after"),
           py::arg("chunked"), py::arg("gaps"));
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
