// unpack_: this rank's slices of a reduced bucket, multiplied, cast and copied
// or added into its partitions.
#pragma once

#include "chunk_loops.cuh"
#include "factors.cuh"

namespace z3ext::cuda {

template <typename BucketT, typename PartitionT>
struct Unpack {
  const FactorChain& multipliers;
  bool accumulate;

  __device__ __forceinline__ bool reads_destination() const {
    return accumulate;
  }

  template <int N>
  __device__ __forceinline__ void operator()(
      const BucketT (&values)[N], PartitionT (&partition)[N]) const {
    BucketT reduced[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      reduced[k] = values[k];
    }
    multiply_by_factors(reduced, multipliers);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const auto unpacked = cast<PartitionT>(reduced[k]);
      partition[k] = accumulate
                         ? from_float<PartitionT>(add_rounded(
                               to_float(partition[k]), to_float(unpacked)))
                         : unpacked;
    }
  }
};

// One resident block fewer than elsewhere: where it accumulates, a thread holds
// the destination's elements too.
template <typename BucketT, typename PartitionT>
__global__ void __launch_bounds__(kThreads, kMinBlocks - 1) unpack_kernel(
    const __grid_constant__ Table<TransformEntry> table,
    const __grid_constant__ FactorChain multipliers,
    bool accumulate) {
  const Unpack<BucketT, PartitionT> unpack{multipliers, accumulate};
  for (int64_t chunk = blockIdx.x; chunk < table.chunk_count;
       chunk += gridDim.x) {
    const TransformEntry& entry = table.entries[find_entry(table, chunk)];
    const int64_t entry_chunk = chunk - entry.first_chunk;
    if (entry.source == nullptr) {
      zero_chunk(
          static_cast<PartitionT*>(entry.destination),
          chunk_range(entry_chunk, entry.numel, entry.head));
    } else {
      transform_chunk<BucketT, PartitionT>(entry, entry_chunk, unpack);
    }
  }
}

} // namespace z3ext::cuda
