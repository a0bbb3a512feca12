#include "check_kernel.cuh"
#include "grid.cuh"
#include "launch.h"

namespace z3ext::cuda {
namespace {

template <typename T>
void launch(
    const std::vector<Table<ReadEntry>>& tables,
    double* partials,
    double* sumsq,
    bool* flag,
    cudaStream_t stream) {
  for (const Table<ReadEntry>& table : tables) {
    segment_partials_kernel<T>
        <<<grid_size(table.chunk_count), kThreads, 0, stream>>>(
            table, partials, flag);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    segment_sums_kernel<<<grid_size(table.entry_count), kThreads, 0, stream>>>(
        table, partials, sumsq);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

} // namespace

int64_t partial_count(const std::vector<Table<ReadEntry>>& tables) {
  return tables.empty()
             ? 0
             : tables.back().preceding_chunks + tables.back().chunk_count;
}

void launch_segment_check(
    const std::vector<Table<ReadEntry>>& tables,
    DType dtype,
    double* partials,
    double* sumsq,
    bool* flag,
    cudaStream_t stream) {
  switch (dtype) {
    case DType::kHalf:
      return launch<Half>(tables, partials, sumsq, flag, stream);
    case DType::kBFloat16:
      return launch<BFloat16>(tables, partials, sumsq, flag, stream);
    case DType::kFloat:
      return launch<float>(tables, partials, sumsq, flag, stream);
    case DType::kDouble:
      return launch<double>(tables, partials, sumsq, flag, stream);
  }
}

} // namespace z3ext::cuda
