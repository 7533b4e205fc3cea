// Python's side of grad_stats.cu. Addresses and the stream come as integers: no torch header, so it compiles in seconds.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

int launch_norm(const int64_t* slots, double* parts, int* counter, float* out, float* coefficient, float max_norm,
                int num_chunks, int num_items, int what, int grid, void* stream);
int launch_stats(const int64_t* slots, double* parts, double* block_parts, int* counter, const int64_t* first_part,
                 const int64_t* num_elements, float* out, int64_t* counts, int num_slots, int64_t num_parts,
                 int64_t all_elements, int num_tensors, int grid, void* stream);
int launch_scale(const int64_t* slots, const float* coefficient, int num_slots, int grid, void* stream);

namespace {

template <typename Type>
Type* at(int64_t address) {
  return reinterpret_cast<Type*>(address);
}

void check(int code) {
  if (code != 0) throw std::runtime_error("a launch of grad_stats.cu failed with CUDA error " + std::to_string(code));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("norm", [](int64_t slots, int64_t parts, int64_t counter, int64_t out, int64_t coefficient, float max_norm,
                   int num_chunks, int num_items, int what, int grid, int64_t stream) {
    check(launch_norm(at<int64_t>(slots), at<double>(parts), at<int>(counter), at<float>(out), at<float>(coefficient),
                      max_norm, num_chunks, num_items, what, grid, at<void>(stream)));
  });
  m.def("stats", [](int64_t slots, int64_t parts, int64_t block_parts, int64_t counter, int64_t first_part,
                    int64_t num_elements, int64_t out, int64_t counts, int num_slots, int64_t num_parts,
                    int64_t all_elements, int num_tensors, int grid, int64_t stream) {
    check(launch_stats(at<int64_t>(slots), at<double>(parts), at<double>(block_parts), at<int>(counter),
                       at<int64_t>(first_part), at<int64_t>(num_elements), at<float>(out), at<int64_t>(counts),
                       num_slots, num_parts, all_elements, num_tensors, grid, at<void>(stream)));
  });
  m.def("scale", [](int64_t slots, int64_t coefficient, int num_slots, int grid, int64_t stream) {
    check(launch_scale(at<int64_t>(slots), at<float>(coefficient), num_slots, grid, at<void>(stream)));
  });
}
