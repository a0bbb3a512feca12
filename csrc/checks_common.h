// What the checks of several ops share. Included by checks*.cpp and comm.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "checks.h"

namespace z3ext {

// float16, bfloat16 or float32: the dtypes that kernels store.
bool is_reduced_or_float(const at::Tensor& tensor);

void check_dense(const char* op, const char* name, const at::Tensor& tensor);

// A dense, contiguous, 1-D tensor of a dtype that kernels store.
void check_flat_storage(
    const char* op, const char* name, const at::Tensor& tensor);

void check_same_device(
    const char* op,
    const char* name,
    const at::Tensor& tensor,
    const char* other_name,
    const at::Tensor& other);

// A tensor that the op writes to: autograd must not need its values.
void check_writable(const char* op, const char* name, const at::Tensor& tensor);

// `flag` is written: it stands apart from `other`, on the same device.
void check_flag(
    const char* op,
    const at::Tensor& flag,
    const char* other_name,
    const at::Tensor& other);

void check_factors(
    const char* op,
    const char* name,
    at::ArrayRef<double> factors,
    bool is_divisor);

void check_list_size(
    const char* op,
    const char* name,
    size_t size,
    const char* expected_name,
    size_t expected);

// Whether the byte ranges that two strided tensors span overlap.
bool shares_memory(const at::Tensor& a, const at::Tensor& b);

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

} // namespace z3ext
