#include "grid.cuh"
#include "launch.h"
#include "pack_kernel.cuh"

namespace z3ext::cuda {
namespace {

template <typename GradT, typename BucketT>
void launch(
    const std::vector<Table<TransformEntry>>& tables,
    const FactorChain& reciprocals,
    bool* flag,
    cudaStream_t stream) {
  for (const Table<TransformEntry>& table : tables) {
    pack_kernel<GradT, BucketT>
        <<<grid_size(table.chunk_count), kThreads, 0, stream>>>(
            table, reciprocals, flag);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// The checks admit no float64 gradient and no float64 bucket.
template <typename BucketT>
void launch_for_grads(
    const std::vector<TransformEntry>& entries,
    const FactorChain& reciprocals,
    bool* flag,
    cudaStream_t stream) {
  launch<Half, BucketT>(
      plan_tables(entries_of_dtype(entries, DType::kHalf)),
      reciprocals,
      flag,
      stream);
  launch<BFloat16, BucketT>(
      plan_tables(entries_of_dtype(entries, DType::kBFloat16)),
      reciprocals,
      flag,
      stream);
  launch<float, BucketT>(
      plan_tables(entries_of_dtype(entries, DType::kFloat)),
      reciprocals,
      flag,
      stream);
}

} // namespace

void launch_pack(
    const std::vector<TransformEntry>& entries,
    DType bucket_dtype,
    const FactorChain& reciprocals,
    bool* flag,
    cudaStream_t stream) {
  switch (bucket_dtype) {
    case DType::kHalf:
      return launch_for_grads<Half>(entries, reciprocals, flag, stream);
    case DType::kBFloat16:
      return launch_for_grads<BFloat16>(entries, reciprocals, flag, stream);
    default:
      return launch_for_grads<float>(entries, reciprocals, flag, stream);
  }
}

} // namespace z3ext::cuda
