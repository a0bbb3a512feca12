// unscale_: a partition as float, times one factor that lives on the device.
#pragma once

#include "chunk_loops.cuh"

namespace z3ext::cuda {

template <typename PartitionT>
struct Unscale {
  float scale;

  __device__ __forceinline__ bool reads_destination() const {
    return false;
  }

  template <int N>
  __device__ __forceinline__ void operator()(
      const PartitionT (&values)[N], float (&scaled)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      scaled[k] = to_float(values[k]) * scale;
    }
  }
};

// scale: one float, or one double that is rounded to float.
template <typename PartitionT>
__global__ void __launch_bounds__(kThreads, kMinBlocks) unscale_kernel(
    TransformEntry partition,
    int64_t chunks,
    const void* scale,
    bool scale_is_double) {
  const Unscale<PartitionT> unscale{
      scale_is_double ? static_cast<float>(*static_cast<const double*>(scale))
                      : *static_cast<const float*>(scale)};
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    transform_chunk<PartitionT, float>(partition, chunk, unscale);
  }
}

} // namespace z3ext::cuda
