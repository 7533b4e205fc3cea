// Where the gradients of a list of parameters lie, read without the cost of Python.
//
// In Python `[p.grad.data_ptr() for p in parameters]` takes longer than the kernel that reads the gradients.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
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

// Whether a kernel can read the tensor's memory: it has some, of its own, and no pending operation.
bool is_readable(const c10::TensorImpl* impl) {
  const c10::DispatchKeySet keys = impl->key_set();
  if (keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Negative)) return false;
  if (keys.has(c10::DispatchKey::ZeroTensor) || !impl->has_storage()) return false;  // no memory, or that of torch.func
  // Storage resized to nothing: the address of a view into it is then its offset alone, which is not 0.
  if (impl->numel() != 0 && impl->unsafe_storage().data() == nullptr) return false;
  return (impl->is_cuda() || impl->is_cpu()) && impl->layout() == c10::kStrided;
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
  if (!is_readable(impl)) return false;
  const int64_t code = element_code(gradient.scalar_type());
  if (code < 0 || !impl->is_non_overlapping_and_dense()) return false;
  row[1] = impl->numel();
  row[0] = row[1] == 0 ? 0 : reinterpret_cast<int64_t>(gradient.data_ptr());
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

}  // namespace
