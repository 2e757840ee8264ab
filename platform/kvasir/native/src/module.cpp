// The native half of kvasir.native; `_native.pyi` is its contract, `_twin.py` the same in Python.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "bytes/bytes.hpp"
#include "bytes/process.hpp"
#include "bytes/sockets.hpp"
#include "decide/costs.hpp"
#include "hash.hpp"
#include "items.hpp"
#include "index/shadow.hpp"
#include "index/tree.hpp"
#include "stream/framing.hpp"
#include "stream/lanes.hpp"
#include "stream/progress.hpp"

namespace py = pybind11;

namespace {

using kvasir::Items;
using kvasir::LogWriter;
using kvasir::Shadow;
using kvasir::Tree;
using kvasir::Words;

py::object names_array(const std::uint64_t *names, std::size_t count) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  const py::object &type =
      storage.call_once_and_store_result([]() -> py::object { return py::module_::import("array").attr("array"); })
          .get_stored();
  return type("Q", py::bytes(reinterpret_cast<const char *>(names), 8 * count));
}

py::object chain_hashes(const py::object &tokens, std::size_t block_size, std::uint64_t root) {
  if (block_size == 0) throw py::value_error("block_size must be at least 1");
  const Items ids(tokens, 4, "tokens");
  std::vector<std::uint64_t> names(ids.count() / block_size);
  kvasir::chain(root, reinterpret_cast<const unsigned char *>(ids.data()), block_size, names.size(), names.data());
  return names_array(names.data(), names.size());
}

Words words(const Items &items) { return Words(items.data(), items.count()); }

void copy_pieces(const py::object &sources, const py::object &targets, const py::object &lengths) {
  const Items from(sources, 8, "sources"), to(targets, 8, "targets"), bytes(lengths, 8, "lengths");
  const py::gil_scoped_release released;
  kvasir::copy_pieces(words(from), words(to), words(bytes));
}

py::object checksum_pieces(const py::object &addresses, const py::object &lengths, std::size_t group) {
  const Items at(addresses, 8, "addresses"), bytes(lengths, 8, "lengths");
  std::vector<std::uint64_t> sums(group ? at.count() / group : 0);
  {
    const py::gil_scoped_release released;
    kvasir::checksum_pieces(words(at), words(bytes), group, sums.data());
  }
  return names_array(sums.data(), sums.size());
}

py::object checksum_weights(std::size_t count) {
  std::vector<std::uint64_t> weights(count);
  for (std::size_t i = 0; i < count; ++i) weights[i] = kvasir::checksum_weight(i);
  return names_array(weights.data(), weights.size());
}

py::tuple part(const LogWriter &log, std::int64_t cursor) { return py::make_tuple(py::bytes(log.data()), cursor); }

py::object stats(const Tree &tree) {
  const kvasir::TreeStats s = tree.stats();
  return py::module_::import("kvasir.native.stats")
      .attr("TreeStats")(s.blocks, s.predicted, s.names, s.nodes, s.groups, s.unswept, s.expired, s.evicted, s.bytes);
}

void bind_tree(py::module_ &m) {
  py::class_<Tree>(m, "PrefixTree")
      .def(py::init<std::uint64_t, std::uint64_t>(), py::arg("capacity"), py::arg("predicted_capacity"))
      .def("add_group", &Tree::add_group)
      .def("drop_group", &Tree::drop_group, py::arg("group"))
      .def("sweep", &Tree::sweep, py::arg("budget"))
      .def(
          "apply",
          [](Tree &tree, const std::vector<std::uint32_t> &groups, const py::bytes &log) {
            const std::string_view data = log;
            return tree.apply(groups, data.data(), data.size());
          },
          py::arg("groups"), py::arg("log"))
      .def(
          "predict",
          [](Tree &tree, std::uint32_t group, const py::object &names, double now) {
            const Items items(names, 8, "names");
            return tree.predict(group, items.data(), items.count(), now);
          },
          py::arg("group"), py::arg("names"), py::arg("now"))
      .def(
          "settle",
          [](Tree &tree, std::uint32_t group, const py::object &names, std::uint64_t prediction) {
            const Items items(names, 8, "names");
            return tree.settle(group, items.data(), items.count(), prediction);
          },
          py::arg("group"), py::arg("names"), py::arg("prediction"))
      .def("expire", &Tree::expire, py::arg("before"))
      .def(
          "match",
          [](Tree &tree, const py::object &names, const py::object &depths) {
            const Items items(names, 8, "names"), out(depths, 4, "depths", true);
            return tree.match(items.data(), items.count(), static_cast<std::uint32_t *>(out.writable()), out.count());
          },
          py::arg("names"), py::arg("depths"))
      .def("held", &Tree::held, py::arg("group"), py::arg("slot"))
      .def(
          "export",
          [](const Tree &tree, std::uint32_t group, unsigned rank, std::uint32_t cursor, std::uint64_t limit) {
            LogWriter log;
            const std::int64_t next = tree.export_from(group, rank, cursor, limit, log);
            return part(log, next);
          },
          py::arg("group"), py::arg("rank"), py::arg("cursor"), py::arg("limit"))
      .def("stats", &stats)
      .def("check_integrity", &Tree::check);
}

