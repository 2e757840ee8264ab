#include "sockets.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <vector>

#include "items.hpp"
#include "segments.hpp"

namespace kvasir {

namespace {

// What the kernel takes in one call (IOV_MAX).
constexpr std::size_t kMostVectors = 1024;

// Removes the first `bytes` of the vectors.
void advance(iovec *&vectors, std::size_t &count, std::size_t bytes) {
  for (; count && bytes >= vectors->iov_len; ++vectors, --count) bytes -= vectors->iov_len;
  if (!count) return;
  vectors->iov_base = static_cast<char *>(vectors->iov_base) + bytes;
  vectors->iov_len -= bytes;
}

// Moves all bytes of the vectors by `call`, in which the kernel `waits` for all, up to the time limit of the socket.
// Returns an error's number, or 0.
template <class Call>
int move_all(iovec *vectors, std::size_t count, bool waits, const Call &call) {
  for (bool waited = false; count;) {
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = std::min(count, kMostVectors);
    const ssize_t moved = call(message);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (!moved) return ECONNRESET;
    std::size_t wanted = 0;
    for (std::size_t i = 0; i < message.msg_iovlen; ++i) wanted += vectors[i].iov_len;
    advance(vectors, count, static_cast<std::size_t>(moved));
    if (!waits || static_cast<std::size_t>(moved) == wanted) continue;
    if (waited) return ETIMEDOUT;
    waited = true;
  }
  return 0;
}

// Receives all, and is woken once for it: the kernel would wake a reader for each segment. It is poll that waits: a
// recvmsg that has taken a part of the bytes would be woken only when as many as the mark come after it.
class Connection {
 public:
  explicit Connection(int fd) : fd_(fd) {
    timeval limit{};
    socklen_t size = sizeof limit;
    if (getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, &size)) return;
    const std::int64_t most = 1000 * static_cast<std::int64_t>(limit.tv_sec) + (limit.tv_usec + 999) / 1000;
    if (most) limit_ms_ = static_cast<int>(std::min<std::int64_t>(most, std::numeric_limits<int>::max()));
  }

  int operator()(iovec *local, iovec *, std::size_t vectors, std::size_t) {
    return move_all(local, vectors, false, [this](msghdr &message) -> ssize_t {
      wake_at(message);
      pollfd socket{fd_, POLLIN, 0};
      const int ready = poll(&socket, 1, limit_ms_);
      if (!ready) errno = EAGAIN;
      return ready > 0 ? recvmsg(fd_, &message, MSG_DONTWAIT) : -1;
    });
  }

 private:
  void wake_at(const msghdr &message) {
    int bytes = 0;
    for (std::size_t i = 0; i < message.msg_iovlen; ++i) bytes += static_cast<int>(message.msg_iov[i].iov_len);
    // A socket that has no such mark wakes its reader more often.
    if (bytes != mark_) setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
    mark_ = bytes;
  }

  const int fd_;
  int mark_ = 0, limit_ms_ = -1;
};

Words words(const Items &items) { return Words(items.data(), items.count()); }

void raise_if(int error) {
  if (!error) return;
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

void send_pieces(int fd, const py::object &addresses, const py::object &lengths) {
  const Items from(addresses, 8, "addresses"), bytes(lengths, 8, "lengths");
  int error = 0;
  {
    const py::gil_scoped_release released;
    const Pieces pieces(words(from), words(from), words(bytes), std::max<std::size_t>(1, bytes.count()), 0);
    std::vector<iovec> vectors;
    for (const Piece &piece : pieces.all) {
      if (!piece.length) continue;
      void *const at = reinterpret_cast<void *>(piece.source);
      if (!vectors.empty() && static_cast<char *>(vectors.back().iov_base) + vectors.back().iov_len == at)
        vectors.back().iov_len += piece.length;
      else
        vectors.push_back({at, piece.length});
    }
    error = move_all(vectors.data(), vectors.size(), true,
                     [fd](msghdr &message) { return sendmsg(fd, &message, MSG_NOSIGNAL); });
  }
  raise_if(error);
}

py::object receive_pieces(int fd, const py::object &addresses, const py::object &lengths, std::size_t rows,
                          std::size_t parts) {
  const Items to(addresses, 8, "addresses"), bytes(lengths, 8, "lengths");
  std::vector<std::uint64_t> sums;
  int error = 0;
  {
    const py::gil_scoped_release released;
    const Pieces pieces(words(to), words(to), words(bytes), rows, parts);
    sums.assign(rows * parts, kChecksumSeed);
    Connection connection(fd);
    error = pieces.fill(connection, 0, rows, sums.data(), std::atomic<int>{0});
  }
  raise_if(error);
  return py::module_::import("array").attr("array")(
      "Q", py::bytes(reinterpret_cast<const char *>(sums.data()), 8 * sums.size()));
}

}  // namespace

void bind_sockets(py::module_ &m) {
  m.def("send_pieces", &send_pieces, py::arg("fd"), py::arg("addresses"), py::arg("lengths"));
  m.def("receive_pieces", &receive_pieces, py::arg("fd"), py::arg("addresses"), py::arg("lengths"), py::arg("rows"),
        py::arg("parts"));
}

}  // namespace kvasir
