// Reads where the gradients of a list of parameters lie, and launches compiled kernels, without the cost of Python.
//
// In Python `[p.grad.data_ptr() for p in parameters]` takes longer than the kernel that reads the gradients.
// No CUDA header is needed: the two driver calls are looked up in the driver at run time.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

// One row a list item: address, number of elements, code. The code is the element type, 256 for a parameter's gradient,
// and the device's index in the upper half; -1 where there is no gradient.
constexpr int64_t kRow = 3;
constexpr int64_t kOfParameter = 256;
constexpr int64_t kNone = -1;

PyObject* parameter_type = nullptr;
PyObject* tensor_type = nullptr;

int64_t element_code(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float: return 0;
    case c10::ScalarType::Half: return 1;
    case c10::ScalarType::BFloat16: return 2;
    default: return -1;
  }
}

// False where only Python can tell what the item means: subclasses, sparse, strides with holes, other types.
// `always_grad`: every item stands for its .grad; else only parameters and leaves that require one do.
bool read_row(PyObject* item, bool always_grad, int64_t* row) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(item));
  if (type != parameter_type && type != tensor_type) return false;
  const at::Tensor& tensor = THPVariable_Unpack(item);
  const bool of_parameter = always_grad || type == parameter_type || (tensor.requires_grad() && tensor.is_leaf());
  const at::Tensor& gradient = of_parameter ? tensor.unsafeGetTensorImpl()->grad() : tensor;
  if (!gradient.defined()) {
    row[0] = 0, row[1] = 0, row[2] = kNone;
    return true;
  }
  const c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
  const c10::DispatchKeySet keys = impl->key_set();
  if (keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Negative)) return false;
  if (!(impl->is_cuda() || impl->is_cpu()) || impl->layout() != c10::kStrided) return false;
  const int64_t code = element_code(gradient.scalar_type());
  if (code < 0 || !impl->is_non_overlapping_and_dense()) return false;
  row[1] = impl->numel();
  row[0] = row[1] == 0 ? 0 : reinterpret_cast<int64_t>(gradient.data_ptr());
  const int64_t device = impl->is_cuda() ? impl->device().index() : -1;
  row[2] = code | (of_parameter ? kOfParameter : 0) | ((device + 1) << 32);
  return true;
}

// The objects of thousands of parameters lie all over memory: fetch the next ones while this one is compared.
void prefetch_tensor(PyObject* item) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(item));
  if (type == parameter_type || type == tensor_type) __builtin_prefetch(THPVariable_Unpack(item).unsafeGetTensorImpl());
}

// int64 [len(items), 3] on the CPU, or None where an item needs Python.
py::object gather(py::list items, bool always_grad) {
  const int64_t count = PyList_GET_SIZE(items.ptr());
  at::Tensor rows = at::empty({count, kRow}, at::kLong);
  int64_t* row = rows.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i, row += kRow)
    if (!read_row(PyList_GET_ITEM(items.ptr(), i), always_grad, row)) return py::none();
  return py::cast(rows);
}

// Whether the gradients lie where `expected` (from gather) says, all of them.
bool matches(py::list items, bool always_grad, const at::Tensor& expected) {
  const int64_t count = PyList_GET_SIZE(items.ptr());
  if (expected.size(0) != count) return false;
  const int64_t* want = expected.const_data_ptr<int64_t>();
  int64_t row[kRow];
  for (int64_t i = 0; i < count; ++i, want += kRow) {
    if (i + 16 < count) __builtin_prefetch(PyList_GET_ITEM(items.ptr(), i + 16));
    if (i + 8 < count) prefetch_tensor(PyList_GET_ITEM(items.ptr(), i + 8));
    if (!read_row(PyList_GET_ITEM(items.ptr(), i), always_grad, row)) return false;
    if (row[0] != want[0] || row[1] != want[1] || row[2] != want[2]) return false;
  }
  return true;
}

