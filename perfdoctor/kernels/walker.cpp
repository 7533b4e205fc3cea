// Reads where the gradients of a list of parameters lie, and launches compiled kernels, without the cost of Python.
//
// In Python `[p.grad.data_ptr() for p in parameters]` takes longer than the kernel that reads the gradients.
// No CUDA header is needed: the driver's functions are looked up in the driver at run time.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
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
  if (keys.has(c10::DispatchKey::ZeroTensor) || !impl->has_storage()) return false;  // no memory, or that of torch.func
  if (!(impl->is_cuda() || impl->is_cpu()) || impl->layout() != c10::kStrided) return false;
  const int64_t code = element_code(gradient.scalar_type());
  if (code < 0 || !impl->is_non_overlapping_and_dense()) return false;
  row[1] = impl->numel();
  row[0] = row[1] == 0 ? 0 : reinterpret_cast<int64_t>(gradient.data_ptr());
  if (row[0] == 0 && row[1] != 0) return false;  // storage resized to nothing: there is nothing to read
  const int64_t device = impl->is_cuda() ? impl->device().index() : -1;
  row[2] = code | (of_parameter ? kOfParameter : 0) | ((device + 1) << 32);
  return true;
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

// Where the objects behind an item lay when it was last read. Used to fetch their memory ahead and for nothing else:
// fetching a wrong address does nothing, and what is compared is always read anew.
struct Hint {
  const char* impl = nullptr;
  const char* meta = nullptr;
  const char* gradient = nullptr;
  const char* storage = nullptr;

  void fetch() const {
    __builtin_prefetch(impl + 32), __builtin_prefetch(meta + 40);
    __builtin_prefetch(gradient), __builtin_prefetch(gradient + 64), __builtin_prefetch(gradient + 128);
    __builtin_prefetch(gradient + 192);
    __builtin_prefetch(storage + 24);
  }
  // Once read_row has said that there is a gradient.
  void learn(PyObject* item, bool of_parameter) {
    const at::Tensor& tensor = THPVariable_Unpack(item);
    const at::Tensor& read = of_parameter ? tensor.unsafeGetTensorImpl()->grad() : tensor;
    impl = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
    meta = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl()->autograd_meta());
    gradient = reinterpret_cast<const char*>(read.unsafeGetTensorImpl());
    storage = reinterpret_cast<const char*>(read.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
};

// What `gather` found, to be compared with what is there now.
class Walk {
 public:
  explicit Walk(const at::Tensor& rows) : hints_(rows.size(0)), rows_(rows.size(0) * kRow) {
    std::memcpy(rows_.data(), rows.const_data_ptr<int64_t>(), rows_.size() * sizeof(int64_t));
  }

  // Whether the gradients of these items lie where the rows say, all of them.
  bool matches(py::list items, bool always_grad) {
    return walk(items.ptr(), always_grad, [](PyObject* item, size_t) { return item; });
  }

  // The same for a list of (name, item), and whether the names are these.
  bool matches_pairs(py::list pairs, py::tuple names) {
    if (static_cast<size_t>(PyTuple_GET_SIZE(names.ptr())) != hints_.size()) return false;
    return walk(pairs.ptr(), false, [&names](PyObject* pair, size_t index) -> PyObject* {
      if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) return nullptr;
      PyObject* name = PyTuple_GET_ITEM(pair, 0);
      PyObject* expected = PyTuple_GET_ITEM(names.ptr(), index);
      if (name != expected && !(PyUnicode_CheckExact(name) && PyUnicode_CheckExact(expected) &&
                                PyUnicode_Compare(name, expected) == 0)) return nullptr;
      return PyTuple_GET_ITEM(pair, 1);
    });
  }

 private:
  static constexpr size_t kAhead = 32;

  template <typename ItemOf>
  bool walk(PyObject* list, bool always_grad, ItemOf item_of) {
    const size_t count = hints_.size();
    if (static_cast<size_t>(PyList_GET_SIZE(list)) != count) return false;
    int64_t row[kRow];
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        __builtin_prefetch(PyList_GET_ITEM(list, i + kAhead));
        hints_[i + kAhead].fetch();
      }
      PyObject* item = item_of(PyList_GET_ITEM(list, i), i);
      const int64_t* want = rows_.data() + i * kRow;
      if (item == nullptr || !read_row(item, always_grad, row)) return false;
      if (row[0] != want[0] || row[1] != want[1] || row[2] != want[2]) return false;
      if (row[2] != kNone) hints_[i].learn(item, (row[2] & kOfParameter) != 0);
    }
    return true;
  }

  std::vector<Hint> hints_;
  std::vector<int64_t> rows_;
};

