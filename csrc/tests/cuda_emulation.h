// Runs csrc/cuda's kernel headers on the CPU: what they use of CUDA, defined in
// plain C++ (csrc/cuda/device_types.cuh lists it). This checks their indexing
// and arithmetic where there is no GPU; it says nothing about their speed.
//
// To be included before any kernel header, in one translation unit.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "support.h"

struct EmulatedDim {
  unsigned x = 0;
};
inline thread_local EmulatedDim threadIdx;
inline thread_local EmulatedDim blockIdx;
inline EmulatedDim blockDim;
inline EmulatedDim gridDim;

namespace z3ext::emulation {

constexpr unsigned kMostThreads = 1024;
inline std::unique_ptr<std::barrier<>> block_barrier;
inline double shuffled[kMostThreads];

// For kernels without __syncthreads: one thread after the other.
template <typename Kernel>
void run_independent(unsigned grid, unsigned threads, const Kernel& kernel) {
  gridDim.x = grid;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
      kernel();
    }
  }
}

// For kernels whose threads wait for each other: one CPU thread for each, one
// block after the other.
template <typename Kernel>
void run_together(unsigned grid, unsigned threads, const Kernel& kernel) {
  gridDim.x = grid;
  blockDim.x = threads;
  block_barrier = std::make_unique<std::barrier<>>(threads);
  std::vector<std::thread> running;
  for (unsigned thread = 0; thread < threads; ++thread) {
    running.emplace_back([thread, grid, &kernel] {
      threadIdx.x = thread;
      for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        kernel();
        block_barrier->arrive_and_wait();
      }
    });
  }
  for (std::thread& thread : running) {
    thread.join();
  }
}

} // namespace z3ext::emulation

inline void __syncthreads() {
  z3ext::emulation::block_barrier->arrive_and_wait();
}

// The kernels call it with the whole block together.
inline double __shfl_down_sync(unsigned, double value, int offset) {
  using z3ext::emulation::shuffled;
  shuffled[threadIdx.x] = value;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  const double other =
      lane + offset < 32 ? shuffled[threadIdx.x + offset] : value;
  __syncthreads();
  return other;
}

inline float __fadd_rn(float a, float b) {
  return a + b;
}

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
