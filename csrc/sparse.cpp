// A sparse argument sends a call here. No op takes one, so all that runs is the
// op's check, for its message: torch's own would only say that there is no
// kernel.
#include <tuple>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "checks.h"

namespace z3ext {
namespace {

at::Tensor flat_overflow(const at::Tensor& buf) {
  check_flat_overflow(buf);
  TORCH_INTERNAL_ASSERT(false, "flat_overflow took a sparse argument");
}

void flat_overflow_(const at::Tensor& flag, const at::Tensor& buf) {
  check_flat_overflow_(flag, buf);
  TORCH_INTERNAL_ASSERT(false, "flat_overflow_ took a sparse argument");
}

void pack_(
    at::TensorList grads,
    at::IntArrayRef offsets,
    const at::Tensor& bucket,
    const at::Tensor& flag,
    at::ArrayRef<double> divisors) {
  check_pack(grads, offsets, bucket, flag, divisors);
  TORCH_INTERNAL_ASSERT(false, "pack_ took a sparse argument");
}

void pack_rows_(
    at::TensorList grads,
    at::IntArrayRef chunk_offsets,
    int64_t row_numel,
    int64_t world_size,
    const at::Tensor& bucket,
    const at::Tensor& flag,
    at::ArrayRef<double> divisors) {
  check_pack_rows(
      grads, chunk_offsets, row_numel, world_size, bucket, flag, divisors);
  TORCH_INTERNAL_ASSERT(false, "pack_rows_ took a sparse argument");
}

void unpack_(
    const at::Tensor& bucket,
    const at::Tensor& partitions,
    at::IntArrayRef src_offsets,
    at::IntArrayRef dst_offsets,
    at::IntArrayRef numels,
    at::IntArrayRef padded_numels,
    at::ArrayRef<double> multipliers,
    bool /*accumulate*/) {
  check_unpack(
      bucket,
      partitions,
      src_offsets,
      dst_offsets,
      numels,
      padded_numels,
      multipliers);
  TORCH_INTERNAL_ASSERT(false, "unpack_ took a sparse argument");
}

std::tuple<at::Tensor, at::Tensor> segment_check(
    const at::Tensor& buf, const at::Tensor& offsets, int64_t lanes) {
  check_segment_check(buf, offsets, lanes);
  TORCH_INTERNAL_ASSERT(false, "segment_check took a sparse argument");
}

void unscale_(
    const at::Tensor& partition,
    const at::Tensor& scale,
    const at::Tensor& out) {
  check_unscale(partition, scale, out);
  TORCH_INTERNAL_ASSERT(false, "unscale_ took a sparse argument");
}

void register_checks(torch::Library& m) {
  m.impl("flat_overflow", &flat_overflow);
  m.impl("flat_overflow_", &flat_overflow_);
  m.impl("pack_", &pack_);
  m.impl("pack_rows_", &pack_rows_);
  m.impl("unpack_", &unpack_);
  m.impl("segment_check", &segment_check);
  m.impl("unscale_", &unscale_);
}

// A key that this torch has no backend for never sees a call.
TORCH_LIBRARY_IMPL(z3ext, SparseCPU, m) {
  register_checks(m);
}
TORCH_LIBRARY_IMPL(z3ext, SparseCUDA, m) {
  register_checks(m);
}
TORCH_LIBRARY_IMPL(z3ext, SparseCsrCPU, m) {
  register_checks(m);
}
TORCH_LIBRARY_IMPL(z3ext, SparseCsrCUDA, m) {
  register_checks(m);
}

} // namespace
} // namespace z3ext
