// How the CPU ops share lists of tensors over threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

namespace z3ext::cpu {

// Elements below which a second thread costs more than it saves: the value
// torch uses for its own elementwise kernels.
constexpr int64_t kGrain = 32768;

template <typename Pointer>
Pointer advance(Pointer base, int64_t elements, size_t element_size) {
  using Byte = std::
      conditional_t<std::is_same_v<Pointer, const void*>, const char, char>;
  return static_cast<Byte*>(base) +
         elements * static_cast<int64_t>(element_size);
}

// The gradients of a list, each contiguous: one with other strides is laid out
// first. That is rare, since autograd lays a gradient out like its parameter.
// The list must outlive this.
class ContiguousSources {
 public:
  explicit ContiguousSources(at::TensorList grads)
      : tensors_(grads.size()), ends_(grads.size()) {
    laid_out_.reserve(grads.size());
    int64_t total = 0;
    for (size_t i = 0; i < grads.size(); ++i) {
      tensors_[i] = &grads[i];
      if (!grads[i].is_contiguous()) {
        laid_out_.push_back(grads[i].contiguous());
        tensors_[i] = &laid_out_.back();
      }
      total += grads[i].numel();
      ends_[i] = total;
    }
  }
  // A copy's pointers would point into the original.
  ContiguousSources(const ContiguousSources&) = delete;
  ContiguousSources& operator=(const ContiguousSources&) = delete;

  const at::Tensor& operator[](int64_t i) const {
    return *tensors_[i];
  }
  // The running sums of the gradients' sizes.
  const std::vector<int64_t>& ends() const {
    return ends_;
  }

 private:
  std::vector<at::Tensor> laid_out_;
  std::vector<const at::Tensor*> tensors_;
  std::vector<int64_t> ends_;
};

// Calls body(i, part begin, part end), in order, for the parts of the items
// that elements [begin, end) of the whole list touch. `ends` are the running
// sums of the items' sizes.
template <typename Body>
void visit_parts(
    const std::vector<int64_t>& ends,
    int64_t begin,
    int64_t end,
    const Body& body) {
  auto item = std::upper_bound(ends.begin(), ends.end(), begin);
  for (int64_t at = begin; at < end; ++item) {
    const int64_t i = item - ends.begin();
    const int64_t item_begin = i == 0 ? 0 : ends[i - 1];
    const int64_t part_end = std::min(end, *item);
    if (part_end > at) {
      body(i, at - item_begin, part_end - item_begin);
    }
    at = part_end;
  }
}

// visit_parts over the whole list, the work split evenly over the threads by
// elements.
template <typename Body>
void for_each_part(const std::vector<int64_t>& ends, const Body& body) {
  if (ends.empty()) {
    return;
  }
  at::parallel_for(0, ends.back(), kGrain, [&](int64_t begin, int64_t end) {
    visit_parts(ends, begin, end, body);
  });
}

} // namespace z3ext::cpu
