// The CPU implementations: checks, then the kernels over at::parallel_for.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <tuple>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../checks.h"
#include "kernels.h"
#include "parts.h"

namespace z3ext::cpu {
namespace {

bool any_nonfinite(const at::Tensor& buf) {
  const void* data = buf.const_data_ptr();
  const DType dtype = dtype_of(buf);
  std::atomic<bool> bad{false};
  at::parallel_for(0, buf.numel(), kGrain, [&](int64_t begin, int64_t end) {
    if (!bad.load(std::memory_order_relaxed) &&
        kernels().any_nonfinite(
            advance(data, begin, buf.element_size()), dtype, end - begin)) {
      bad.store(true, std::memory_order_relaxed);
    }
  });
  return bad.load();
}

at::Tensor bool_scalar(bool value) {
  at::Tensor flag = at::empty({}, at::TensorOptions().dtype(at::kBool));
  *flag.mutable_data_ptr<bool>() = value;
  return flag;
}

at::Tensor flat_overflow(const at::Tensor& buf) {
  check_flat_overflow(buf);
  return bool_scalar(any_nonfinite(buf));
}

void flat_overflow_(const at::Tensor& flag, const at::Tensor& buf) {
  check_flat_overflow_(flag, buf);
  if (any_nonfinite(buf)) {
    *flag.mutable_data_ptr<bool>() = true;
  }
}

void pack_(
    at::TensorList grads,
    at::IntArrayRef offsets,
    const at::Tensor& bucket,
    const at::Tensor& flag,
    at::ArrayRef<double> divisors) {
  check_pack(grads, offsets, bucket, flag, divisors);
  const FactorChain chain = factor_chain(divisors);
  const Kernels& table = kernels();
  const DType bucket_dtype = dtype_of(bucket);

  const ContiguousSources sources(grads);
  void* base = bucket.mutable_data_ptr();
  std::atomic<bool> bad{false};
  for_each_part(sources.ends(), [&](int64_t i, int64_t begin, int64_t end) {
    const at::Tensor& source = sources[i];
    const bool part_bad = table.pack(
        advance(source.const_data_ptr(), begin, source.element_size()),
        dtype_of(source),
        advance(base, offsets[i] + begin, bucket.element_size()),
        bucket_dtype,
        end - begin,
        chain);
    if (part_bad) {
      bad.store(true, std::memory_order_relaxed);
    }
  });
  if (bad.load()) {
    *flag.mutable_data_ptr<bool>() = true;
  }
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
  const FactorChain chain = factor_chain(multipliers);
  const Kernels& table = kernels();
  const DType src_dtype = dtype_of(bucket);
  const DType dst_dtype = dtype_of(partitions);
  const void* src = bucket.const_data_ptr();
  void* dst = partitions.mutable_data_ptr();
  const size_t dst_size = partitions.element_size();

  std::vector<int64_t> ends(src_offsets.size());
  int64_t total = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    total += padded_numels[i];
    ends[i] = total;
  }
  for_each_part(ends, [&](int64_t i, int64_t begin, int64_t end) {
    const int64_t value_end = std::min(end, numels[i]);
    if (value_end > begin) {
      table.unpack(
          advance(src, src_offsets[i] + begin, bucket.element_size()),
          src_dtype,
          advance(dst, dst_offsets[i] + begin, dst_size),
          dst_dtype,
          value_end - begin,
          chain,
          accumulate);
    }
    const int64_t padding_begin = std::max(begin, numels[i]);
    if (!accumulate && end > padding_begin) {
      std::memset(
          advance(dst, dst_offsets[i] + padding_begin, dst_size),
          0,
          (end - padding_begin) * dst_size);
    }
  });
}

std::tuple<at::Tensor, at::Tensor> segment_check(
    const at::Tensor& buf, const at::Tensor& offsets, int64_t lanes) {
  check_segment_check(buf, offsets, lanes);
  const int64_t segments = offsets.numel() - 1;
  const auto* boundaries = offsets.const_data_ptr<int64_t>();
  at::Tensor sums =
      at::empty({segments}, at::TensorOptions().dtype(at::kDouble));
  auto* sum = sums.mutable_data_ptr<double>();
  const void* data = buf.const_data_ptr();
  const DType dtype = dtype_of(buf);
  const Kernels& table = kernels();
  std::atomic<bool> bad{false};

  const auto check_segment = [&](int64_t i) {
    const int64_t numel = boundaries[i + 1] - boundaries[i];
    const void* segment = advance(data, boundaries[i], buf.element_size());
    sum[i] = table.sum_squares(segment, dtype, numel, static_cast<int>(lanes));
    // The square of a finite fp16, bf16 or fp32 element is finite in float64,
    // and so is the sum of fewer than 2^970 of them: the sum is inf or nan
    // exactly when an element is. Only float64 elements need a look of their
    // own.
    const bool segment_bad =
        dtype == DType::kDouble
            ? is_nonfinite(sum[i]) && table.any_nonfinite(segment, dtype, numel)
            : is_nonfinite(sum[i]);
    if (segment_bad) {
      bad.store(true, std::memory_order_relaxed);
    }
  };

  // Whole segments go to one thread, since a segment's additions have one
  // order; the threads share them by elements.
  at::parallel_for(0, buf.numel(), kGrain, [&](int64_t begin, int64_t end) {
    const auto* first =
        std::lower_bound(boundaries, boundaries + segments, begin);
    for (int64_t i = first - boundaries; i < segments && boundaries[i] < end;
         ++i) {
      check_segment(i);
    }
  });
  // Empty segments at the end begin where no thread's range reaches.
  for (int64_t i = segments - 1; i >= 0 && boundaries[i] == buf.numel(); --i) {
    sum[i] = 0.0;
  }
  return {bool_scalar(bad.load()), sums};
}

void unscale_(
    const at::Tensor& partition,
    const at::Tensor& scale,
    const at::Tensor& out) {
  check_unscale(partition, scale, out);
  const float factor =
      scale.scalar_type() == at::kFloat
          ? *scale.const_data_ptr<float>()
          : static_cast<float>(*scale.const_data_ptr<double>());
  const void* src = partition.const_data_ptr();
  const DType dtype = dtype_of(partition);
  float* dst = out.mutable_data_ptr<float>();
  at::parallel_for(
      0, partition.numel(), kGrain, [&](int64_t begin, int64_t end) {
        kernels().unscale(
            advance(src, begin, partition.element_size()),
            dtype,
            dst + begin,
            end - begin,
            factor);
      });
}

} // namespace

TORCH_LIBRARY_IMPL(z3ext, CPU, m) {
  m.impl("flat_overflow", flat_overflow);
  m.impl("flat_overflow_", flat_overflow_);
  m.impl("pack_", pack_);
  m.impl("unpack_", unpack_);
  m.impl("segment_check", segment_check);
  m.impl("unscale_", unscale_);
}

} // namespace z3ext::cpu
