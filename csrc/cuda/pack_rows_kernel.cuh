// pack_rows_: pack_ into one row per rank. Where vectors fit on both sides a
// thread moves a group; elsewhere neighbouring threads move neighbouring
// elements, which a warp's accesses join again.
#pragma once

#include "pack_kernel.cuh"
#include "rows.h"

namespace z3ext::cuda {

// Where a launch's chunk begins, and the way from its elements to their rows.
template <typename BucketT>
struct RowCursor {
  BucketT* row; // the gradient's place in the row of the first element
  int64_t row_numel;
  int64_t row_chunk;
  int64_t within; // of the first element, in its row's part
  uint32_t multiplier;

  __device__ __forceinline__
  RowCursor(const RowsEntry& entry, int64_t begin, int64_t row_numel)
      : row_numel(row_numel),
        row_chunk(entry.row_chunk),
        multiplier(entry.multiplier) {
    const int64_t first = begin / row_chunk;
    within = begin - first * row_chunk;
    row = static_cast<BucketT*>(entry.destination) + first * row_numel;
  }

  // The place of the chunk's element i.
  __device__ __forceinline__ BucketT* place(int i) const {
    const int rows = row_after(within, i, row_chunk, multiplier);
    return row + rows * (row_numel - row_chunk) + within + i;
  }
};

template <typename GradT, typename BucketT>
__device__ __forceinline__ void pack_groups(
    const GradT* source,
    const RowCursor<BucketT>& rows,
    int groups,
    Pack<GradT, BucketT>& pack) {
  constexpr int kGroup = group_numel(sizeof(GradT), sizeof(BucketT));
  constexpr int kWider = static_cast<int>(
      sizeof(GradT) < sizeof(BucketT) ? sizeof(BucketT) : sizeof(GradT));
  constexpr int kInFlight = groups_in_flight(kGroup * kWider);
  const int threads = static_cast<int>(blockDim.x);
  for (int first = static_cast<int>(threadIdx.x); first < groups;
       first += kInFlight * threads) {
    GradT values[kInFlight][kGroup];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int group = first + u * threads;
      if (group < groups) {
        load_vectors(source + group * kGroup, values[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int group = first + u * threads;
      if (group < groups) {
        BucketT stored[kGroup];
        pack(values[u], stored);
        store_vectors(rows.place(group * kGroup), stored);
      }
    }
  }
}

// Elements [begin, end) of the launch's chunk; from value_end on they are
// zeros.
template <typename GradT, typename BucketT>
__device__ __forceinline__ void pack_elements(
    const GradT* source,
    const RowCursor<BucketT>& rows,
    int begin,
    int value_end,
    int end,
    Pack<GradT, BucketT>& pack) {
  constexpr int kInFlight = 8;
  const int threads = static_cast<int>(blockDim.x);
  for (int first = begin + static_cast<int>(threadIdx.x); first < value_end;
       first += kInFlight * threads) {
    // A place past the end takes the first element again, so that what it holds
    // says nothing new to the flag.
    GradT values[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int i = first + u * threads;
      values[u] = source[i < value_end ? i : first];
    }
    BucketT stored[kInFlight];
    pack(values, stored);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int i = first + u * threads;
      if (i < value_end) {
        *rows.place(i) = stored[u];
      }
    }
  }
  for (int i = value_end + static_cast<int>(threadIdx.x); i < end;
       i += threads) {
    *rows.place(i) = BucketT{};
  }
}

template <typename GradT, typename BucketT>
__global__ void __launch_bounds__(kThreads, kMinBlocks) pack_rows_kernel(
    const __grid_constant__ Table<RowsEntry> table,
    const __grid_constant__ FactorChain reciprocals,
    int64_t row_numel,
    bool* flag) {
  constexpr int kGroup = group_numel(sizeof(GradT), sizeof(BucketT));
  Pack<GradT, BucketT> pack{reciprocals};
  for (int64_t chunk = blockIdx.x; chunk < table.chunk_count;
       chunk += gridDim.x) {
    const RowsEntry& entry = table.entries[find_entry(table, chunk)];
    const ChunkRange range =
        chunk_range(chunk - entry.first_chunk, entry.numel, entry.head);
    const RowCursor<BucketT> rows(entry, range.begin, row_numel);
    const auto* source = static_cast<const GradT*>(entry.source) + range.begin;
    const int count = static_cast<int>(range.end - range.begin);
    const int64_t values_left = entry.value_numel - range.begin;
    const int values = values_left >= count ? count
                       : values_left > 0    ? static_cast<int>(values_left)
                                            : 0;
    const int groups = entry.whole_groups ? values / kGroup : 0;
    pack_groups(source, rows, groups, pack);
    pack_elements(source, rows, groups * kGroup, values, count, pack);
  }
  raise_flag(flag, pack.nonfinite);
}

} // namespace z3ext::cuda
