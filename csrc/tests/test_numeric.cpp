// csrc/numeric.h against double arithmetic.
#include "support.h"

namespace z3ext {
namespace {

using namespace testing_support;

float float_of(uint64_t bits) {
  return detail::bits_float(static_cast<uint32_t>(bits));
}

template <typename T>
void check_all_to_float(DType dtype) {
  const auto format = oracle::format_of(dtype);
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const T element{static_cast<uint16_t>(bits)};
    const double expected = oracle::decode(bits, format);
    const float actual = to_float(element);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(actual), expected) << bits;
      ASSERT_EQ(std::signbit(actual), std::signbit(expected)) << bits;
    }
    ASSERT_EQ(is_nonfinite(element), !std::isfinite(expected)) << bits;
  }
}

TEST(Numeric, EveryHalfToFloat) {
  check_all_to_float<Half>(DType::kHalf);
}

TEST(Numeric, EveryBFloat16ToFloat) {
  check_all_to_float<BFloat16>(DType::kBFloat16);
}

template <typename T>
void check_from_float(uint64_t bits, DType dtype) {
  const auto format = oracle::format_of(dtype);
  const auto float_format = oracle::format_of(DType::kFloat);
  const uint64_t actual = from_float<T>(float_of(bits)).bits;
  if (oracle::is_nan(bits, float_format)) {
    // Quiet, and with the payload's upper bits.
    const int dropped = float_format.mantissa_bits - format.mantissa_bits;
    const uint64_t quiet = 1ull << (format.mantissa_bits - 1);
    const uint64_t sign = bits >> 31 != 0 ? format.sign_bit() : 0;
    ASSERT_EQ(
        actual,
        sign | format.exponent_mask() | quiet |
            ((bits & float_format.mantissa_mask()) >> dropped))
        << std::hex << bits;
    return;
  }
  const double value = oracle::decode(bits, float_format);
  ASSERT_EQ(actual, oracle::encode(oracle::round_to(value, format), format))
      << std::hex << bits;
}

// Every value of the format, every midpoint of two neighbours, and the floats
// one and two places beside each.
template <typename T>
void check_from_float_edges(DType dtype) {
  const auto format = oracle::format_of(dtype);
  const int dropped = 23 - format.mantissa_bits;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float value = to_float(T{static_cast<uint16_t>(bits)});
    const uint32_t exact = detail::float_bits(value);
    for (const uint32_t step : {0u, 1u << (dropped - 1)}) {
      for (uint32_t near = 0; near < 5; ++near) {
        check_from_float<T>(
            static_cast<uint32_t>(exact + step + near - 2), dtype);
      }
    }
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
}

// Where half's values are a multiple of 2^-24 the midpoints lie elsewhere.
TEST(Numeric, FloatToHalfBelowItsNormals) {
  for (int k = 0; k <= 4096; ++k) {
    const uint32_t exact =
        detail::float_bits(std::ldexp(static_cast<float>(k), -25));
    for (uint32_t near = 0; near < 5; ++near) {
      for (const uint32_t sign : {0u, 0x80000000u}) {
        check_from_float<Half>(
            ((exact + near - 2) & 0x7fffffffu) | sign, DType::kHalf);
      }
    }
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(Numeric, FloatToHalfEdges) {
  check_from_float_edges<Half>(DType::kHalf);
}

TEST(Numeric, FloatToBFloat16Edges) {
  check_from_float_edges<BFloat16>(DType::kBFloat16);
}

TEST(Numeric, FloatTo16BitsRandom) {
  auto random = generator();
  for (int i = 0; i < 2000000; ++i) {
    const uint64_t bits = random() & 0xffffffffu;
    check_from_float<Half>(bits, DType::kHalf);
    check_from_float<BFloat16>(bits, DType::kBFloat16);
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(Numeric, NonfiniteFloats) {
  auto random = generator();
  for (int i = 0; i < 1000000; ++i) {
    uint64_t bits = random();
    if (i % 4 == 0) {
      bits |= 0x7ff000007f800000ull; // both exponents full
    }
    double wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    ASSERT_EQ(is_nonfinite(wide), !std::isfinite(wide));
    const float narrow = float_of(bits & 0xffffffffu);
    ASSERT_EQ(is_nonfinite(narrow), !std::isfinite(narrow));
  }
}

template <typename Rule, typename T>
void check_chain(
    DType dtype,
    double (*expected)(double, const oracle::Format&, const FactorChain&)) {
  auto random = generator();
  Source source(DType::kFloat, 20000);
  source.fill_finite(random);
  const FactorChain chain = chain_of({3.0f, 0.7f, 1024.0f});
  for (int64_t i = 0; i < source.numel(); ++i) {
    const T stored =
        store_with_factors<Rule, T>(float_of(source.bits(i)), chain);
    uint64_t bits = 0;
    std::memcpy(&bits, &stored, sizeof(stored));
    expect_value(
        bits,
        expected(source.value(i), oracle::format_of(dtype), chain),
        dtype,
        i);
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
  }
}

TEST(Numeric, ChainsRoundAfterEveryFactor) {
  check_chain<DivideRule, Half>(DType::kHalf, oracle::pack);
  check_chain<DivideRule, BFloat16>(DType::kBFloat16, oracle::pack);
  check_chain<DivideRule, float>(DType::kFloat, oracle::pack);
  check_chain<MultiplyRule, Half>(DType::kHalf, oracle::pack_by_reciprocals);
  check_chain<MultiplyRule, BFloat16>(
      DType::kBFloat16, oracle::pack_by_reciprocals);
  check_chain<MultiplyRule, float>(DType::kFloat, oracle::pack_by_reciprocals);
}

} // namespace
} // namespace z3ext
