// out = x + y, 16 bytes a thread and load.
//
// A block takes one tile of blockDim.x * kAhead vectors of each input. A whole tile, and only the last is not, needs no
// comparison: all loads are in flight before the first sum is formed. What is in flight fills the memory's pipe.
#include <pybind11/pybind11.h>

#include "vectors.cuh"

namespace {

template <typename T>
__device__ Vector<T> sum(const Vector<T>& x, const Vector<T>& y) {
  Vector<T> out;
#pragma unroll
  for (int i = 0; i < Vector<T>::kSize; ++i) out.at[i] = rounded<T>(widened(x.at[i]) + widened(y.at[i]));
  return out;
}

template <typename T, int kAhead>
__global__ void add_kernel(const T* x, const T* y, T* out, int64_t num_elements) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t num_vectors = num_elements / kSize;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * blockDim.x * kAhead, first = tile + threadIdx.x;
  const auto* from_x = reinterpret_cast<const Vector<T>*>(x) + first;
  const auto* from_y = reinterpret_cast<const Vector<T>*>(y) + first;
  auto* to = reinterpret_cast<Vector<T>*>(out) + first;
  if (tile + static_cast<int64_t>(blockDim.x) * kAhead <= num_vectors) {
    Vector<T> left[kAhead], right[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      left[i] = load_vector(from_x + i * blockDim.x);
      right[i] = load_vector(from_y + i * blockDim.x);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) store_vector(to + i * blockDim.x, sum(left[i], right[i]));
    return;
  }
  for (int64_t i = 0; first + i < num_vectors; i += blockDim.x)
    store_vector(to + i, sum(load_vector(from_x + i), load_vector(from_y + i)));
  const int64_t tail = num_vectors * kSize + threadIdx.x;  // fewer than 16 bytes are left over
  if (tail < num_elements) out[tail] = rounded<T>(widened(x[tail]) + widened(y[tail]));
}

// Views that start off a 16-byte boundary: one element a thread.
template <typename T>
__global__ void add_any_kernel(const T* x, const T* y, T* out, int64_t num_elements) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < num_elements) out[i] = rounded<T>(widened(x[i]) + widened(y[i]));
}

template <typename T, int kAhead>
void launch(int64_t x, int64_t y, int64_t out, int64_t num_elements, int threads, cudaStream_t stream) {
  const bool aligned = is_aligned(x) && is_aligned(y) && is_aligned(out);
  const int64_t per_block = aligned ? static_cast<int64_t>(threads) * kAhead * Vector<T>::kSize : threads;
  const auto blocks = static_cast<unsigned>((num_elements + per_block - 1) / per_block);
  const auto kernel = aligned ? add_kernel<T, kAhead> : add_any_kernel<T>;
  kernel<<<blocks, threads, 0, stream>>>(pointer<T>(x), pointer<T>(y), pointer<T>(out), num_elements);
  check_launch();
}

void add(int64_t x, int64_t y, int64_t out, int64_t num_elements, int element, int threads, int ahead,
         int64_t stream) {
  with_type(element, [&](auto zero) {
    using T = decltype(zero);
    const auto chosen = with_ahead(ahead, launch<T, 1>, launch<T, 2>, launch<T, 4>);
    chosen(x, y, out, num_elements, threads, pointer<CUstream_st>(stream));
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("add", &add); }
