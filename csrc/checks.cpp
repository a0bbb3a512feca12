#include "checks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace z3ext {
namespace {

bool is_reduced_or_float(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat;
}

void check_dense(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.layout() == at::kStrided,
      "z3ext::",
      op,
      ": ",
      name,
      " is sparse; expected a dense tensor; pass its dense form");
}

// A dense, contiguous, 1-D tensor of a dtype that kernels store.
void check_flat_storage(
    const char* op, const char* name, const at::Tensor& tensor) {
  check_dense(op, name, tensor);
  TORCH_CHECK(
      is_reduced_or_float(tensor),
      "z3ext::",
      op,
      ": ",
      name,
      " is ",
      dtype_name(tensor),
      "; expected float16, bfloat16 or float32; cast it first");
  TORCH_CHECK(
      tensor.dim() == 1,
      "z3ext::",
      op,
      ": ",
      name,
      " has ",
      tensor.dim(),
      " dimensions; expected 1; pass ",
      name,
      ".view(-1)");
  TORCH_CHECK(
      tensor.is_contiguous(),
      "z3ext::",
      op,
      ": ",
      name,
      " is not contiguous (stride ",
      tensor.stride(0),
      "); expected a contiguous tensor; pass a contiguous buffer");
}

void check_same_device(
    const char* op,
    const char* name,
    const at::Tensor& tensor,
    const char* other_name,
    const at::Tensor& other) {
  TORCH_CHECK(
      tensor.device() == other.device(),
      "z3ext::",
      op,
      ": ",
      name,
      " is on ",
      tensor.device(),
      " but ",
      other_name,
      " is on ",
      other.device(),
      "; move both to one device");
}

void check_flag(
    const char* op,
    const at::Tensor& flag,
    const char* other_name,
    const at::Tensor& other) {
  check_dense(op, "flag", flag);
  TORCH_CHECK(
      flag.scalar_type() == at::kBool,
      "z3ext::",
      op,
      ": flag is ",
      dtype_name(flag),
      "; expected bool; make it with torch.zeros((), dtype=torch.bool)");
  TORCH_CHECK(
      flag.numel() == 1,
      "z3ext::",
      op,
      ": flag has ",
      flag.numel(),
      " elements; expected 1; make it with torch.zeros((), dtype=torch.bool)");
  check_same_device(op, "flag", flag, other_name, other);
}

// Kernels take factors as float32: 1e300 is inf there, and 1e-60 is zero.
bool is_usable_factor(double factor, bool is_divisor) {
  using Limits = std::numeric_limits<float>;
  const double smallest = is_divisor ? Limits::denorm_min() : 0.0;
  const double magnitude = std::abs(factor);
  return smallest <= magnitude && magnitude <= Limits::max(); // false for nan
}

void check_factors(
    const char* op,
    const char* name,
    at::ArrayRef<double> factors,
    bool is_divisor) {
  TORCH_CHECK(
      factors.size() <= FactorChain::kMaxFactors,
      "z3ext::",
      op,
      ": got ",
      factors.size(),
      " ",
      name,
      "; expected at most ",
      FactorChain::kMaxFactors,
      "; apply the others before the call");
  for (size_t i = 0; i < factors.size(); ++i) {
    TORCH_CHECK(
        is_usable_factor(factors[i], is_divisor),
        "z3ext::",
        op,
        ": ",
        name,
        "[",
        i,
        "] is ",
        // A nan's sign says nothing, and Python shows none.
        std::isnan(factors[i]) ? std::abs(factors[i]) : factors[i],
        "; expected a finite",
        is_divisor ? " non-zero" : "",
        " float32; check the world size and the predivide factor");
  }
}

// Half-open ranges must not overlap. Increasing order, the usual one, costs no
// sort.
template <typename Describe>
void check_disjoint(
    at::IntArrayRef begins,
    const std::vector<int64_t>& ends,
    const Describe& describe_overlap) {
  const auto count = static_cast<int64_t>(begins.size());
  std::vector<int64_t> order;
  order.reserve(count);
  bool sorted = true;
  for (int64_t i = 0; i < count; ++i) {
    if (ends[i] == begins[i]) {
      continue;
    }
    sorted = sorted && (order.empty() || begins[order.back()] <= begins[i]);
    order.push_back(i);
  }
  if (!sorted) {
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return begins[a] < begins[b];
    });
  }
  for (size_t k = 1; k < order.size(); ++k) {
    if (begins[order[k]] < ends[order[k - 1]]) {
      const auto [first, second] = std::minmax(order[k - 1], order[k]);
      describe_overlap(second, first);
    }
  }
}

// The address after the last element of a tensor that is not empty, whatever
// its strides.
const char* end_of_span(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<const char*>(tensor.const_data_ptr()) +
         (last + 1) * static_cast<int64_t>(tensor.element_size());
}

// Whether the byte ranges that two strided tensors span overlap.
bool shares_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.device() != b.device() || a.numel() == 0 || b.numel() == 0) {
    return false;
  }
  return a.const_data_ptr() < static_cast<const void*>(end_of_span(b)) &&
         b.const_data_ptr() < static_cast<const void*>(end_of_span(a));
}

void check_list_size(
    const char* op,
    const char* name,
    size_t size,
    const char* expected_name,
    size_t expected) {
  TORCH_CHECK(
      size == expected,
      "z3ext::",
      op,
      ": got ",
      expected,
      " ",
      expected_name,
      " but ",
      size,
      " ",
      name,
      "; pass one for each");
}

} // namespace

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

