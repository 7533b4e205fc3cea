// The CUDA C++ twin of grad_stats_triton.py: the same pointer table, the same results.
//
// One block takes one item after another: eight 16-byte loads a thread are in flight before the first is used; a block
// adds with warp shuffles and shared memory; the last block to finish adds the blocks' partials in a fixed order.
// A slot is two int64: the address, and count | class << 32 | part << 40. Classes 0 to 2: count words of float32,
// float16, bfloat16 from a 16-byte aligned address; classes 4 to 6: count elements (at most 1024) at any alignment.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLoads = 8;
constexpr int kPack = 8;
constexpr unsigned kMagnitude = 0x7FFFFFFFu;
constexpr unsigned kInfinity = 0x7F800000u;
constexpr int kL2 = 0, kAbsMax = 1, kAll = 2;

struct Slot {
  int64_t address;
  int64_t rest;
  __device__ int count() const { return static_cast<int>(rest & 0x7FFFFFFF); }
  __device__ int kind() const { return static_cast<int>((rest >> 32) & 0xFF); }
  __device__ int64_t part() const { return rest >> 40; }
};

// What a thread has seen. The largest magnitude is kept as float bits: ordered like the values, NaN on top.
template <int kWhat>
struct Seen {
  float square = 0.0f, total = 0.0f;
  unsigned top = 0, bad = 0;
  __device__ void add(float x) {
    const unsigned bits = __float_as_uint(x) & kMagnitude;
    if constexpr (kWhat != kAbsMax) square += x * x;
    if constexpr (kWhat == kAll) total += x, bad += bits >= kInfinity;
    if constexpr (kWhat != kL2) top = max(top, bits);
  }
  __device__ void add_word(unsigned word, int kind) {
    if (kind == 0) {
      add(__uint_as_float(word));
    } else if (kind == 2) {
      add(__uint_as_float(word << 16));
      add(__uint_as_float(word & 0xFFFF0000u));
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
      add(pair.x);
      add(pair.y);
    }
  }
  __device__ void add_four(const uint4& words, int kind) {
    Seen part;  // four short chains instead of a long one
    part.add_word(words.x, kind), part.add_word(words.y, kind);
    part.add_word(words.z, kind), part.add_word(words.w, kind);
    merge(part);
  }
  __device__ void merge(const Seen& other) {
    square += other.square, total += other.total;
    top = max(top, other.top), bad += other.bad;
  }
};

__device__ Slot read_slot(const int64_t* slots, int index) {
  const longlong2 both = __ldg(reinterpret_cast<const longlong2*>(slots) + index);
  return {both.x, both.y};
}

template <int kWhat>
__device__ void read_elements(Seen<kWhat>& seen, const Slot& slot) {
  const int kind = slot.kind() & 3;
  for (int i = threadIdx.x; i < slot.count(); i += kThreads) {
    const unsigned word = kind == 0 ? reinterpret_cast<const unsigned*>(slot.address)[i]
                                    : reinterpret_cast<const unsigned short*>(slot.address)[i];
    if (kind == 1) {
      seen.add(__half2float(__ushort_as_half(static_cast<unsigned short>(word))));
    } else {
      seen.add(__uint_as_float(kind == 0 ? word : word << 16));
    }
  }
}

template <int kWhat>
__device__ void read_words(Seen<kWhat>& seen, const Slot& slot) {
  const uint4* at = reinterpret_cast<const uint4*>(slot.address) + threadIdx.x;
  const int kind = slot.kind();
  int left = slot.count() / 4 - static_cast<int>(threadIdx.x);
  for (; left > (kLoads - 1) * kThreads; left -= kLoads * kThreads, at += kLoads * kThreads) {
    uint4 words[kLoads];
    Seen<kWhat> group;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = __ldcg(at + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) group.add_four(words[i], kind);
    seen.merge(group);
  }
  uint4 words[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) words[i] = left > i * kThreads ? __ldcg(at + i * kThreads) : uint4{0, 0, 0, 0};
  Seen<kWhat> group;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) group.add_four(words[i], kind);
  seen.merge(group);
}