void bind_shadow(py::module_ &m) {
  py::class_<Shadow>(m, "Shadow")
      .def(py::init<std::size_t, Shadow::RootOf>(), py::arg("ranks"), py::arg("root_of"))
      .def(
          "store",
          [](Shadow &shadow, std::size_t rank, unsigned medium, std::optional<std::uint64_t> parent,
             const py::object &keys, const py::object &tokens, std::size_t block_size, const std::string &salt,
             const std::string &adapter) {
            const Items named(keys, 8, "keys"), ids(tokens, 4, "tokens");
            if (block_size == 0 || ids.count() % block_size || ids.count() / block_size != named.count())
              throw py::value_error(std::to_string(named.count()) + " keys of blocks of " +
                                    std::to_string(block_size) + " tokens do not fit their tokens");
            return shadow.store(rank, medium, parent, named.data(), named.count(),
                                reinterpret_cast<const unsigned char *>(ids.data()), block_size, salt, adapter);
          },
          py::arg("rank"), py::arg("medium"), py::arg("parent"), py::arg("keys"), py::arg("tokens"),
          py::arg("block_size"), py::arg("salt") = "", py::arg("adapter") = "")
      .def(
          "remove",
          [](Shadow &shadow, std::size_t rank, unsigned medium, const py::object &keys) {
            const Items named(keys, 8, "keys");
            return shadow.remove(rank, medium, named.data(), named.count());
          },
          py::arg("rank"), py::arg("medium"), py::arg("keys"))
      .def("clear", &Shadow::clear, py::arg("rank"), py::arg("medium"))
      .def(
          "ingest",
          [](Shadow &shadow, std::size_t rank, const py::bytes &payload) {
            const std::string_view data = payload;
            return shadow.ingest(rank, data.data(), data.size());
          },
          py::arg("rank"), py::arg("payload"))
      .def("take_log", [](Shadow &shadow) { return py::bytes(shadow.take_log()); })
      .def(
          "export",
          [](const Shadow &shadow, std::size_t rank, std::uint32_t cursor, std::uint64_t limit) {
            LogWriter log;
            const std::int64_t next = shadow.export_from(rank, cursor, limit, log);
            return part(log, next);
          },
          py::arg("rank"), py::arg("cursor"), py::arg("limit"))
      .def("held", &Shadow::held, py::arg("rank"), py::arg("medium"))
      .def_property_readonly("unnamed", &Shadow::unnamed);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const kvasir::Missing &error) {
      PyErr_SetString(PyExc_KeyError, error.what());
    } catch (const std::logic_error &error) {
      // The library's own: what Tree::check finds. Its derived classes have translations of their own.
      if (typeid(error) != typeid(std::logic_error)) throw;
      PyErr_SetString(PyExc_AssertionError, error.what());
    }
  });
  m.attr("SLOTS") = kvasir::kSlots;
  m.attr("PREDICTED") = kvasir::kMedia;
  m.def("chain_hashes", &chain_hashes, py::arg("tokens"), py::arg("block_size"), py::arg("root"));
  m.attr("CHECKSUM_SEED") = kvasir::kChecksumSeed;
  m.attr("CHECKSUM_FACTOR") = kvasir::kChecksumFactor;
  m.attr("CHECKSUM_LANES") = kvasir::kChecksumLanes;
  m.attr("CHECKSUM_TILE") = kvasir::kChecksumTile;
  m.def("copy_pieces", &copy_pieces, py::arg("sources"), py::arg("targets"), py::arg("lengths"));
  m.def("checksum_pieces", &checksum_pieces, py::arg("addresses"), py::arg("lengths"), py::arg("group"));
  m.def("checksum_weights", &checksum_weights, py::arg("count"));
  kvasir::bind_process(m);
  kvasir::bind_sockets(m);
  bind_tree(m);
  bind_shadow(m);
  kvasir::bind_costs(m);
  kvasir::bind_framing(m);
  kvasir::bind_progress(m);
  kvasir::bind_lanes(m);
}
