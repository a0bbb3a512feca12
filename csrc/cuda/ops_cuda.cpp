// The CUDA implementations: tensors in, launches on the current stream out.
// No kernel is written here, so that the host compiler alone builds this file.
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "../checks.h"
#include "launch.h"

namespace z3ext {
namespace {

cudaStream_t current_stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

void* element_pointer(const at::Tensor& tensor, int64_t offset) {
  return static_cast<char*>(tensor.mutable_data_ptr()) +
         offset * tensor.element_size();
}

const void* const_element_pointer(const at::Tensor& tensor, int64_t offset) {
  return static_cast<const char*>(tensor.const_data_ptr()) +
         offset * tensor.element_size();
}

bool* flag_pointer(const at::Tensor& flag) {
  return static_cast<bool*>(flag.mutable_data_ptr());
}

at::Tensor new_flag(const at::Tensor& like) {
  return at::zeros({}, like.options().dtype(at::kBool));
}

void find_nonfinite(const at::Tensor& flag, const at::Tensor& buf) {
  cuda::launch_overflow(
      buf.const_data_ptr(),
      dtype_of(buf),
      buf.numel(),
      flag_pointer(flag),
      current_stream());
}

at::Tensor flat_overflow(const at::Tensor& buf) {
  check_flat_overflow(buf);
  const c10::cuda::CUDAGuard guard(buf.device());
  at::Tensor flag = new_flag(buf);
  find_nonfinite(flag, buf);
  return flag;
}

void flat_overflow_(const at::Tensor& flag, const at::Tensor& buf) {
  check_flat_overflow_(flag, buf);
  const c10::cuda::CUDAGuard guard(buf.device());
  find_nonfinite(flag, buf);
}

// The gradient's elements in row-major order. A copy that this takes is kept
// until the launches that read it.
const void* contiguous_source(
    const at::Tensor& grad, std::vector<at::Tensor>& copies) {
  if (grad.is_contiguous()) {
    return grad.const_data_ptr();
  }
  copies.push_back(grad.contiguous());
  return copies.back().const_data_ptr();
}

void pack_(
    at::TensorList grads,
    at::IntArrayRef offsets,
    const at::Tensor& bucket,
    const at::Tensor& flag,
    at::ArrayRef<double> divisors) {
  check_pack(grads, offsets, bucket, flag, divisors);
  const c10::cuda::CUDAGuard guard(bucket.device());
  std::vector<at::Tensor> copies;
  std::vector<cuda::TransformEntry> entries;
  entries.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].numel() > 0) {
      entries.push_back(
          cuda::make_transform_entry(
              contiguous_source(grads[i], copies),
              dtype_of(grads[i]),
              element_pointer(bucket, offsets[i]),
              dtype_of(bucket),
              grads[i].numel()));
    }
  }
  cuda::launch_pack(
      entries,
      dtype_of(bucket),
      reciprocal_chain(divisors),
      flag_pointer(flag),
      current_stream());
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
  const c10::cuda::CUDAGuard guard(bucket.device());
  std::vector<at::Tensor> copies;
  std::vector<cuda::RowsEntry> entries;
  entries.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].numel() > 0) {
      entries.push_back(
          cuda::make_rows_entry(
              contiguous_source(grads[i], copies),
              dtype_of(grads[i]),
              element_pointer(bucket, chunk_offsets[i]),
              dtype_of(bucket),
              grads[i].numel(),
              row_numel,
              world_size));
    }
  }
  cuda::launch_pack_rows(
      entries,
      dtype_of(bucket),
      row_numel,
      reciprocal_chain(divisors),
      flag_pointer(flag),
      current_stream());
}

void unpack_(
    const at::Tensor& bucket,
    const at::Tensor& partitions,
    at::IntArrayRef src_offsets,
    at::IntArrayRef dst_offsets,
    at::IntArrayRef numels,
    at::IntArrayRef padded_numels,
    at::ArrayRef<double> multipliers,
    bool accumulate) {
  check_unpack(
      bucket,
      partitions,
      src_offsets,
      dst_offsets,
      numels,
      padded_numels,
      multipliers);
  const c10::cuda::CUDAGuard guard(bucket.device());
  const DType bucket_dtype = dtype_of(bucket);
  const DType partition_dtype = dtype_of(partitions);
  std::vector<cuda::TransformEntry> entries;
  entries.reserve(2 * numels.size());
  for (size_t i = 0; i < numels.size(); ++i) {
    if (numels[i] > 0) {
      entries.push_back(
          cuda::make_transform_entry(
              const_element_pointer(bucket, src_offsets[i]),
              bucket_dtype,
              element_pointer(partitions, dst_offsets[i]),
              partition_dtype,
              numels[i]));
    }
    if (!accumulate && padded_numels[i] > numels[i]) {
      entries.push_back(
          cuda::make_zero_entry(
              element_pointer(partitions, dst_offsets[i] + numels[i]),
              partition_dtype,
              padded_numels[i] - numels[i]));
    }
  }
  cuda::launch_unpack(
      entries,
      bucket_dtype,
      partition_dtype,
      factor_chain(multipliers),
      accumulate,
      current_stream());
}

std::tuple<at::Tensor, at::Tensor> segment_check(
    const at::Tensor& buf, const at::Tensor& offsets, int64_t lanes) {
  check_segment_check(buf, offsets, lanes);
  const c10::cuda::CUDAGuard guard(buf.device());
  const DType dtype = dtype_of(buf);
  const int64_t segments = offsets.numel() - 1;
  const auto* begins = static_cast<const int64_t*>(offsets.const_data_ptr());
  std::vector<cuda::ReadEntry> entries;
  entries.reserve(segments);
  for (int64_t i = 0; i < segments; ++i) {
    if (begins[i] < begins[i + 1]) {
      entries.push_back(
          cuda::make_read_entry(
              const_element_pointer(buf, begins[i]),
              dtype,
              begins[i + 1] - begins[i],
              i));
    }
  }
  const auto tables = cuda::plan_tables(entries);
  const auto double_options = buf.options().dtype(at::kDouble);
  at::Tensor flag = new_flag(buf);
  at::Tensor sumsq = at::zeros({segments}, double_options);
  const at::Tensor partials =
      at::empty({cuda::partial_count(tables)}, double_options);
  cuda::launch_segment_check(
      tables,
      dtype,
      static_cast<double*>(partials.mutable_data_ptr()),
      static_cast<double*>(sumsq.mutable_data_ptr()),
      flag_pointer(flag),
      current_stream());
  return {flag, sumsq};
}

void unscale_(
    const at::Tensor& partition,
    const at::Tensor& scale,
    const at::Tensor& out) {
  check_unscale(partition, scale, out);
  const c10::cuda::CUDAGuard guard(partition.device());
  cuda::launch_unscale(
      partition.const_data_ptr(),
      dtype_of(partition),
      partition.numel(),
      scale.const_data_ptr(),
      scale.scalar_type() == at::kDouble,
      static_cast<float*>(out.mutable_data_ptr()),
      current_stream());
}

TORCH_LIBRARY_IMPL(z3ext, CUDA, m) {
  m.impl("flat_overflow", &flat_overflow);
  m.impl("flat_overflow_", &flat_overflow_);
  m.impl("pack_", &pack_);
  m.impl("pack_rows_", &pack_rows_);
  m.impl("unpack_", &unpack_);
  m.impl("segment_check", &segment_check);
  m.impl("unscale_", &unscale_);
}

} // namespace
} // namespace z3ext
