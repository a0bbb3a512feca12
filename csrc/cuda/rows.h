// Gradients cut over the rows of a rank-major bucket, as entries of a launch.
// Host code without torch and without CUDA.
#pragma once

#include <cstdint>

#include "tables.h"

namespace z3ext::cuda {

// A chunk of the launch is kChunkNumel of these elements: the gradient's, then
// the padding of the last rows.
struct RowsEntry {
  const void* source;
  void* destination;   // the gradient's place in row 0
  int64_t numel;       // padding included: a multiple of row_chunk
  int64_t first_chunk; // within its launch; set by plan_tables
  int64_t value_numel; // without padding
  int64_t row_chunk;   // elements in each row
  uint32_t multiplier; // see row_after
  DType source_dtype;
  uint8_t head;      // 0: no element stands before the first chunk
  bool whole_groups; // a group is one vector access on either side, in one row
};

// Above this the elements of a launch's chunk touch two rows at most.
constexpr int64_t kMostMultiplied = 2 * kChunkNumel;
constexpr int kMultiplierShift = 31;

Z3EXT_HOST_DEVICE constexpr uint32_t row_multiplier(int64_t row_chunk) {
  return row_chunk > kMostMultiplied
             ? 0
             : static_cast<uint32_t>(
                   ((int64_t{1} << kMultiplierShift) + row_chunk - 1) /
                   row_chunk);
}

// (within + i) / row_chunk for within < row_chunk and i < kChunkNumel, without
// a division. Exact: with e = multiplier * row_chunk - 2^31 < row_chunk, the
// product is too large by (within + i) * e < 2^31.
Z3EXT_HOST_DEVICE int row_after(
    int64_t within, int i, int64_t row_chunk, uint32_t multiplier) {
  if (multiplier == 0) {
    return within + i >= row_chunk ? 1 : 0;
  }
  const auto position =
      static_cast<uint32_t>(within) + static_cast<uint32_t>(i);
  return static_cast<int>(
      (static_cast<uint64_t>(position) * multiplier) >> kMultiplierShift);
}

inline RowsEntry make_rows_entry(
    const void* source,
    DType source_dtype,
    void* destination,
    DType destination_dtype,
    int64_t value_numel,
    int64_t row_numel,
    int64_t world_size) {
  const int destination_bytes = dtype_bytes(destination_dtype);
  const int64_t row_chunk =
      value_numel == 0 ? 0 : (value_numel - 1) / world_size + 1;
  const int group = group_numel(dtype_bytes(source_dtype), destination_bytes);
  const bool whole_groups =
      row_chunk % group == 0 &&
      row_numel * destination_bytes % kVectorBytes == 0 &&
      detail::is_aligned(reinterpret_cast<uintptr_t>(source)) &&
      detail::is_aligned(reinterpret_cast<uintptr_t>(destination));
  return {
      source,
      destination,
      row_chunk * world_size,
      0,
      value_numel,
      row_chunk,
      row_chunk == 0 ? 0 : row_multiplier(row_chunk),
      source_dtype,
      0,
      whole_groups};
}

static_assert(sizeof(Table<RowsEntry>) <= 4000);

} // namespace z3ext::cuda
