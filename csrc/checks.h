// Argument checks shared by every backend. A check runs before anything is
// written, and its message names the op, the argument and its index, the value
// found, the value expected and the remedy.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "numeric.h"

namespace z3ext {

// A dtype as Python names it: "float16", "int64", "float8_e4m3fn".
std::string dtype_name(const at::Tensor& tensor);

// The kernels' dtype of a tensor that passed a check.
DType dtype_of(const at::Tensor& tensor);

void check_flat_overflow(const at::Tensor& buf);
void check_flat_overflow_(const at::Tensor& flag, const at::Tensor& buf);

void check_pack(
    at::TensorList grads,
    at::IntArrayRef offsets,
    const at::Tensor& bucket,
    const at::Tensor& flag,
    at::ArrayRef<double> divisors);

// Elements of one rank's chunk of a gradient: numel / world_size, rounded up.
inline int64_t chunk_numel(int64_t numel, int64_t world_size) {
  return numel == 0 ? 0 : (numel - 1) / world_size + 1;
}

void check_pack_rows(
    at::TensorList grads,
    at::IntArrayRef chunk_offsets,
    int64_t row_numel,
    int64_t world_size,
    const at::Tensor& bucket,
    const at::Tensor& flag,
    at::ArrayRef<double> divisors);

void check_unpack(
    const at::Tensor& bucket,
    const at::Tensor& partitions,
    at::IntArrayRef src_offsets,
    at::IntArrayRef dst_offsets,
    at::IntArrayRef numels,
    at::IntArrayRef padded_numels,
    at::ArrayRef<double> multipliers);

void check_segment_check(
    const at::Tensor& buf, const at::Tensor& offsets, int64_t lanes);

void check_unscale(
    const at::Tensor& partition,
    const at::Tensor& scale,
    const at::Tensor& out);

// Factors of exactly 1.0 change no bit and are dropped; a reciprocal is taken
// in float, as torch's CUDA division does.
FactorChain factor_chain(at::ArrayRef<double> factors);
FactorChain reciprocal_chain(at::ArrayRef<double> factors);

} // namespace z3ext
