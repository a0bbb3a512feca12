#include "grid.cuh"
#include "launch.h"
#include "unpack_kernel.cuh"

namespace z3ext::cuda {
namespace {

struct Launches {
  std::vector<Table<TransformEntry>> tables;
  FactorChain multipliers;
  bool accumulate;
  cudaStream_t stream;
};

template <typename BucketT, typename PartitionT>
void launch(const Launches& launches) {
  for (const Table<TransformEntry>& table : launches.tables) {
    unpack_kernel<BucketT, PartitionT>
        <<<grid_size(table.chunk_count), kThreads, 0, launches.stream>>>(
            table, launches.multipliers, launches.accumulate);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// The checks admit no float64 bucket and no float64 partition.
template <typename BucketT>
void launch_for_partition(const Launches& launches, DType partition_dtype) {
  switch (partition_dtype) {
    case DType::kHalf:
      return launch<BucketT, Half>(launches);
    case DType::kBFloat16:
      return launch<BucketT, BFloat16>(launches);
    default:
      return launch<BucketT, float>(launches);
  }
}

} // namespace

void launch_unpack(
    const std::vector<TransformEntry>& entries,
    DType bucket_dtype,
    DType partition_dtype,
    const FactorChain& multipliers,
    bool accumulate,
    cudaStream_t stream) {
  const Launches launches{
      plan_tables(entries), multipliers, accumulate, stream};
  switch (bucket_dtype) {
    case DType::kHalf:
      return launch_for_partition<Half>(launches, partition_dtype);
    case DType::kBFloat16:
      return launch_for_partition<BFloat16>(launches, partition_dtype);
    default:
      return launch_for_partition<float>(launches, partition_dtype);
  }
}

} // namespace z3ext::cuda
