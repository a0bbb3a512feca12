// What every kernel here shares: vector loads and stores, and the sum over a
// thread block.
//
// The kernel headers include neither torch nor the CUDA runtime, and use of
// CUDA only: __global__, __device__, __forceinline__, __shared__,
// __grid_constant__, __launch_bounds__, threadIdx, blockIdx, blockDim, gridDim,
// __syncthreads, __shfl_down_sync, __fadd_rn and fma. Whoever supplies these
// can run the same source on a CPU. A block is a multiple of 32 threads.
#pragma once

#include <cstdint>

#include "../numeric.h"
#include "tables.h"

namespace z3ext::cuda {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;

// Blocks that are resident on a multiprocessor at the same time, at the least:
// a bound on the registers of a thread.
constexpr int kMinBlocks = 4;

// Bytes that one thread has under way before it uses the first: four vectors
// per thread and a thousand threads per multiprocessor cover the latency of
// device memory.
constexpr int kBytesInFlight = 4 * kVectorBytes;

__device__ __forceinline__ double to_double(double value) {
  return value;
}
template <typename T>
__device__ __forceinline__ double to_double(T value) {
  return static_cast<double>(to_float(value));
}

// a + b, rounded once. A plain sum could be fused with the product that made
// one of its terms, and that product's own rounding would be lost.
__device__ __forceinline__ float add_rounded(float a, float b) {
  return __fadd_rn(a, b);
}

// --- vectors -----------------------------------------------------------------

template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kNumel = kVectorBytes / static_cast<int>(sizeof(T));
  T values[kNumel];
};

// N consecutive elements, from a 16-byte boundary on.
template <typename T, int N>
__device__ __forceinline__ void load_vectors(const T* source, T (&values)[N]) {
  constexpr int kPerVector = Vector<T>::kNumel;
  static_assert(N % kPerVector == 0, "a group is made of whole vectors");
#pragma unroll
  for (int i = 0; i < N; i += kPerVector) {
    const auto vector = *reinterpret_cast<const Vector<T>*>(source + i);
#pragma unroll
    for (int k = 0; k < kPerVector; ++k) {
      values[i + k] = vector.values[k];
    }
  }
}

// N consecutive elements from anywhere.
template <typename T, int N>
__device__ __forceinline__ void load_scalars(const T* source, T (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    values[i] = source[i];
  }
}

// N consecutive elements, to a 16-byte boundary.
template <typename T, int N>
__device__ __forceinline__ void store_vectors(
    T* destination, const T (&values)[N]) {
  constexpr int kPerVector = Vector<T>::kNumel;
  static_assert(N % kPerVector == 0, "a group is made of whole vectors");
#pragma unroll
  for (int i = 0; i < N; i += kPerVector) {
    Vector<T> vector;
#pragma unroll
    for (int k = 0; k < kPerVector; ++k) {
      vector.values[k] = values[i + k];
    }
    *reinterpret_cast<Vector<T>*>(destination + i) = vector;
  }
}

// --- sums --------------------------------------------------------------------

// The block's sum, in thread 0. The order of the additions depends on nothing
// but the number of threads. Every thread of the block calls it.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warp_sums[kThreads / kWarpSize];
  constexpr unsigned kAllLanes = 0xffffffffu;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(kAllLanes, value, offset);
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  if (lane == 0) {
    warp_sums[warp] = value;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int warps = static_cast<int>(blockDim.x) / kWarpSize;
    for (int i = 1; i < warps; ++i) {
      value += warp_sums[i];
    }
  }
  __syncthreads(); // the next call writes warp_sums again
  return value;
}

// --- flags -------------------------------------------------------------------

// Several threads may write here at once. All of them write the same byte, none
// ever writes false, and the flag is read only after the kernel, so that the
// order does not matter and no atomic is needed.
__device__ __forceinline__ void raise_flag(bool* flag, bool nonfinite) {
  if (nonfinite) {
    *flag = true;
  }
}

} // namespace z3ext::cuda
