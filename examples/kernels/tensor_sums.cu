// The sums of many tensors in one launch: one block a tensor.
//
// Threads add what they read; the 32 threads of a warp add by shuffles, register to register; the warps meet in shared
// memory. The table, on the device, says where each tensor lies: int64 [num_tensors, 2], address and element count.
#include <pybind11/pybind11.h>

#include "vectors.cuh"

namespace {

__device__ double warp_sum(double mine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) mine += __shfl_down_sync(~0u, mine, distance);
  return mine;  // the whole sum in lane 0
}

__device__ double block_sum(double mine) {
  __shared__ double of_warp[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  mine = warp_sum(mine);
  if (lane == 0) of_warp[warp] = mine;
  __syncthreads();
  if (warp == 0) mine = warp_sum(lane < num_warps ? of_warp[lane] : 0.0);
  return mine;  // the whole sum in thread 0
}

template <typename T>
__device__ float vector_sum(const Vector<T>& values) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Vector<T>::kSize; ++i) sum += widened(values.at[i]);
  return sum;
}

// Four 16-byte loads a thread are in flight. Sixteen values are added in float32, those sums in float64: a long chain
// of float32 additions would lose a digit for every hundredfold of its length.
template <typename T>
__device__ double thread_sum(const T* from, int64_t num_elements) {
  constexpr int kAhead = 4, kSize = Vector<T>::kSize;
  double sum = 0.0;
  int64_t done = 0;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    const auto* vectors = reinterpret_cast<const Vector<T>*>(from);
    const int64_t num_vectors = num_elements / kSize;
    for (int64_t first = threadIdx.x; first < num_vectors; first += kAhead * blockDim.x) {
      Vector<T> values[kAhead] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i * blockDim.x < num_vectors) values[i] = load_vector(vectors + first + i * blockDim.x);
      float part = 0.0f;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) part += vector_sum(values[i]);
      sum += part;
    }
    done = num_vectors * kSize;
  }
  for (int64_t i = done + threadIdx.x; i < num_elements; i += blockDim.x) sum += widened(from[i]);
  return sum;
}

template <typename T>
__global__ void sums_kernel(const int64_t* table, float* out) {
  const int64_t* row = table + 2 * blockIdx.x;
  const double sum = block_sum(thread_sum(reinterpret_cast<const T*>(row[0]), row[1]));
  if (threadIdx.x == 0) out[blockIdx.x] = static_cast<float>(sum);
}

void run(int64_t table, int64_t out, int num_tensors, int element, int threads, int64_t stream) {
  with_type(element, [&](auto zero) {
    sums_kernel<decltype(zero)><<<num_tensors, threads, 0, pointer<CUstream_st>(stream)>>>(pointer<int64_t>(table),
                                                                                           pointer<float>(out));
    check_launch();
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("sums", &run); }