// Eight small slots: all descriptors first, then all loads.
template <int kWhat>
__device__ void read_pack(Seen<kWhat>& seen, const int64_t* slots, int first) {
  Slot pack[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i) pack[i] = read_slot(slots, first + i);
  if (pack[0].kind() >= 4) {
    for (int i = 0; i < kPack; ++i) read_elements(seen, pack[i]);
    return;
  }
  const int lane = static_cast<int>(threadIdx.x);
  uint4 words[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    words[i] = lane < pack[i].count() / 4 ? __ldcg(reinterpret_cast<const uint4*>(pack[i].address) + lane)
                                          : uint4{0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kPack; ++i) seen.add_four(words[i], pack[0].kind());
}

struct Totals {
  double total = 0, square = 0, bad = 0;
  unsigned top = 0;
};

__device__ Totals merged(const Totals& a, const Totals& b) {
  return {a.total + b.total, a.square + b.square, a.bad + b.bad, max(a.top, b.top)};
}

__device__ Totals shuffled(const Totals& mine, int distance) {
  return {__shfl_down_sync(~0u, mine.total, distance), __shfl_down_sync(~0u, mine.square, distance),
          __shfl_down_sync(~0u, mine.bad, distance), __shfl_down_sync(~0u, mine.top, distance)};
}

// The block's totals, valid in thread 0: warps by shuffle, then the warps' sums through shared memory.
__device__ Totals block_totals(Totals mine) {
  __shared__ Totals of_warp[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) mine = merged(mine, shuffled(mine, distance));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  Totals sum = of_warp[0];
  if (threadIdx.x == 0)
    for (int warp = 1; warp < kWarps; ++warp) sum = merged(sum, of_warp[warp]);
  __syncthreads();
  return sum;
}

template <int kWhat>
__device__ Totals widened(const Seen<kWhat>& seen) {
  return {static_cast<double>(seen.total), static_cast<double>(seen.square), static_cast<double>(seen.bad), seen.top};
}

__device__ void store(double* parts, int64_t stride, const Totals& totals) {
  parts[0] = totals.total, parts[stride] = totals.square;
  parts[2 * stride] = static_cast<double>(totals.top), parts[3 * stride] = totals.bad;
}

__device__ Totals load(const double* parts, int64_t stride) {
  return {__ldcg(parts), __ldcg(parts + stride), __ldcg(parts + 3 * stride),
          static_cast<unsigned>(__ldcg(parts + 2 * stride))};
}

// True in all threads of the block that finishes last; it then sees what the others stored.
__device__ bool is_last(int* counter) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(counter, 1) == static_cast<int>(gridDim.x) - 1;
    __threadfence();
    if (last) *counter = 0;  // ready for the next launch on this stream
  }
  __syncthreads();
  return last;
}

__device__ Totals all_blocks(const double* parts) {
  Totals sum;
  for (int block = threadIdx.x; block < gridDim.x; block += kThreads) sum = merged(sum, load(parts + block, gridDim.x));
  return block_totals(sum);
}

template <int kWhat>
__global__ __launch_bounds__(kThreads, 4) void norm_kernel(const int64_t* slots, double* parts, int* counter, float* out,
                                                          float* coefficient, float max_norm, int num_chunks,
                                                          int num_items) {
  Totals totals;
  Slot next = blockIdx.x < num_chunks ? read_slot(slots, blockIdx.x) : Slot{0, 0};
  for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
    Seen<kWhat> seen;
    if (item < num_chunks) {
      const Slot slot = next;  // the next one is on its way while this one's words are
      if (item + static_cast<int>(gridDim.x) < num_chunks) next = read_slot(slots, item + gridDim.x);
      read_words(seen, slot);
    } else {
      read_pack(seen, slots, num_chunks + (item - num_chunks) * kPack);
    }
    totals = merged(totals, widened(seen));
  }
  const Totals block = block_totals(totals);
  if (threadIdx.x == 0) store(parts + blockIdx.x, gridDim.x, block);
  if (!is_last(counter)) return;
  const Totals all = all_blocks(parts);
  if (threadIdx.x != 0) return;
  const float norm = kWhat == kL2 ? static_cast<float>(sqrt(all.square)) : __uint_as_float(all.top);
  const float ratio = max_norm / (norm + 1e-6f);
  *out = norm;
  *coefficient = ratio > 1.0f ? 1.0f : ratio;  // a NaN stays, as in torch
}

// One column of out [4, columns] and of counts.
__device__ void store_stats(float* out, int64_t* counts, int column, int columns, const Totals& totals,
                            int64_t num_elements) {
  out[column] = static_cast<float>(totals.total);
  out[columns + column] = static_cast<float>(totals.total / static_cast<double>(num_elements));
  out[2 * columns + column] = static_cast<float>(sqrt(totals.square));
  out[3 * columns + column] = __uint_as_float(totals.top);
  counts[column] = static_cast<int64_t>(totals.bad);
}

__global__ __launch_bounds__(kThreads, 3) void stats_kernel(const int64_t* slots, double* parts, double* block_parts,
                                                           int* counter, float* out, int64_t* counts, int num_slots,
                                                           int64_t num_parts, int64_t num_elements, int num_tensors) {
  Totals totals;
  for (int index = blockIdx.x; index < num_slots; index += gridDim.x) {
    const Slot slot = read_slot(slots, index);
    if (slot.count() == 0) continue;  // fills up a pack
    Seen<kAll> seen;
    if (slot.kind() >= 4) {
      read_elements(seen, slot);
    } else {
      read_words(seen, slot);
    }
    const Totals of_slot = block_totals(widened(seen));
    if (threadIdx.x == 0) {
      store(parts + slot.part(), num_parts, of_slot);
      totals = merged(totals, of_slot);
    }
  }
  if (threadIdx.x == 0) store(block_parts + blockIdx.x, gridDim.x, totals);
  if (!is_last(counter)) return;
  const Totals all = all_blocks(block_parts);
  if (threadIdx.x == 0) store_stats(out, counts, num_tensors, num_tensors + 1, all, num_elements);
}

