// flat_overflow: is any element of one buffer inf or nan?
#pragma once

#include "chunk_loops.cuh"

namespace z3ext::cuda {

template <typename T>
struct FindNonfinite {
  bool found = false;

  __device__ __forceinline__ void operator()(T value) {
    found |= is_nonfinite(value);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    overflow_kernel(ReadEntry buf, int64_t chunks, bool* flag) {
  FindNonfinite<T> nonfinite;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    read_chunk(
        static_cast<const T*>(buf.source),
        chunk_range(chunk, buf.numel, buf.head),
        nonfinite);
  }
  raise_flag(flag, nonfinite.found);
}

} // namespace z3ext::cuda
