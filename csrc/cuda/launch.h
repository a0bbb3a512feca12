// The launches of each op: raw pointers in, work on the stream out. No torch
// tensor is known here, so that nvcc parses few headers.
//
// Every function may be called while a CUDA graph is captured: none waits for
// the device and none allocates memory.
#pragma once

#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include "../numeric.h"
#include "rows.h"
#include "tables.h"

namespace z3ext::cuda {

void launch_overflow(
    const void* buf,
    DType dtype,
    int64_t numel,
    bool* flag,
    cudaStream_t stream);

void launch_pack(
    const std::vector<TransformEntry>& entries,
    DType bucket_dtype,
    const FactorChain& reciprocals,
    bool* flag,
    cudaStream_t stream);

void launch_pack_rows(
    const std::vector<RowsEntry>& entries,
    DType bucket_dtype,
    int64_t row_numel,
    const FactorChain& reciprocals,
    bool* flag,
    cudaStream_t stream);

void launch_unpack(
    const std::vector<TransformEntry>& entries,
    DType bucket_dtype,
    DType partition_dtype,
    const FactorChain& multipliers,
    bool accumulate,
    cudaStream_t stream);

// Doubles of scratch that launch_segment_check needs.
int64_t partial_count(const std::vector<Table<ReadEntry>>& tables);

// sumsq is written for the segments that have an entry, and for no other.
void launch_segment_check(
    const std::vector<Table<ReadEntry>>& tables,
    DType dtype,
    double* partials,
    double* sumsq,
    bool* flag,
    cudaStream_t stream);

void launch_unscale(
    const void* partition,
    DType partition_dtype,
    int64_t numel,
    const void* scale,
    bool scale_is_double,
    float* out,
    cudaStream_t stream);

} // namespace z3ext::cuda