// One warp a tensor.
__global__ void per_tensor_kernel(const double* parts, const int64_t* first_part, const int64_t* num_elements, float* out,
                                  int64_t* counts, int64_t num_parts, int num_tensors) {
  const int tensor = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (tensor >= num_tensors) return;
  Totals sum;
  for (int64_t part = first_part[tensor] + threadIdx.x % 32; part < first_part[tensor + 1]; part += 32)
    sum = merged(sum, load(parts + part, num_parts));
  for (int distance = 16; distance > 0; distance /= 2) sum = merged(sum, shuffled(sum, distance));
  if (threadIdx.x % 32 == 0) store_stats(out, counts, tensor, num_tensors + 1, sum, num_elements[tensor]);
}

__device__ unsigned scaled_word(unsigned word, float factor, int kind) {
  if (kind == 0) return __float_as_uint(__uint_as_float(word) * factor);
  if (kind == 1) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    const __half2 scaled = __floats2half2_rn(pair.x * factor, pair.y * factor);
    return *reinterpret_cast<const unsigned*>(&scaled);
  }
  const __nv_bfloat162 scaled =
      __floats2bfloat162_rn(__uint_as_float(word << 16) * factor, __uint_as_float(word & 0xFFFF0000u) * factor);
  return *reinterpret_cast<const unsigned*>(&scaled);
}

__device__ void scale_elements(const Slot& slot, float factor) {
  const int kind = slot.kind() & 3;
  for (int i = threadIdx.x; i < slot.count(); i += kThreads) {
    if (kind == 0) {
      reinterpret_cast<float*>(slot.address)[i] *= factor;
    } else {
      unsigned short* half = reinterpret_cast<unsigned short*>(slot.address) + i;
      *half = static_cast<unsigned short>(scaled_word(*half, factor, kind));
    }
  }
}

// Four loads before the first store: the compiler cannot know that a store does not change what a load would read.
__device__ void scale_words(const Slot& slot, float factor) {
  constexpr int kAhead = 4;
  const int kind = slot.kind();
  uint4* at = reinterpret_cast<uint4*>(slot.address) + threadIdx.x;
  for (int left = slot.count() / 4 - static_cast<int>(threadIdx.x); left > 0;
       left -= kAhead * kThreads, at += kAhead * kThreads) {
    uint4 words[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (left > i * kThreads) words[i] = __ldcg(at + i * kThreads);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (left > i * kThreads)
        at[i * kThreads] = {scaled_word(words[i].x, factor, kind), scaled_word(words[i].y, factor, kind),
                            scaled_word(words[i].z, factor, kind), scaled_word(words[i].w, factor, kind)};
  }
}

__global__ __launch_bounds__(kThreads) void scale_kernel(const int64_t* slots, const float* coefficient, int num_slots) {
  const float factor = *coefficient;
  if (factor >= 1.0f) return;  // nothing to clip; a NaN goes on
  for (int behind = blockIdx.x; behind < num_slots; behind += gridDim.x) {
    const Slot slot = read_slot(slots, num_slots - 1 - behind);  // what the norm read last is still in the L2 cache
    if (slot.kind() >= 4) {
      scale_elements(slot, factor);
      continue;
    }
    scale_words(slot, factor);
  }
}

}  // namespace

// What grad_stats.cpp binds. They return a cudaError_t.
int launch_norm(const int64_t* slots, double* parts, int* counter, float* out, float* coefficient, float max_norm,
                int num_chunks, int num_items, int what, int grid, void* stream) {
  const auto kernel = what == kL2 ? norm_kernel<kL2> : norm_kernel<kAbsMax>;
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(slots, parts, counter, out, coefficient, max_norm,
                                                                   num_chunks, num_items);
  return static_cast<int>(cudaGetLastError());
}

int launch_stats(const int64_t* slots, double* parts, double* block_parts, int* counter, const int64_t* first_part,
                 const int64_t* num_elements, float* out, int64_t* counts, int num_slots, int64_t num_parts,
                 int64_t all_elements, int num_tensors, int grid, void* stream) {
  stats_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      slots, parts, block_parts, counter, out, counts, num_slots, num_parts, all_elements, num_tensors);
  constexpr int kPerBlock = 4;
  per_tensor_kernel<<<(num_tensors + kPerBlock - 1) / kPerBlock, 32 * kPerBlock, 0, static_cast<cudaStream_t>(stream)>>>(
      parts, first_part, num_elements, out, counts, num_parts, num_tensors);
  return static_cast<int>(cudaGetLastError());
}

int launch_scale(const int64_t* slots, const float* coefficient, int num_slots, int grid, void* stream) {
  scale_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(slots, coefficient, num_slots);
  return static_cast<int>(cudaGetLastError());
}
