#include "grid.cuh"
#include "launch.h"
#include "unscale_kernel.cuh"

namespace z3ext::cuda {
namespace {

template <typename PartitionT>
void launch(
    const TransformEntry& entry,
    const void* scale,
    bool scale_is_double,
    cudaStream_t stream) {
  const int64_t chunks = chunk_count(entry.numel, entry.head);
  unscale_kernel<PartitionT><<<grid_size(chunks), kThreads, 0, stream>>>(
      entry, chunks, scale, scale_is_double);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

} // namespace

void launch_unscale(
    const void* partition,
    DType partition_dtype,
    int64_t numel,
    const void* scale,
    bool scale_is_double,
    float* out,
    cudaStream_t stream) {
  if (numel == 0) {
    return;
  }
  const TransformEntry entry = make_transform_entry(
      partition, partition_dtype, out, DType::kFloat, numel);
  switch (partition_dtype) {
    case DType::kHalf:
      return launch<Half>(entry, scale, scale_is_double, stream);
    case DType::kBFloat16:
      return launch<BFloat16>(entry, scale, scale_is_double, stream);
    default: // the checks admit no float64 partition
      return launch<float>(entry, scale, scale_is_double, stream);
  }
}

} // namespace z3ext::cuda
