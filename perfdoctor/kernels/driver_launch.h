// Launches of compiled kernels and copies to the host, by the driver's own calls.
//
// No CUDA header is needed: the driver's functions are looked up in the driver at run time.
#pragma once

#include <ATen/ATen.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

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
using IsCapturing = int (*)(void*, int*);
using UserObjectCreate = int (*)(void**, void*, void (*)(void*), unsigned, unsigned);
using RetainUserObject = int (*)(void*, void*, unsigned, unsigned);

// Whether a graph capture is on there, or the driver cannot say.
bool is_capturing(int64_t stream) {
  static const auto ask = driver_call<IsCapturing>("cuStreamIsCapturing");
  int status = 0;
  return ask == nullptr || ask(reinterpret_cast<void*>(stream), &status) != 0 || status != 0;
}

// The number of the stream's graph capture, and the graph; 0 where there is none or the driver cannot say.
uint64_t capture_of(int64_t stream, void** graph) {
  static const auto info = driver_call<CaptureInfo>("cuStreamGetCaptureInfo_v2");
  int status = 0;
  uint64_t id = 0;
  constexpr int kActive = 1;
  if (info == nullptr || info(reinterpret_cast<void*>(stream), &status, &id, graph, nullptr, nullptr) != 0) return 0;
  return status == kActive ? id : 0;
}

struct DeadGraphs {
  std::mutex mutex;
  std::vector<int64_t> tokens;
};

// Never destroyed: the driver may still report graphs while the process ends, after destructors of this module ran.
DeadGraphs& dead_graphs() {
  static DeadGraphs* const graphs = new DeadGraphs;
  return *graphs;
}

// The driver calls this from a thread of its own when a graph and all that was made from it are gone: no Python here.
void graph_died(void* token) {
  DeadGraphs& dead = dead_graphs();
  const std::lock_guard<std::mutex> guard(dead.mutex);
  dead.tokens.push_back(reinterpret_cast<int64_t>(token));
}

std::vector<int64_t> take_dead() {
  DeadGraphs& dead = dead_graphs();
  const std::lock_guard<std::mutex> guard(dead.mutex);
  return std::exchange(dead.tokens, {});
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

  const int64_t* values_from(size_t first) const { return values_.data() + first; }

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
using EventQuery = int (*)(void*);
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

// Whether the event has come. During a graph capture it has not: asking would break the capture.
bool has_come(int64_t stream, int64_t event) {
  static const auto query = driver_call<EventQuery>("cuEventQuery");
  if (query == nullptr) throw std::runtime_error("no CUDA driver");
  if (is_capturing(stream)) return false;
  const int code = query(reinterpret_cast<void*>(event));
  constexpr int kNotReady = 600;
  if (code != 0 && code != kNotReady)
    throw std::runtime_error("a copy to the host failed with CUDA error " + std::to_string(code));
  return code == 0;
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
