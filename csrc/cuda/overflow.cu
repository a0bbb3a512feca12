#include "grid.cuh"
#include "launch.h"
#include "overflow_kernel.cuh"

namespace z3ext::cuda {
namespace {

template <typename T>
void launch(const ReadEntry& buf, bool* flag, cudaStream_t stream) {
  const int64_t chunks = chunk_count(buf.numel, buf.head);
  overflow_kernel<T>
      <<<grid_size(chunks), kThreads, 0, stream>>>(buf, chunks, flag);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

} // namespace

void launch_overflow(
    const void* buf,
    DType dtype,
    int64_t numel,
    bool* flag,
    cudaStream_t stream) {
  if (numel == 0) {
    return;
  }
  const ReadEntry entry = make_read_entry(buf, dtype, numel, /*segment=*/0);
  switch (dtype) {
    case DType::kHalf:
      return launch<Half>(entry, flag, stream);
    case DType::kBFloat16:
      return launch<BFloat16>(entry, flag, stream);
    case DType::kFloat:
      return launch<float>(entry, flag, stream);
    case DType::kDouble:
      return launch<double>(entry, flag, stream);
  }
}

} // namespace z3ext::cuda
