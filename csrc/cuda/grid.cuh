// How many blocks a launch gets.
#pragma once

#include <cstdint>

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace z3ext::cuda {

// Blocks per multiprocessor: several times what is resident at once, so that
// the hardware evens out chunks of unequal size; more chunks than that are
// taken in strides.
constexpr int64_t kBlocksPerMultiprocessor = 32;

// A query of the current device; it does not wait for the device.
inline unsigned grid_size(int64_t work_items) {
  int device = 0;
  int multiprocessors = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(
      &multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const int64_t most = multiprocessors * kBlocksPerMultiprocessor;
  return static_cast<unsigned>(work_items < most ? work_items : most);
}

} // namespace z3ext::cuda
