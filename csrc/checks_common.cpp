#include "checks_common.h"

#include <cmath>
#include <limits>

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace z3ext {
namespace {

// Kernels take factors as float32: 1e300 is inf there, and 1e-60 is zero.
bool is_usable_factor(double factor, bool is_divisor) {
  using Limits = std::numeric_limits<float>;
  const double smallest = is_divisor ? Limits::denorm_min() : 0.0;
  const double magnitude = std::abs(factor);
  return smallest <= magnitude && magnitude <= Limits::max(); // false for nan
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

} // namespace

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

void check_writable(
    const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      !(tensor.requires_grad() && c10::GradMode::is_enabled()),
      "z3ext::",
      op,
      ": ",
      name,
      " requires grad, and the op writes to it; expected a tensor that "
      "autograd does not follow; pass ",
      name,
      ".detach(), or call the op under torch.no_grad()");
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
  check_writable(op, "flag", flag);
  TORCH_CHECK(
      !shares_memory(flag, other),
      "z3ext::",
      op,
      ": flag shares memory with ",
      other_name,
      "; expected separate memory; make it with torch.zeros((), "
      "dtype=torch.bool)");
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

} // namespace z3ext
