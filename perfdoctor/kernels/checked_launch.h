// Launches whose arguments are read and checked in the same call: nothing is launched over what was not looked at.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "driver_launch.h"
#include "gradient_walk.h"

namespace {

constexpr int64_t kFlip = 0x7FF4000000000001;  // see metrics_reference.FLIP
constexpr double kSmallest = 2.3e-308;         // below, a float64 has fewer digits, and bits that kFlip does not make long

// False where the item is no number that a double holds.
bool read_number(PyObject* item, double* number) {
  if (PyFloat_Check(item)) {
    *number = PyFloat_AS_DOUBLE(item);
    return true;
  }
  if (!PyLong_Check(item)) return false;
  *number = PyLong_AsDouble(item);
  if (*number != -1.0 || PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return false;
}

int64_t bits_of(double number) {
  if (std::abs(number) < kSmallest) number = 0.0;
  if (std::isnan(number)) number = std::numeric_limits<double>::quiet_NaN();
  int64_t bits = 0;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits ^ kFlip;
}

// What one scalar argument was when the launch was prepared: a tensor of some type, a number, or nothing.
class ScalarKind {
 public:
  ScalarKind(py::handle example, int64_t device) : device_(device) {
    if (example.is_none()) {
      kind_ = kAbsent;
    } else if (THPVariable_Check(example.ptr())) {
      kind_ = static_cast<int64_t>(THPVariable_Unpack(example.ptr()).scalar_type());
    } else {
      kind_ = kNumber;
    }
  }

  // The argument's word; false where the item is of another kind, or a kernel cannot read it where it lies.
  bool read(PyObject* item, int64_t* word) const {
    if (kind_ == kAbsent) return item == Py_None;
    if (kind_ != kNumber) return read_tensor(item, word);
    double number = 0.0;
    if (!read_number(item, &number)) return false;
    *word = bits_of(number);
    return true;
  }

  bool is_number() const { return kind_ == kNumber; }

 private:
  static constexpr int64_t kNumber = -1, kAbsent = -2;

  bool read_tensor(PyObject* item, int64_t* word) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(item));
    if (type != tensor_type && type != parameter_type) return false;
    const at::Tensor& tensor = THPVariable_Unpack(item);
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!is_readable(impl) || static_cast<int64_t>(tensor.scalar_type()) != kind_ || impl->numel() != 1) return false;
    if ((impl->is_cuda() ? impl->device().index() : -1) != device_) return false;
    *word = reinterpret_cast<int64_t>(tensor.const_data_ptr());
    return true;
  }

  int64_t kind_, device_;
};

// The launch of an update: scalars from the third argument on, the weight first; the second is the snapshot.
class ScalarLaunch {
 public:
  // `examples` are the scalars of the launch that this one repeats. device: its index, -1 for the CPU.
  ScalarLaunch(py::object launch, int64_t device, const py::list& examples)
      : keep_(std::move(launch)), launch_(&py::cast<Launch&>(keep_)) {
    for (py::handle example : examples) kinds_.emplace_back(example, device);
  }

  // False, and nothing launched, where an argument is of another kind than it was, or a graph capture is on.
  bool run(int64_t stream, int64_t snapshot, py::handle weight, const py::dict& values) {
    if (static_cast<size_t>(PyDict_GET_SIZE(values.ptr())) + 1 != kinds_.size()) return false;
    words_.resize(kinds_.size() + 1);
    double number = 1.0;
    if (kinds_[0].is_number() && !(read_number(weight.ptr(), &number) && number >= 0.0 && std::isfinite(number)))
      return false;
    if (!kinds_[0].read(weight.ptr(), &words_[1])) return false;
    PyObject *name = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    for (size_t at = 1; PyDict_Next(values.ptr(), &position, &name, &value); ++at)
      if (!kinds_[at].read(value, &words_[at + 1])) return false;
    if (is_capturing(stream)) return false;
    words_[0] = snapshot;
    launch_->run_with(stream, 1, words_);
    return true;
  }

 private:
  py::object keep_;
  Launch* launch_;
  std::vector<ScalarKind> kinds_;
  std::vector<int64_t> words_;
};

// The launch of a check: loss, excuse and the check's number from argument `first` on.
class CheckLaunch {
 public:
  // `walk` and `names`: where the gradients were, and of which parameters; None where only a loss is checked.
  CheckLaunch(py::object launch, size_t first, int64_t device, py::handle loss, py::handle excuse, py::object walk,
              py::tuple names)
      : keep_(std::move(launch)), keep_walk_(std::move(walk)), names_(std::move(names)),
        launch_(&py::cast<Launch&>(keep_)), walk_(keep_walk_.is_none() ? nullptr : &py::cast<Walk&>(keep_walk_)),
        first_(first), loss_(loss, device), excuse_(excuse, device) {}

  // False, and nothing launched, where a gradient has moved, an argument is another, or a graph capture is on.
  bool run(int64_t stream, const py::list& pairs, py::handle loss, py::handle excuse, int64_t check) {
    std::copy_n(launch_->values_from(first_), 2, words_.begin());  // an absent one keeps what it points at
    if (!loss_.read(loss.ptr(), &words_[0]) || !excuse_.read(excuse.ptr(), &words_[1])) return false;
    words_[2] = check;
    if (walk_ == nullptr ? !pairs.empty() : !walk_->matches_pairs(pairs, names_)) return false;
    if (is_capturing(stream)) return false;
    launch_->run_with(stream, first_, words_);
    return true;
  }

 private:
  py::object keep_, keep_walk_;
  py::tuple names_;
  Launch* launch_;
  Walk* walk_;
  size_t first_;
  ScalarKind loss_, excuse_;
  std::vector<int64_t> words_ = std::vector<int64_t>(3);
};

}  // namespace
