// 16 bytes at a time: the widest load and store that a thread of this GPU has, as elements of T.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

// Plain loads and stores. The hint that what is loaded is touched once, though it is, costs 4 to 10 % on an H200 (measured
// with Triton's evict_first); on the stores it changes nothing.
template <typename T>
__device__ Vector<T> load_vector(const Vector<T>* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  return *reinterpret_cast<const Vector<T>*>(&words);
}

template <typename T>
__device__ void store_vector(Vector<T>* to, const Vector<T>& values) {
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&values);
}

// Arithmetic is float32 whatever the type, as in PyTorch; a result is rounded once.
__device__ inline float widened(float x) { return x; }
__device__ inline float widened(__half x) { return __half2float(x); }
__device__ inline float widened(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T rounded(float x);
template <>
__device__ inline float rounded<float>(float x) {
  return x;
}
template <>
__device__ inline __half rounded<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls `work` with a value of the element type: 0 float32, 1 float16, 2 bfloat16.
template <typename Work>
void with_type(int element, Work work) {
  if (element == 0) return work(float{});
  if (element == 1) return work(__half{});
  if (element == 2) return work(__nv_bfloat16{});
  throw std::invalid_argument("element " + std::to_string(element) + " is none of 0, 1, 2");
}

// The launcher that was compiled for `ahead` vectors a thread.
template <typename Launch>
Launch* with_ahead(int ahead, Launch* one, Launch* two, Launch* four) {
  if (ahead == 1) return one;
  if (ahead == 2) return two;
  if (ahead == 4) return four;
  throw std::invalid_argument("ahead " + std::to_string(ahead) + " is none of 1, 2, 4");
}

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

inline bool is_aligned(int64_t address) { return address % 16 == 0; }

inline void check_launch() {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
