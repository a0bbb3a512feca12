// What every kernel table computes against the oracle.
#include "cpu_tables.h"

namespace z3ext::cpu {
namespace {

using namespace testing_support;

class CpuKernels : public CpuTable {};
Z3EXT_FOR_EVERY_TABLE(CpuKernels);

// --- pack --------------------------------------------------------------------

void check_pack(
    const Kernels& table,
    const Source& source,
    DType src,
    DType dst,
    int64_t shift,
    const FactorChain& divisors) {
  const int64_t numel = source.numel();
  const auto format = oracle::format_of(dst);
  Output output(dst, numel, shift);
  const bool flag =
      table.pack(source.data(), src, output.data(), dst, numel, divisors);
  bool expected_flag = false;
  for (int64_t i = 0; i < numel; ++i) {
    const double expected = oracle::pack(source.value(i), format, divisors);
    expected_flag |= !std::isfinite(expected);
    expect_value(output.bits(i), expected, dst, i);
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
  ASSERT_EQ(flag, expected_flag);
  output.expect_guards();
}

TEST_P(CpuKernels, Pack) {
  auto random = generator();
  for (const DType src : kStored) {
    for (const DType dst : kStored) {
      for (const FactorChain& divisors : kChains) {
        for (const int64_t numel : kSizes) {
          Source source(src, numel, static_cast<int64_t>(random() % 8));
          numel % 2 == 0 ? source.fill_finite(random) : source.fill_any(random);
          check_pack(
              *table_,
              source,
              src,
              dst,
              static_cast<int64_t>(random() % 8),
              divisors);
          ASSERT_FALSE(HasFatalFailure())
              << dtype_text(src) << " to " << dtype_text(dst) << ", " << numel
              << " elements, " << divisors.count << " divisors";
        }
      }
    }
  }
}

TEST_P(CpuKernels, PackEvery16BitPattern) {
  for (const DType src : {DType::kHalf, DType::kBFloat16}) {
    Source source(src, 0x10000);
    for (int64_t i = 0; i < source.numel(); ++i) {
      source.set_bits(i, static_cast<uint64_t>(i));
    }
    for (const DType dst : kStored) {
      for (const FactorChain& divisors : kChains) {
        check_pack(*table_, source, src, dst, 0, divisors);
        ASSERT_FALSE(HasFatalFailure());
      }
    }
  }
}

// A cast keeps a nan's sign and payload the same on every table.
TEST_P(CpuKernels, PackCastsNansLikeTheScalarRule) {
  auto random = generator();
  Source source(DType::kFloat, 4099);
  for (int64_t i = 0; i < source.numel(); ++i) {
    source.set_bits(i, (random() & 0xffffffffu) | 0x7f800001u);
  }
  for (const DType dst : {DType::kHalf, DType::kBFloat16}) {
    Output output(dst, source.numel());
    EXPECT_TRUE(table_->pack(
        source.data(),
        DType::kFloat,
        output.data(),
        dst,
        source.numel(),
        chain_of({})));
    for (int64_t i = 0; i < source.numel(); ++i) {
      const float value =
          detail::bits_float(static_cast<uint32_t>(source.bits(i)));
      ASSERT_EQ(
          output.bits(i),
          dst == DType::kHalf ? from_float<Half>(value).bits
                              : from_float<BFloat16>(value).bits);
    }
  }
}

// The flag looks at what is stored: an infinity that appears only in the cast
// or in the division counts, in any place.
TEST_P(CpuKernels, PackFlagsWhatItMakes) {
  for (int64_t bad = 0; bad < 67; ++bad) {
    Source source(DType::kFloat, 67);
    for (int64_t i = 0; i < 67; ++i) {
      source.set_value(i, 1.0);
    }
    Output output(DType::kHalf, 67);
    const auto pack = [&](const FactorChain& divisors) {
      return table_->pack(
          source.data(),
          DType::kFloat,
          output.data(),
          DType::kHalf,
          67,
          divisors);
    };
    ASSERT_FALSE(pack(chain_of({})));
    source.set_value(bad, 65536.0);
    ASSERT_TRUE(pack(chain_of({})));
    source.set_value(bad, 40000.0);
    ASSERT_FALSE(pack(chain_of({2.0f})));
    ASSERT_TRUE(pack(chain_of({0.5f})));
  }
}

// --- unpack ------------------------------------------------------------------

void check_unpack(
    const Kernels& table,
    const Source& source,
    const Source& present,
    DType src,
    DType dst,
    const FactorChain& multipliers,
    bool accumulate) {
  const int64_t numel = source.numel();
  Output output(dst, numel, numel % 5);
  output.copy_from(present);
  table.unpack(
      source.data(), src, output.data(), dst, numel, multipliers, accumulate);
  for (int64_t i = 0; i < numel; ++i) {
    const double before = present.value(i);
    const double expected = oracle::unpack(
        source.value(i),
        oracle::format_of(src),
        oracle::format_of(dst),
        multipliers,
        accumulate ? &before : nullptr);
    expect_value(output.bits(i), expected, dst, i);
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
  output.expect_guards();
}

TEST_P(CpuKernels, Unpack) {
  auto random = generator();
  for (const DType src : kStored) {
    for (const DType dst : kStored) {
      for (const FactorChain& multipliers : kChains) {
        for (const int64_t numel : kSizes) {
          Source source(src, numel, static_cast<int64_t>(random() % 8));
          Source present(dst, numel);
          numel % 2 == 0 ? source.fill_finite(random) : source.fill_any(random);
          numel % 3 == 0 ? present.fill_finite(random)
                         : present.fill_any(random);
          for (const bool accumulate : {false, true}) {
            check_unpack(
                *table_, source, present, src, dst, multipliers, accumulate);
            ASSERT_FALSE(HasFatalFailure())
                << dtype_text(src) << " to " << dtype_text(dst) << ", " << numel
                << " elements, accumulate " << accumulate;
          }
        }
      }
    }
  }
}

// --- sums of squares ---------------------------------------------------------

double sum_in_order(const Source& source, int lanes) {
  const int64_t whole = source.numel() / lanes * lanes;
  std::vector<double> sums(lanes, 0.0);
  for (int64_t i = 0; i < whole; ++i) {
    const double square = source.value(i) * source.value(i);
    sums[i % lanes] += square;
  }
  double total = sums[0];
  for (int lane = 1; lane < lanes; ++lane) {
    total += sums[lane];
  }
  for (int64_t i = whole; i < source.numel(); ++i) {
    const double square = source.value(i) * source.value(i);
    total += square;
  }
  return total;
}

TEST_P(CpuKernels, SumSquares) {
  auto random = generator();
  for (const DType dtype : kReadable) {
    for (const int lanes : {1, 2, 4, 8}) {
      for (const int64_t numel : kSizes) {
        Source source(dtype, numel, static_cast<int64_t>(random() % 8));
        source.fill_finite(random);
        const double actual =
            table_->sum_squares(source.data(), dtype, numel, lanes);
        const double expected = sum_in_order(source, lanes);
        ASSERT_EQ(std::memcmp(&actual, &expected, sizeof(actual)), 0)
            << dtype_text(dtype) << ", " << lanes << " lanes, " << numel
            << " elements: " << actual << " but expected " << expected;
      }
    }
  }
}

TEST_P(CpuKernels, SumSquaresOfNonfinite) {
  for (const DType dtype : kReadable) {
    for (const int lanes : {1, 2, 4, 8}) {
      for (int64_t bad = 0; bad < 37; ++bad) {
        Source source(dtype, 37);
        for (int64_t i = 0; i < 37; ++i) {
          source.set_value(i, 1.0);
        }
        source.set_value(bad, -INFINITY);
        ASSERT_EQ(
            table_->sum_squares(source.data(), dtype, 37, lanes), INFINITY);
        source.set_value(bad, NAN);
        ASSERT_TRUE(
            std::isnan(table_->sum_squares(source.data(), dtype, 37, lanes)));
      }
    }
  }
}

// --- unscale -----------------------------------------------------------------

TEST_P(CpuKernels, Unscale) {
  auto random = generator();
  const auto format = oracle::format_of(DType::kFloat);
  for (const DType src : kStored) {
    for (const float scale : {1.0f, 1.0f / 65536.0f, 0.3f, -3e38f, 1e-38f}) {
      for (const int64_t numel : kSizes) {
        Source source(src, numel, static_cast<int64_t>(random() % 8));
        source.fill_any(random);
        Output output(DType::kFloat, numel, numel % 3);
        table_->unscale(
            source.data(),
            src,
            static_cast<float*>(output.data()),
            numel,
            scale);
        for (int64_t i = 0; i < numel; ++i) {
          const double product = source.value(i) * static_cast<double>(scale);
          expect_value(
              output.bits(i),
              oracle::round_to(product, format),
              DType::kFloat,
              i);
          ASSERT_FALSE(HasFatalFailure());
        }
        output.expect_guards();
      }
    }
  }
}

TEST_P(CpuKernels, UnscaleInPlace) {
  auto random = generator();
  Source source(DType::kFloat, 1025);
  source.fill_finite(random);
  Output output(DType::kFloat, 1025, 1);
  output.copy_from(source);
  auto* data = static_cast<float*>(output.data());
  table_->unscale(data, DType::kFloat, data, 1025, 0.5f);
  for (int64_t i = 0; i < 1025; ++i) {
    const double product = source.value(i) * 0.5;
    expect_value(
        output.bits(i),
        oracle::round_to(product, oracle::format_of(DType::kFloat)),
        DType::kFloat,
        i);
  }
  output.expect_guards();
}

} // namespace
} // namespace z3ext::cpu
