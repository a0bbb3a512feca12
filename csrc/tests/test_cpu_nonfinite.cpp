// The non-finite test of every kernel table, and the choice among the tables.
#include "cpu_tables.h"

namespace z3ext::cpu {
namespace {

using namespace testing_support;

class CpuNonfinite : public CpuTable {};
Z3EXT_FOR_EVERY_TABLE(CpuNonfinite);

TEST_P(CpuNonfinite, HasItsName) {
  EXPECT_STREQ(table_->name, GetParam());
}

TEST(CpuDispatch, UnknownName) {
  EXPECT_EQ(kernels_by_name("sse"), nullptr);
  EXPECT_EQ(kernels_by_name(""), nullptr);
}

TEST(CpuDispatch, ChoosesAnAvailableTable) {
  EXPECT_EQ(kernels_by_name(kernels().name), &kernels());
#if !defined(__x86_64__)
  EXPECT_STREQ(kernels().name, "plain");
  EXPECT_EQ(kernels_by_name("avx2"), nullptr);
  EXPECT_EQ(kernels_by_name("avx512"), nullptr);
#endif
}

constexpr double kNonfinite[] = {INFINITY, -INFINITY, NAN};

void fill_largest(Source& source, DType dtype) {
  for (int64_t i = 0; i < source.numel(); ++i) {
    source.set_value(i, oracle::format_of(dtype).largest() * (i % 2 ? 1 : -1));
  }
}

// One bad value in every place, at every alignment that an element can have.
TEST_P(CpuNonfinite, NonfiniteInEveryPlace) {
  for (const DType dtype : kReadable) {
    const int64_t shifts = 64 / oracle::format_of(dtype).bytes;
    for (int64_t shift = 0; shift < shifts; ++shift) {
      for (const int64_t numel : kSizes) {
        Source source(dtype, numel, shift);
        fill_largest(source, dtype);
        ASSERT_FALSE(table_->any_nonfinite(source.data(), dtype, numel));
        const int64_t stride = numel > 300 ? 41 : 1;
        for (int64_t bad = numel - 1; bad >= 0; bad -= stride) {
          const uint64_t before = source.bits(bad);
          source.set_value(bad, kNonfinite[(bad + shift) % 3]);
          ASSERT_TRUE(table_->any_nonfinite(source.data(), dtype, numel))
              << dtype_text(dtype) << " " << bad << " of " << numel;
          source.set_bits(bad, before);
        }
      }
    }
  }
}

// Around the edges of the blocks after which the early exit is looked for.
TEST_P(CpuNonfinite, NonfiniteAroundBlocks) {
  for (const DType dtype : kReadable) {
    const int64_t block = 32 * 1024 / oracle::format_of(dtype).bytes;
    for (const int64_t numel :
         {block - 1,
          block,
          block + 1,
          2 * block,
          2 * block + 3,
          3 * block - 1}) {
      for (const int64_t shift : {0, 1, 3}) {
        Source source(dtype, numel, shift);
        fill_largest(source, dtype);
        ASSERT_FALSE(table_->any_nonfinite(source.data(), dtype, numel));
        for (const int64_t bad :
             {int64_t{0},
              block - 1,
              block,
              2 * block - 1,
              2 * block,
              numel - 2,
              numel - 1}) {
          if (bad >= numel) {
            continue;
          }
          for (const double value : kNonfinite) {
            const uint64_t before = source.bits(bad);
            source.set_value(bad, value);
            ASSERT_TRUE(table_->any_nonfinite(source.data(), dtype, numel))
                << dtype_text(dtype) << " " << bad << " of " << numel;
            source.set_bits(bad, before);
          }
        }
      }
    }
  }
}

TEST_P(CpuNonfinite, NonfiniteEvery16BitPattern) {
  for (const DType dtype : {DType::kHalf, DType::kBFloat16}) {
    for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
      Source source(dtype, 40);
      for (int64_t i = 0; i < 40; ++i) {
        source.set_bits(i, bits);
      }
      ASSERT_EQ(
          table_->any_nonfinite(source.data(), dtype, 40),
          !std::isfinite(source.value(0)))
          << std::hex << bits;
    }
  }
}

} // namespace
} // namespace z3ext::cpu
