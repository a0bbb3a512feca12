// The checks of pack_ and pack_rows_.
#include <limits>
#include <vector>

#include <c10/util/Exception.h>

#include "checks.h"
#include "checks_common.h"

namespace z3ext {
namespace {

// What both ops ask of one gradient, wherever it goes.
void check_gradient(
    const char* op,
    const at::Tensor& grad,
    size_t index,
    const at::Tensor& bucket) {
  TORCH_CHECK(
      grad.layout() == at::kStrided,
      "z3ext::",
      op,
      ": grads[",
      index,
      "] is sparse; expected a dense gradient; use a dense layer (ZeRO stage 3 "
      "reduces no sparse gradients)");
  TORCH_CHECK(
      grad.device() == bucket.device(),
      "z3ext::",
      op,
      ": grads[",
      index,
      "] is on ",
      grad.device(),
      " but bucket is on ",
      bucket.device(),
      "; move the gradient to the bucket's device");
  TORCH_CHECK(
      is_reduced_or_float(grad),
      "z3ext::",
      op,
      ": grads[",
      index,
      "] is ",
      dtype_name(grad),
      "; expected float16, bfloat16 or float32; cast it first");
}

void check_apart(
    const char* op, at::TensorList grads, const at::Tensor& bucket) {
  for (size_t i = 0; i < grads.size(); ++i) {
    TORCH_CHECK(
        !shares_memory(grads[i], bucket),
        "z3ext::",
        op,
        ": grads[",
        i,
        "] shares memory with bucket; expected separate memory; pass a clone "
        "of the gradient");
  }
}

} // namespace

void check_pack(
    at::TensorList grads,
    at::IntArrayRef offsets,
    const at::Tensor& bucket,
    const at::Tensor& flag,
    at::ArrayRef<double> divisors) {
  constexpr const char* op = "pack_";
  check_list_size(op, "offsets", offsets.size(), "grads", grads.size());
  check_flat_storage(op, "bucket", bucket);
  check_writable(op, "bucket", bucket);
  check_flag(op, flag, "bucket", bucket);
  check_factors(op, "divisors", divisors, /*is_divisor=*/true);
  std::vector<int64_t> ends(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& grad = grads[i];
    check_gradient(op, grad, i, bucket);
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
  check_apart(op, grads, bucket);
}

void check_pack_rows(
    at::TensorList grads,
    at::IntArrayRef chunk_offsets,
    int64_t row_numel,
    int64_t world_size,
    const at::Tensor& bucket,
    const at::Tensor& flag,
    at::ArrayRef<double> divisors) {
  constexpr const char* op = "pack_rows_";
  constexpr int64_t most_ranks = std::numeric_limits<int32_t>::max();
  check_list_size(
      op, "chunk_offsets", chunk_offsets.size(), "grads", grads.size());
  check_flat_storage(op, "bucket", bucket);
  check_writable(op, "bucket", bucket);
  check_flag(op, flag, "bucket", bucket);
  check_factors(op, "divisors", divisors, /*is_divisor=*/true);
  TORCH_CHECK(
      1 <= world_size && world_size <= most_ranks,
      "z3ext::pack_rows_: world_size is ",
      world_size,
      "; expected 1 to ",
      most_ranks,
      "; pass the number of ranks that share the bucket");
  TORCH_CHECK(
      row_numel >= 0,
      "z3ext::pack_rows_: row_numel is ",
      row_numel,
      "; expected 0 or more; pass the elements of one rank's row");
  // Written as a quotient: world_size * row_numel could overflow int64.
  TORCH_CHECK(
      row_numel <= bucket.numel() / world_size,
      "z3ext::pack_rows_: row_numel is ",
      row_numel,
      " and world_size is ",
      world_size,
      " but bucket has ",
      bucket.numel(),
      " elements; expected at least row_numel * world_size; pass a larger "
      "bucket");
  std::vector<int64_t> ends(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    check_gradient(op, grads[i], i, bucket);
    TORCH_CHECK(
        chunk_offsets[i] >= 0,
        "z3ext::pack_rows_: chunk_offsets[",
        i,
        "] is ",
        chunk_offsets[i],
        "; expected 0 or more; pass the element of a row where the gradient's "
        "chunk begins");
    const int64_t chunk = chunk_numel(grads[i].numel(), world_size);
    // Written as a difference: chunk_offsets[i] + chunk could overflow int64.
    TORCH_CHECK(
        chunk <= row_numel - chunk_offsets[i],
        "z3ext::pack_rows_: grads[",
        i,
        "] has chunks of ",
        chunk,
        " elements at offset ",
        chunk_offsets[i],
        " but a row has ",
        row_numel,
        " elements; pass a larger row_numel");
    ends[i] = chunk_offsets[i] + chunk;
  }
  check_disjoint(chunk_offsets, ends, [&](int64_t i, int64_t j) {
    TORCH_CHECK(
        false,
        "z3ext::pack_rows_: grads[",
        i,
        "] at [",
        chunk_offsets[i],
        ", ",
        ends[i],
        ") of a row overlaps grads[",
        j,
        "] at [",
        chunk_offsets[j],
        ", ",
        ends[j],
        "); give every gradient a place of its own");
  });
  check_apart(op, grads, bucket);
}

} // namespace z3ext
