// pack_rows_'s CUDA kernel, run on the CPU, and the way from an element to its
// row.
#include "cuda_emulation.h"

#include "../cuda/pack_rows_kernel.cuh"

namespace z3ext::cuda {
namespace {

using namespace testing_support;
using emulation::run_independent;

template <typename Body>
void with_stored(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kHalf:
      return body(Half{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      return body(float{});
  }
}

// --- rows --------------------------------------------------------------------

void check_rows_after(int64_t row_chunk) {
  const uint32_t multiplier = row_multiplier(row_chunk);
  const int64_t last = kChunkNumel - 1;
  for (const int64_t within :
       {int64_t{0}, int64_t{1}, row_chunk / 2, row_chunk - 1}) {
    if (within >= row_chunk) {
      continue;
    }
    // A row's first and last element, which a wrong rounding would move.
    for (int64_t row = 0; row * row_chunk - within <= last; ++row) {
      const int64_t first = std::max<int64_t>(row * row_chunk - within, 0);
      const int64_t end = std::min((row + 1) * row_chunk - within - 1, last);
      ASSERT_EQ(
          row_after(within, static_cast<int>(first), row_chunk, multiplier),
          row);
      ASSERT_EQ(
          row_after(within, static_cast<int>(end), row_chunk, multiplier), row);
    }
  }
}

TEST(CudaRows, RowOfEveryElement) {
  for (int64_t row_chunk = 1; row_chunk <= kMostMultiplied + 3; ++row_chunk) {
    check_rows_after(row_chunk);
    ASSERT_FALSE(HasFatalFailure()) << row_chunk;
  }
  for (const int64_t row_chunk :
       {(int64_t{1} << 31) + 1, (int64_t{1} << 33) + 5}) {
    check_rows_after(row_chunk);
    ASSERT_FALSE(HasFatalFailure()) << row_chunk;
  }
}

TEST(CudaRows, GroupsStayWholeOnlyWhereEverythingIsAligned) {
  const auto entry = [](uintptr_t source,
                        uintptr_t destination,
                        int64_t numel,
                        int64_t row_numel) {
    return make_rows_entry(
        reinterpret_cast<const void*>(source),
        DType::kFloat,
        reinterpret_cast<void*>(destination),
        DType::kHalf,
        numel,
        row_numel,
        4);
  };
  EXPECT_TRUE(entry(4096, 8192, 64, 24).whole_groups);
  EXPECT_TRUE(entry(4096, 8192, 61, 24).whole_groups);
  EXPECT_FALSE(entry(4100, 8192, 64, 24).whole_groups);
  EXPECT_FALSE(entry(4096, 8194, 64, 24).whole_groups);
  EXPECT_FALSE(entry(4096, 8192, 60, 24).whole_groups);
  EXPECT_FALSE(entry(4096, 8192, 64, 20).whole_groups);
  EXPECT_EQ(entry(4096, 8192, 61, 24).numel, 64);
  EXPECT_EQ(entry(4096, 8192, 61, 24).value_numel, 61);
  EXPECT_EQ(entry(4096, 8192, 1, 24).numel, 4);
}

TEST(CudaRows, TablesHoldAsManyEntriesAsFit) {
  constexpr int capacity = Table<RowsEntry>::kCapacity;
  static_assert(capacity > 1 && capacity <= kTableCapacity);
  const auto entry = make_rows_entry(
      reinterpret_cast<const void*>(4096),
      DType::kHalf,
      reinterpret_cast<void*>(8192),
      DType::kHalf,
      1,
      8,
      2);
  const auto tables =
      plan_tables(std::vector<RowsEntry>(2 * capacity + 1, entry));
  ASSERT_EQ(tables.size(), 3u);
  EXPECT_EQ(tables[1].entry_count, capacity);
  EXPECT_EQ(tables[2].entry_count, 1);
}

// --- the kernel --------------------------------------------------------------

struct RowsCase {
  int64_t world_size;
  std::vector<int64_t> numels;
  int64_t gap; // unused elements before each chunk, and after the last
  int64_t source_shift;
  int64_t bucket_shift;
};

void check_pack_rows(
    DType src,
    DType dst,
    const RowsCase& rows,
    const FactorChain& reciprocals,
    bool finite) {
  auto random = generator();
  std::vector<int64_t> chunks;
  std::vector<int64_t> offsets;
  int64_t row_numel = rows.gap;
  for (const int64_t numel : rows.numels) {
    chunks.push_back((numel + rows.world_size - 1) / rows.world_size);
    offsets.push_back(row_numel);
    row_numel += chunks.back() + rows.gap;
  }
  const int64_t total = rows.world_size * row_numel;
  Output output(dst, total, rows.bucket_shift);
  const Output poison(dst, total);
  std::vector<Source> sources;
  std::vector<RowsEntry> entries;
  for (size_t i = 0; i < rows.numels.size(); ++i) {
    sources.emplace_back(src, rows.numels[i], rows.source_shift);
    finite ? sources[i].fill_finite(random) : sources[i].fill_any(random);
    entries.push_back(make_rows_entry(
        sources[i].data(),
        src,
        static_cast<char*>(output.data()) + offsets[i] * dtype_bytes(dst),
        dst,
        rows.numels[i],
        row_numel,
        rows.world_size));
  }
  bool flag = false;
  with_stored(src, [&](auto src_tag) {
    with_stored(dst, [&](auto dst_tag) {
      for (const auto& table : plan_tables(entries)) {
        run_independent(3, 64, [&] {
          pack_rows_kernel<decltype(src_tag), decltype(dst_tag)>(
              table, reciprocals, row_numel, &flag);
        });
      }
    });
  });
  std::vector<bool> written(total, false);
  bool expected_flag = false;
  for (size_t i = 0; i < rows.numels.size(); ++i) {
    for (int64_t k = 0; k < chunks[i] * rows.world_size; ++k) {
      const int64_t at = k / chunks[i] * row_numel + offsets[i] + k % chunks[i];
      const double expected =
          k < rows.numels[i]
              ? oracle::pack_by_reciprocals(
                    sources[i].value(k), oracle::format_of(dst), reciprocals)
              : 0.0;
      expected_flag |= !std::isfinite(expected);
      written[at] = true;
      expect_value(output.bits(at), expected, dst, k);
      if (::testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }
  EXPECT_EQ(flag, expected_flag);
  for (int64_t i = 0; i < total; ++i) {
    ASSERT_TRUE(written[i] || output.bits(i) == poison.bits(i)) << i;
  }
  output.expect_guards();
}

void check_every_dtype(const RowsCase& rows) {
  for (const DType src : kStored) {
    for (const DType dst : kStored) {
      check_pack_rows(src, dst, rows, chain_of({}), false);
      check_pack_rows(src, dst, rows, chain_of({1.0f / 3.0f, 7.0f}), true);
      ASSERT_FALSE(::testing::Test::HasFatalFailure())
          << dtype_text(src) << " to " << dtype_text(dst) << ", "
          << rows.world_size << " ranks";
    }
  }
}

TEST(CudaPackRows, RaggedSizes) {
  for (const int64_t world : {1, 2, 3, 7, 8, 64, 512}) {
    check_every_dtype(
        {world,
         {1, world - 1, world, 0, world + 1, 8 * world, 8 * world - 3, 77},
         3,
         0,
         0});
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(CudaPackRows, SeveralChunks) {
  for (const int64_t world : {1, 3, 8, 512}) {
    check_every_dtype({world, {8192, 8193, 20'001, 16'384, 5}, 1, 0, 0});
    ASSERT_FALSE(HasFatalFailure());
  }
}

// Everything a multiple of 16 elements: groups stay whole, up to the padding.
TEST(CudaPackRows, WholeGroups) {
  for (const int64_t world : {1, 2, 8}) {
    check_every_dtype(
        {world, {16 * world, 8192 * world, 1600 * world - 5, 32}, 16, 0, 0});
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(CudaPackRows, Alignments) {
  for (int64_t shift = 0; shift < 8; ++shift) {
    check_every_dtype({4, {64, 512, 9}, 16, shift, 0});
    check_every_dtype({4, {64, 512, 9}, 16, 0, shift});
    check_every_dtype({4, {64, 512, 9}, shift, shift, shift});
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(CudaPackRows, ManyGradients) {
  std::vector<int64_t> numels;
  auto random = generator();
  for (int i = 0; i < 150; ++i) {
    numels.push_back(static_cast<int64_t>(random() % 60));
  }
  check_every_dtype({5, numels, 0, 0, 0});
}

} // namespace
} // namespace z3ext::cuda
