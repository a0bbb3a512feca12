#include "grid.cuh"
#include "launch.h"
#include "pack_rows_kernel.cuh"

namespace z3ext::cuda {
namespace {

struct Launches {
  const std::vector<RowsEntry>& entries;
  int64_t row_numel;
  FactorChain reciprocals;
  bool* flag;
  cudaStream_t stream;
};

template <typename GradT, typename BucketT>
void launch(const Launches& launches, DType grad_dtype) {
  for (const Table<RowsEntry>& table :
       plan_tables(entries_of_dtype(launches.entries, grad_dtype))) {
    pack_rows_kernel<GradT, BucketT>
        <<<grid_size(table.chunk_count), kThreads, 0, launches.stream>>>(
            table, launches.reciprocals, launches.row_numel, launches.flag);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// The checks admit no float64 gradient and no float64 bucket.
template <typename BucketT>
void launch_for_grads(const Launches& launches) {
  launch<Half, BucketT>(launches, DType::kHalf);
  launch<BFloat16, BucketT>(launches, DType::kBFloat16);
  launch<float, BucketT>(launches, DType::kFloat);
}

} // namespace

void launch_pack_rows(
    const std::vector<RowsEntry>& entries,
    DType bucket_dtype,
    int64_t row_numel,
    const FactorChain& reciprocals,
    bool* flag,
    cudaStream_t stream) {
  const Launches launches{entries, row_numel, reciprocals, flag, stream};
  switch (bucket_dtype) {
    case DType::kHalf:
      return launch_for_grads<Half>(launches);
    case DType::kBFloat16:
      return launch_for_grads<BFloat16>(launches);
    default:
      return launch_for_grads<float>(launches);
  }
}

} // namespace z3ext::cuda
