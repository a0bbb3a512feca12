#include <vector>

#include <c10/util/Exception.h>

#include "checks.h"
#include "checks_common.h"

namespace z3ext {

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
  check_writable(op, "partitions", partitions);
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

} // namespace z3ext