// Autograd must know that the .grad of these items were written: a kernel of ours does not tell it.
void bump_versions(py::list items) {
  const int64_t count = PyList_GET_SIZE(items.ptr());
  for (int64_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(items.ptr(), i);
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(item));
    if (type != parameter_type && type != tensor_type) continue;  // another thread changed the list
    const at::Tensor& gradient = THPVariable_Unpack(item).unsafeGetTensorImpl()->grad();
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

using CaptureInfo = int (*)(void*, int*, uint64_t*, void**, const void**, size_t*);
using UserObjectCreate = int (*)(void**, void*, void (*)(void*), unsigned, unsigned);
using RetainUserObject = int (*)(void*, void*, unsigned, unsigned);

// The number of the stream's graph capture, and the graph; 0 where there is none or the driver cannot say.
uint64_t capture_of(int64_t stream, void** graph) {
  static const auto info = driver_call<CaptureInfo>("cuStreamGetCaptureInfo_v2");
  int status = 0;
  uint64_t id = 0;
  constexpr int kActive = 1;
  if (info == nullptr || info(reinterpret_cast<void*>(stream), &status, &id, graph, nullptr, nullptr) != 0) return 0;
  return status == kActive ? id : 0;
}

std::mutex dead_mutex;
std::vector<int64_t> dead;

// The driver calls this from a thread of its own when a graph and all that was made from it are gone: no Python here.
void graph_died(void* token) {
  const std::lock_guard<std::mutex> guard(dead_mutex);
  dead.push_back(reinterpret_cast<int64_t>(token));
}

std::vector<int64_t> take_dead() {
  const std::lock_guard<std::mutex> guard(dead_mutex);
  return std::exchange(dead, {});
}

// Whether `token` will be in take_dead() once the graph that is being captured on the stream is gone.
bool lives_with_graph(int64_t stream, int64_t token) {
  static const auto create = driver_call<UserObjectCreate>("cuUserObjectCreate");
  static const auto retain = driver_call<RetainUserObject>("cuGraphRetainUserObject");
  constexpr unsigned kNoDestructorSync = 1, kMove = 1;
  void* graph = nullptr;
  void* object = nullptr;
  if (create == nullptr || retain == nullptr || capture_of(stream, &graph) == 0 || graph == nullptr) return false;
  if (create(&object, reinterpret_cast<void*>(token), &graph_died, 1, kNoDestructorSync) != 0) return false;
  return retain(graph, object, 1, kMove) == 0;  // where it fails, the object is kept for good, and so is the table
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

  // With these values for the arguments from `first` on.
  void run_with(int64_t stream, size_t first, const std::vector<int64_t>& values) {
    if (first + values.size() > values_.size()) throw std::out_of_range("more values than the kernel has arguments");
    std::copy(values.begin(), values.end(), values_.begin() + first);
    run(stream);
  }

  void set(size_t at, const at::Tensor& tensor) { values_[at] = reinterpret_cast<int64_t>(tensor.data_ptr()); }

  // Writes a fresh float32 scalar on `like`'s device: its address is argument `at`; `number` is argument `number_at`.
  at::Tensor run_scalar(int64_t stream, const at::Tensor& like, int64_t at, int64_t number_at, double number) {
    at::Tensor out = at::empty({}, like.options().dtype(at::kFloat));
    set(at, out);
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

using EventRecord = int (*)(void*, void*);
using StreamWaitEvent = int (*)(void*, void*, unsigned);
using MemcpyAsync = int (*)(uint64_t, uint64_t, size_t, void*);

// A copy on the stream `side` of what `stream` has written so far; the event `copied` comes behind it. Nothing waits.
void copy_out(int64_t stream, int64_t target, int64_t source, int64_t num_bytes, int64_t side, int64_t ready,
              int64_t copied) {
  static const auto record = driver_call<EventRecord>("cuEventRecord");
  static const auto wait = driver_call<StreamWaitEvent>("cuStreamWaitEvent");
  static const auto copy = driver_call<MemcpyAsync>("cuMemcpyAsync");
  if (record == nullptr || wait == nullptr || copy == nullptr) throw std::runtime_error("no CUDA driver");
  const auto handle = [](int64_t value) { return reinterpret_cast<void*>(value); };
  int code = record(handle(ready), handle(stream));
  if (code == 0) code = wait(handle(side), handle(ready), 0);
  if (code == 0) code = copy(target, source, num_bytes, handle(side));
  if (code == 0) code = record(handle(copied), handle(side));
  if (code != 0) throw std::runtime_error("a copy to the host failed with CUDA error " + std::to_string(code));
}

// The columns of the statistics of all gradients and of their total: five of [columns - 1], then five of [].
std::vector<at::Tensor> split_columns(const at::Tensor& out, const at::Tensor& counts) {
  at::AutoDispatchBelowAutograd guard;
  const int64_t last = counts.size(0) - 1;
  std::vector<at::Tensor> columns;
  for (int64_t i = 0; i < 4; ++i) columns.push_back(out.select(0, i).narrow(0, 0, last));
  columns.push_back(counts.narrow(0, 0, last));
  for (int64_t i = 0; i < 4; ++i) columns.push_back(out.select(0, i).select(0, last));
  columns.push_back(counts.select(0, last));
  return columns;
}

// Statistics by two launches, `read` and `finish`, into fresh tensors on `like`'s device: their addresses are the
// arguments from `read_at` and from `finish_at` on.
std::vector<at::Tensor> run_stats(Launch& read, Launch& finish, int64_t stream, const at::Tensor& like,
                                  int64_t num_columns, size_t read_at, size_t finish_at) {
  at::Tensor out = at::empty({4, num_columns}, like.options().dtype(at::kFloat));
  at::Tensor counts = at::empty({num_columns}, like.options().dtype(at::kLong));
  read.set(read_at, out), read.set(read_at + 1, counts);
  finish.set(finish_at, out), finish.set(finish_at + 1, counts);
  read.run(stream);
  finish.run(stream);
  return {out, counts};
}

}  // namespace

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
  m.def("split_columns", &split_columns);
  m.def("bump_versions", &bump_versions);
  py::class_<Launch>(m, "Launch")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, std::vector<int64_t>, const std::vector<size_t>&>())
      .def("run", &Launch::run)
      .def("run_with", &Launch::run_with)
      .def("run_scalar", &Launch::run_scalar);
  m.def("run_stats", &run_stats);
}
