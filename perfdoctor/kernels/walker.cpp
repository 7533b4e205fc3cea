// What the host does before a launch, without the cost of Python: the extension module of the three headers.
#include "checked_launch.h"
#include "driver_launch.h"
#include "gradient_walk.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_types", [](py::object parameter, py::object tensor) {
    parameter_type = parameter.release().ptr();
    tensor_type = tensor.release().ptr();
  });
  m.def("gather", &gather);
  py::class_<Walk>(m, "Walk")
      .def(py::init<const at::Tensor&>())
      .def("matches", &Walk::matches)
      .def("matches_pairs", &Walk::matches_pairs);
  m.def("capture_of", [](int64_t stream) {
    void* graph = nullptr;
    return capture_of(stream, &graph);
  });
  m.def("lives_with_graph", &lives_with_graph);
  m.def("take_dead", &take_dead);
  m.def("copy_out", &copy_out);
  m.def("has_come", &has_come);
  m.def("split_columns", &split_columns);
  m.def("bump_versions", &bump_versions);
  py::class_<Launch>(m, "Launch")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, std::vector<int64_t>, const std::vector<size_t>&>())
      .def("run", &Launch::run)
      .def("run_with", &Launch::run_with)
      .def("run_scalar", &Launch::run_scalar);
  m.def("run_stats", &run_stats);
  py::class_<ScalarLaunch>(m, "ScalarLaunch")
      .def(py::init<py::object, int64_t, const py::list&>())
      .def("run", &ScalarLaunch::run);
  py::class_<CheckLaunch>(m, "CheckLaunch")
      .def(py::init<py::object, size_t, int64_t, py::handle, py::handle, py::object, py::tuple>())
      .def("run", &CheckLaunch::run);
}
