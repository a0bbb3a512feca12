// pack_rows_ on CPU: gradients into a bucket of one row per rank.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "../checks.h"
#include "kernels.h"
#include "parts.h"
#include "rows.h"

namespace z3ext::cpu {
namespace {

// Elements of a chunk from which on it is converted in its place. A shorter one
// would leave the vector kernel often for its tail.
constexpr int64_t kLongChunk = 4096;

// One gradient. Positions count elements; those from numel on are padding.
struct Gradient {
  const char* source;
  DType dtype;
  int64_t element_size;
  int64_t numel;
  int64_t chunk;
  RowPlace place;
};

class RowPacker {
 public:
  RowPacker(DType bucket_dtype, int64_t bucket_size, const FactorChain& chain)
      : table_(kernels()),
        bucket_dtype_(bucket_dtype),
        bucket_size_(bucket_size),
        chain_(chain) {}

  // Elements [begin, end) of a gradient; they are in the bucket after finish().
  void add(const Gradient& grad, int64_t begin, int64_t end) {
    if (grad.chunk >= kLongChunk) {
      write_long(grad, begin, end);
    } else {
      collect(grad, begin, end);
    }
  }

  // Returns whether a stored value is inf or nan.
  bool finish() {
    scatter_.flush();
    return bad_;
  }

 private:
  void write_long(const Gradient& grad, int64_t begin, int64_t end) {
    const int64_t value_end = std::min(end, grad.numel);
    for (int64_t at = begin; at < value_end;) {
      const int64_t row = at / grad.chunk;
      const int64_t within = at - row * grad.chunk;
      const int64_t count = std::min(value_end - at, grad.chunk - within);
      char* to = grad.place.base + row * grad.place.row_bytes;
      convert(grad, at, count, to + within * bucket_size_);
      at += count;
    }
    zero_rows(
        std::max(begin, grad.numel) * bucket_size_,
        end * bucket_size_,
        grad.place);
  }

  void collect(const Gradient& grad, int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t room = scatter_.room_bytes() / bucket_size_;
      const int64_t values = std::clamp<int64_t>(
          grad.numel - begin, 0, std::min(end - begin, room));
      const int64_t value_end = begin + values;
      const int64_t part_end = value_end < grad.numel ? value_end : end;
      convert(grad, begin, values, scatter_.room());
      scatter_.add(
          begin * bucket_size_,
          value_end * bucket_size_,
          part_end * bucket_size_,
          grad.place);
      begin = part_end;
    }
  }

  void convert(const Gradient& grad, int64_t begin, int64_t count, char* to) {
    bad_ |= table_.pack(
        grad.source + begin * grad.element_size,
        grad.dtype,
        to,
        bucket_dtype_,
        count,
        chain_);
  }

  const Kernels& table_;
  DType bucket_dtype_;
  int64_t bucket_size_;
  const FactorChain& chain_;
  RowScatter scatter_;
  bool bad_ = false;
};

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
  const FactorChain chain = factor_chain(divisors);
  const DType bucket_dtype = dtype_of(bucket);
  const auto size = static_cast<int64_t>(bucket.element_size());
  const ContiguousSources sources(grads);
  char* base = static_cast<char*>(bucket.mutable_data_ptr());

  // The padding is work too: over many ranks it can be most of it.
  std::vector<int64_t> ends(grads.size());
  int64_t total = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    total += chunk_numel(grads[i].numel(), world_size) * world_size;
    ends[i] = total;
  }

  std::atomic<bool> bad{false};
  at::parallel_for(0, total, kGrain, [&](int64_t begin, int64_t end) {
    RowPacker packer(bucket_dtype, size, chain);
    visit_parts(ends, begin, end, [&](int64_t i, int64_t from, int64_t to) {
      const at::Tensor& source = sources[i];
      const int64_t chunk = chunk_numel(source.numel(), world_size);
      const Gradient grad{
          static_cast<const char*>(source.const_data_ptr()),
          dtype_of(source),
          static_cast<int64_t>(source.element_size()),
          source.numel(),
          chunk,
          {base + chunk_offsets[i] * size, row_numel * size, chunk * size}};
      packer.add(grad, from, to);
    });
    if (packer.finish()) {
      bad.store(true, std::memory_order_relaxed);
    }
  });
  if (bad.load()) {
    *flag.mutable_data_ptr<bool>() = true;
  }
}

} // namespace

TORCH_LIBRARY_IMPL(z3ext, CPU, m) {
  m.impl("pack_rows_", pack_rows_);
}

} // namespace z3ext::cpu
