#include "checks.h"

#include <string>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "checks_common.h"

namespace z3ext {

std::string dtype_name(const at::Tensor& tensor) {
  // std::string_view or std::string, as the torch release has it.
  return std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return DType::kHalf;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat;
    default:
      TORCH_INTERNAL_ASSERT(tensor.scalar_type() == at::kDouble);
      return DType::kDouble;
  }
}

namespace {

void check_readable_buffer(const char* op, const at::Tensor& buf) {
  check_dense(op, "buf", buf);
  TORCH_CHECK(
      is_reduced_or_float(buf) || buf.scalar_type() == at::kDouble,
      "z3ext::",
      op,
      ": buf is ",
      dtype_name(buf),
      "; expected float16, bfloat16, float32 or float64; cast it first");
  TORCH_CHECK(
      buf.is_contiguous(),
      "z3ext::",
      op,
      ": buf is not contiguous; expected a contiguous tensor; pass "
      "buf.contiguous()");
}

} // namespace

void check_flat_overflow(const at::Tensor& buf) {
  check_readable_buffer("flat_overflow", buf);
}

void check_flat_overflow_(const at::Tensor& flag, const at::Tensor& buf) {
  check_readable_buffer("flat_overflow_", buf);
  check_flag("flat_overflow_", flag, "buf", buf);
}

void check_segment_check(
    const at::Tensor& buf, const at::Tensor& offsets, int64_t lanes) {
  check_readable_buffer("segment_check", buf);
  check_dense("segment_check", "offsets", offsets);
  TORCH_CHECK(
      lanes == 1 || lanes == 2 || lanes == 4 || lanes == 8,
      "z3ext::segment_check: lanes is ",
      lanes,
      "; expected 1, 2, 4 or 8; pass 1 when the summation order is of no "
      "concern");
  TORCH_CHECK(
      offsets.scalar_type() == at::kLong && offsets.device().is_cpu() &&
          offsets.dim() == 1 && offsets.numel() >= 1 && offsets.is_contiguous(),
      "z3ext::segment_check: offsets is ",
      dtype_name(offsets),
      " on ",
      offsets.device(),
      " with ",
      offsets.dim(),
      " dimensions and ",
      offsets.numel(),
      " elements; expected a contiguous 1-D int64 tensor on cpu with at least "
      "1 element; pass the n + 1 boundaries of the n segments");
  const auto* values = offsets.const_data_ptr<int64_t>();
  const int64_t last = offsets.numel() - 1;
  TORCH_CHECK(
      values[0] == 0 && values[last] == buf.numel(),
      "z3ext::segment_check: offsets run from ",
      values[0],
      " to ",
      values[last],
      "; expected 0 to ",
      buf.numel(),
      ", the elements of buf; every element belongs to one segment");
  for (int64_t i = 0; i < last; ++i) {
    TORCH_CHECK(
        values[i] <= values[i + 1],
        "z3ext::segment_check: offsets[",
        i + 1,
        "] is ",
        values[i + 1],
        ", below offsets[",
        i,
        "] = ",
        values[i],
        "; expected non-decreasing offsets; sort the segments");
  }
}

void check_unscale(
    const at::Tensor& partition,
    const at::Tensor& scale,
    const at::Tensor& out) {
  constexpr const char* op = "unscale_";
  check_flat_storage(op, "partition", partition);
  check_flat_storage(op, "out", out);
  TORCH_CHECK(
      out.scalar_type() == at::kFloat,
      "z3ext::unscale_: out is ",
      dtype_name(out),
      "; expected float32; allocate out as float32");
  TORCH_CHECK(
      out.numel() == partition.numel(),
      "z3ext::unscale_: out has ",
      out.numel(),
      " elements but partition has ",
      partition.numel(),
      "; expected the same number; allocate out like partition");
  check_same_device(op, "out", out, "partition", partition);
  check_dense(op, "scale", scale);
  TORCH_CHECK(
      scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kDouble,
      "z3ext::unscale_: scale is ",
      dtype_name(scale),
      "; expected float32 or float64; cast it first");
  TORCH_CHECK(
      scale.numel() == 1,
      "z3ext::unscale_: scale has ",
      scale.numel(),
      " elements; expected 1; pass one factor for the whole partition");
  check_same_device(op, "scale", scale, "partition", partition);
  check_writable(op, "out", out);
  TORCH_CHECK(
      !shares_memory(scale, out),
      "z3ext::unscale_: scale shares memory with out; expected separate "
      "memory; pass a clone of scale");
  const bool same = partition.scalar_type() == at::kFloat &&
                    partition.const_data_ptr() == out.const_data_ptr();
  TORCH_CHECK(
      same || !shares_memory(partition, out),
      "z3ext::unscale_: out overlaps partition in part; expected the same "
      "float32 memory or separate memory; pass partition itself or a new "
      "tensor");
}

namespace {

template <typename Transform>
FactorChain make_chain(
    at::ArrayRef<double> factors, const Transform& transform) {
  FactorChain chain;
  for (const double factor : factors) {
    if (factor != 1.0) {
      chain.factors[chain.count++] = transform(static_cast<float>(factor));
    }
  }
  return chain;
}

} // namespace

FactorChain factor_chain(at::ArrayRef<double> factors) {
  return make_chain(factors, [](float factor) { return factor; });
}

FactorChain reciprocal_chain(at::ArrayRef<double> factors) {
  return make_chain(factors, [](float factor) { return 1.0f / factor; });
}

} // namespace z3ext
