// pack_: cast each gradient to the bucket's dtype, divide it, put it in its
// place in the bucket and look at what was stored.
#pragma once

#include "chunk_loops.cuh"
#include "factors.cuh"

namespace z3ext::cuda {

template <typename GradT, typename BucketT>
struct Pack {
  const FactorChain& reciprocals;
  bool nonfinite = false;

  __device__ __forceinline__ bool reads_destination() const {
    return false;
  }

  template <int N>
  __device__ __forceinline__ void operator()(
      const GradT (&grads)[N], BucketT (&stored)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      stored[k] = cast<BucketT>(grads[k]);
    }
    multiply_by_factors(stored, reciprocals);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      nonfinite |= is_nonfinite(stored[k]);
    }
  }
};

// One dtype of gradients per launch: the loop then holds one cast, and its
// registers leave room for more resident blocks than a switch over the dtypes.
template <typename GradT, typename BucketT>
__global__ void __launch_bounds__(kThreads, kMinBlocks) pack_kernel(
    const __grid_constant__ Table<TransformEntry> table,
    const __grid_constant__ FactorChain reciprocals,
    bool* flag) {
  Pack<GradT, BucketT> pack{reciprocals};
  for (int64_t chunk = blockIdx.x; chunk < table.chunk_count;
       chunk += gridDim.x) {
    const TransformEntry& entry = table.entries[find_entry(table, chunk)];
    transform_chunk<GradT, BucketT>(entry, chunk - entry.first_chunk, pack);
  }
  raise_flag(flag, pack.nonfinite);
}

} // namespace z3ext::cuda
