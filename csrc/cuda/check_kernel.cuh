// segment_check: the overflow flag of a buffer and the sum of squares of each
// of its segments, in one read.
//
// The sums are deterministic: every chunk lies inside one segment and leaves
// its partial sum in a place of its own, and a second kernel adds each
// segment's partial sums in a fixed order. Nothing is added atomically.
#pragma once

#include "chunk_loops.cuh"

namespace z3ext::cuda {

template <typename T>
struct SumSquares {
  double sum = 0.0;
  bool nonfinite = false;

  __device__ __forceinline__ void operator()(T value) {
    const double wide = to_double(value);
    sum = fma(wide, wide, sum); // spelled out: the same rounding everywhere
    nonfinite |= is_nonfinite(value);
  }
};

// partials: one place for every chunk of every launch.
template <typename T>
__global__ void __launch_bounds__(kThreads, kMinBlocks) segment_partials_kernel(
    const __grid_constant__ Table<ReadEntry> table,
    double* partials,
    bool* flag) {
  bool nonfinite = false;
  for (int64_t chunk = blockIdx.x; chunk < table.chunk_count;
       chunk += gridDim.x) {
    const ReadEntry& entry = table.entries[find_entry(table, chunk)];
    SumSquares<T> squares;
    read_chunk(
        static_cast<const T*>(entry.source),
        chunk_range(chunk - entry.first_chunk, entry.numel, entry.head),
        squares);
    nonfinite |= squares.nonfinite;
    const double sum = block_sum(squares.sum);
    if (threadIdx.x == 0) {
      partials[table.preceding_chunks + chunk] = sum;
    }
  }
  raise_flag(flag, nonfinite);
}

// One block per segment. A template only so that the header may be included
// more than once in a program.
template <typename EntryT>
__global__ void __launch_bounds__(kThreads, kMinBlocks) segment_sums_kernel(
    const __grid_constant__ Table<EntryT> table,
    const double* partials,
    double* sumsq) {
  for (int index = static_cast<int>(blockIdx.x); index < table.entry_count;
       index += static_cast<int>(gridDim.x)) {
    const EntryT& entry = table.entries[index];
    const double* first = partials + table.preceding_chunks + entry.first_chunk;
    const int64_t chunks = chunk_count(entry.numel, entry.head);
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < chunks; i += blockDim.x) {
      sum += first[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
      sumsq[entry.segment] = sum;
    }
  }
}

} // namespace z3ext::cuda
