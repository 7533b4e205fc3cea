// GeLU, tanh form, 16 bytes a thread and load: 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3).
//
// It is computed as x / (1 + exp(-2 u)), which is the same: one exp and one division, and where tanh is near -1 nothing
// cancels. Twenty instructions an element; the memory needs no more than fifty to be the slower one.
#include <pybind11/pybind11.h>

#include "vectors.cuh"

namespace {

// __expf and __fdividef are right to about two units in the last place here. For x far below zero exp is infinite and
// the quotient -0; x = -inf gives NaN, as PyTorch's formula does.
__device__ float gelu(float x) {
  constexpr float kTwice = 2.0f * 0.7978845608028654f;
  const float twice_u = kTwice * x * (1.0f + 0.044715f * x * x);
  return __fdividef(x, 1.0f + __expf(-twice_u));
}

template <typename T>
__device__ Vector<T> gelu(const Vector<T>& x) {
  Vector<T> out;
#pragma unroll
  for (int i = 0; i < Vector<T>::kSize; ++i) out.at[i] = rounded<T>(gelu(widened(x.at[i])));
  return out;
}

// A block takes one tile of blockDim.x * kAhead vectors. A whole tile, and only the last is not, needs no comparison:
// all loads are in flight before the first is used, and the results leave one behind the other.
template <typename T, int kAhead>
__global__ void gelu_kernel(const T* x, T* out, int64_t num_elements) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t num_vectors = num_elements / kSize;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * blockDim.x * kAhead, first = tile + threadIdx.x;
  const auto* from = reinterpret_cast<const Vector<T>*>(x) + first;
  auto* to = reinterpret_cast<Vector<T>*>(out) + first;
  if (tile + static_cast<int64_t>(blockDim.x) * kAhead <= num_vectors) {
    Vector<T> values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) values[i] = load_vector(from + i * blockDim.x);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) store_vector(to + i * blockDim.x, gelu(values[i]));
    return;
  }
  for (int64_t i = 0; first + i < num_vectors; i += blockDim.x)
    store_vector(to + i, gelu(load_vector(from + i)));
  const int64_t tail = num_vectors * kSize + threadIdx.x;  // fewer than 16 bytes are left over
  if (tail < num_elements) out[tail] = rounded<T>(gelu(widened(x[tail])));
}

// Views that start off a 16-byte boundary: one element a thread.
template <typename T>
__global__ void gelu_any_kernel(const T* x, T* out, int64_t num_elements) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < num_elements) out[i] = rounded<T>(gelu(widened(x[i])));
}

template <typename T, int kAhead>
void launch(int64_t x, int64_t out, int64_t num_elements, int threads, cudaStream_t stream) {
  const bool aligned = is_aligned(x) && is_aligned(out);
  const int64_t per_block = aligned ? static_cast<int64_t>(threads) * kAhead * Vector<T>::kSize : threads;
  const auto blocks = static_cast<unsigned>((num_elements + per_block - 1) / per_block);
  const auto kernel = aligned ? gelu_kernel<T, kAhead> : gelu_any_kernel<T>;
  kernel<<<blocks, threads, 0, stream>>>(pointer<T>(x), pointer<T>(out), num_elements);
  check_launch();
}

void run(int64_t x, int64_t out, int64_t num_elements, int element, int threads, int ahead, int64_t stream) {
  with_type(element, [&](auto zero) {
    using T = decltype(zero);
    const auto chosen = with_ahead(ahead, launch<T, 1>, launch<T, 2>, launch<T, 4>);
    chosen(x, out, num_elements, threads, pointer<CUstream_st>(stream));
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("gelu", &run); }