static void check_readable_buffer(const char* op, const at::Tensor& buf) {
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

void check_flat_overflow(const at::Tensor& buf) {
  check_readable_buffer("flat_overflow", buf);
}

void check_flat_overflow_(const at::Tensor& flag, const at::Tensor& buf) {
  check_readable_buffer("flat_overflow_", buf);
  check_flag("flat_overflow_", flag, "buf", buf);
}

void check_pack(
    at::TensorList grads,
    at::IntArrayRef offsets,
    const at::Tensor& bucket,
    const at::Tensor& flag,
    at::ArrayRef<double> divisors) {
  check_list_size("pack_", "offsets", offsets.size(), "grads", grads.size());
  check_flat_storage("pack_", "bucket", bucket);
  check_flag("pack_", flag, "bucket", bucket);
  check_factors("pack_", "divisors", divisors, /*is_divisor=*/true);
  std::vector<int64_t> ends(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& grad = grads[i];
    TORCH_CHECK(
        grad.layout() == at::kStrided,
        "z3ext::pack_: grads[",
        i,
        "] is sparse; expected a dense gradient; use a dense layer (ZeRO "
        "stage 3 reduces no sparse gradients)");
    TORCH_CHECK(
        grad.device() == bucket.device(),
        "z3ext::pack_: grads[",
        i,
        "] is on ",
        grad.device(),
        " but bucket is on ",
        bucket.device(),
        "; move the gradient to the bucket's device");
    TORCH_CHECK(
        is_reduced_or_float(grad),
        "z3ext::pack_: grads[",
        i,
        "] is ",
        dtype_name(grad),
        "; expected float16, bfloat16 or float32; cast it first");
    TORCH_CHECK(
        offsets[i] >= 0,
        "z3ext::pack_: offsets[",
        i,
        "] is ",
        offsets[i],
        "; expected 0 or more; pass the element where the gradient begins");
    // Written as a difference: offsets[i] + numel could overflow int64.
    TORCH_CHECK(
        grad.numel() <= bucket.numel() - offsets[i],
        "z3ext::pack_: grads[",
        i,
        "] has ",
        grad.numel(),
        " elements at offset ",
        offsets[i],
        " but bucket has ",
        bucket.numel(),
        " elements; pass a larger bucket");
    ends[i] = offsets[i] + grad.numel();
  }
  check_disjoint(offsets, ends, [&](int64_t i, int64_t j) {
    TORCH_CHECK(
        false,
        "z3ext::pack_: grads[",
        i,
        "] at [",
        offsets[i],
        ", ",
        ends[i],
        ") overlaps grads[",
        j,
        "] at [",
        offsets[j],
        ", ",
        ends[j],
        "); give every gradient a place of its own");
  });
  for (size_t i = 0; i < grads.size(); ++i) {
    TORCH_CHECK(
        !shares_memory(grads[i], bucket),
        "z3ext::pack_: grads[",
        i,
        "] shares memory with bucket; expected separate memory; pass a clone "
        "of the gradient");
  }
}

void check_unpack(
    const at::Tensor& bucket,
    const at::Tensor& partitions,
    at::IntArrayRef src_offsets,
    at::IntArrayRef dst_offsets,
    at::IntArrayRef numels,
    at::IntArrayRef padded_numels,
    at::ArrayRef<double> multipliers) {
  constexpr const char* op = "unpack_";
  const size_t count = src_offsets.size();
  check_list_size(op, "dst_offsets", dst_offsets.size(), "src_offsets", count);
  check_list_size(op, "numels", numels.size(), "src_offsets", count);
  check_list_size(
      op, "padded_numels", padded_numels.size(), "src_offsets", count);
  check_flat_storage(op, "bucket", bucket);
  check_flat_storage(op, "partitions", partitions);
  check_same_device(op, "partitions", partitions, "bucket", bucket);
  check_factors(op, "multipliers", multipliers, /*is_divisor=*/false);
  TORCH_CHECK(
      !shares_memory(bucket, partitions),
      "z3ext::unpack_: partitions shares memory with bucket; expected separate "
      "memory; allocate partitions apart from the bucket");
  std::vector<int64_t> ends(count);
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK(
        numels[i] >= 0 && padded_numels[i] >= numels[i],
        "z3ext::unpack_: numels[",
        i,
        "] is ",
        numels[i],
        " and padded_numels[",
        i,
        "] is ",
        padded_numels[i],
        "; expected 0 <= numels[i] <= padded_numels[i]; pass the partition's "
        "numel as padded_numels");
    TORCH_CHECK(
        src_offsets[i] >= 0 && numels[i] <= bucket.numel() - src_offsets[i],
        "z3ext::unpack_: slice ",
        i,
        " begins at src_offsets[",
        i,
        "] = ",
        src_offsets[i],
        " with ",
        numels[i],
        " elements but bucket has ",
        bucket.numel(),
        " elements; pass offsets inside the bucket");
    TORCH_CHECK(
        dst_offsets[i] >= 0 &&
            padded_numels[i] <= partitions.numel() - dst_offsets[i],
        "z3ext::unpack_: slice ",
        i,
        " begins at dst_offsets[",
        i,
        "] = ",
        dst_offsets[i],
        " with ",
        padded_numels[i],
        " padded elements but partitions has ",
        partitions.numel(),
        " elements; pass offsets inside partitions");
    ends[i] = dst_offsets[i] + padded_numels[i];
  }
  check_disjoint(dst_offsets, ends, [&](int64_t i, int64_t j) {
    TORCH_CHECK(
        false,
        "z3ext::unpack_: slice ",
        i,
        " at [",
        dst_offsets[i],
        ", ",
        ends[i],
        ") of partitions overlaps slice ",
        j,
        " at [",
        dst_offsets[j],
        ", ",
        ends[j],
        "); give every slice a place of its own");
  });
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
