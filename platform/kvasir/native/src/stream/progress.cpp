#include "progress.hpp"

namespace kvasir {

void bind_progress(py::module_ &m) {
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
}

}  // namespace kvasir