// Autograd must know that the .grad of these items were written: a kernel of ours does not tell it.
void bump_versions(py::list items) {
  const int64_t count = PyList_GET_SIZE(items.ptr());
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& gradient = THPVariable_Unpack(PyList_GET_ITEM(items.ptr(), i)).unsafeGetTensorImpl()->grad();
    if (gradient.defined() && !gradient.is_inference()) gradient.unsafeGetTensorImpl()->bump_version();
  }
}

using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                             void**);
using ParamInfo = int (*)(void*, size_t, size_t*, size_t*);
using GetContext = int (*)(void**);
using SetContext = int (*)(void*);

template <typename Function>
Function driver_call(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(driver, name));
}

// A compiled kernel with its arguments: eight bytes each, as they lie in memory (little endian).
class Launch {
 public:
  // `sizes` are the bytes that each argument has in the kernel's signature; behind them the kernel may take scratch
  // pointers that Triton adds, which are null here. Throws where the compiled kernel's own signature says otherwise.
  Launch(int64_t function, int64_t grid, int64_t threads, int64_t shared, std::vector<int64_t> arguments,
         const std::vector<size_t>& sizes)
      : function_(reinterpret_cast<void*>(function)), grid_(grid), threads_(threads), shared_(shared),
        values_(std::move(arguments)) {
    launch_ = driver_call<LaunchKernel>("cuLaunchKernel");
    get_context_ = driver_call<GetContext>("cuCtxGetCurrent");
    set_context_ = driver_call<SetContext>("cuCtxSetCurrent");
    const auto param_info = driver_call<ParamInfo>("cuFuncGetParamInfo");
    if (launch_ == nullptr || param_info == nullptr || get_context_ == nullptr || set_context_ == nullptr)
      throw std::runtime_error("the CUDA driver lacks cuFuncGetParamInfo");
    size_t offset = 0, size = 0, count = 0;
    while (param_info(function_, count, &offset, &size) == 0) {
      const size_t expected = count < sizes.size() ? sizes[count] : 8;
      if (size != expected) throw std::runtime_error("argument " + std::to_string(count) + " has another size");
      ++count;
    }
    if (count < sizes.size() || count > sizes.size() + 2) throw std::runtime_error("another number of arguments");
    values_.resize(count, 0);
    for (auto& value : values_) pointers_.push_back(&value);
    get_context_(&context_);
  }
  Launch(const Launch&) = delete;

  void run(int64_t stream) {
    void* current = nullptr;
    if (get_context_(&current) != 0 || current != context_) set_context_(context_);
    const int code = launch_(function_, grid_, 1, 1, threads_, 1, 1, shared_, reinterpret_cast<void*>(stream),
                             pointers_.data(), nullptr);
    if (current != context_ && current != nullptr) set_context_(current);
    if (code != 0) throw std::runtime_error("cuLaunchKernel failed with CUDA error " + std::to_string(code));
  }

  // Writes a fresh float32 scalar on `like`'s device: its address is argument `at`; `number` is argument `number_at`.
  at::Tensor run_scalar(int64_t stream, const at::Tensor& like, int64_t at, int64_t number_at, double number) {
    at::Tensor out = at::empty({}, like.options().dtype(at::kFloat));
    values_[at] = reinterpret_cast<int64_t>(out.data_ptr());
    const float single = static_cast<float>(number);
    std::memcpy(&values_[number_at], &single, sizeof(single));
    run(stream);
    return out;
  }

 private:
  void* function_;
  unsigned grid_, threads_, shared_;
  std::vector<int64_t> values_;
  std::vector<void*> pointers_;
  void* context_ = nullptr;
  LaunchKernel launch_;
  GetContext get_context_;
  SetContext set_context_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_types", [](py::object parameter, py::object tensor) {
    parameter_type = parameter.release().ptr();
    tensor_type = tensor.release().ptr();
  });
  m.def("gather", &gather);
  m.def("matches", &matches);
  m.def("bump_versions", &bump_versions);
  py::class_<Launch>(m, "Launch")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, std::vector<int64_t>, const std::vector<size_t>&>())
      .def("run", &Launch::run)
      .def("run_scalar", &Launch::run_scalar);
}
