// What the kernels should compute, said again in double arithmetic on plain
// numbers: nothing here uses csrc/numeric.h's conversions or arithmetic.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../numeric.h"

namespace z3ext::oracle {

// An IEEE binary interchange format.
struct Format {
  int bytes;
  int exponent_bits;
  int mantissa_bits;

  int bias() const {
    return (1 << (exponent_bits - 1)) - 1;
  }
  uint64_t exponent_mask() const {
    return ((1ull << exponent_bits) - 1) << mantissa_bits;
  }
  uint64_t mantissa_mask() const {
    return (1ull << mantissa_bits) - 1;
  }
  uint64_t sign_bit() const {
    return 1ull << (exponent_bits + mantissa_bits);
  }
  double largest() const {
    return std::ldexp(2.0 - std::ldexp(1.0, -mantissa_bits), bias());
  }
};

inline Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kHalf:
      return {2, 5, 10};
    case DType::kBFloat16:
      return {2, 8, 7};
    case DType::kFloat:
      return {4, 8, 23};
    default:
      return {8, 11, 52};
  }
}

// The number that a bit pattern stands for.
inline double decode(uint64_t bits, const Format& format) {
  const uint64_t mantissa = bits & format.mantissa_mask();
  const int exponent =
      static_cast<int>((bits & format.exponent_mask()) >> format.mantissa_bits);
  double magnitude;
  if (exponent == (1 << format.exponent_bits) - 1) {
    magnitude = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    magnitude = std::ldexp(
        static_cast<double>(mantissa),
        1 - format.bias() - format.mantissa_bits);
  } else {
    magnitude = std::ldexp(
        static_cast<double>(mantissa + format.mantissa_mask() + 1),
        exponent - format.bias() - format.mantissa_bits);
  }
  return (bits & format.sign_bit()) != 0 ? -magnitude : magnitude;
}

// The nearest number of the format, ties to even. `value` may have been rounded
// to double before: for sums, products and quotients of floats that first
// rounding changes no result, since double has more than twice their digits.
inline double round_to(double value, const Format& format) {
  if (!std::isfinite(value) || value == 0.0) {
    return value;
  }
  int exponent = 0;
  std::frexp(value, &exponent);
  const int smallest_exponent = 1 - format.bias();
  const int quantum =
      (exponent - 1 < smallest_exponent ? smallest_exponent : exponent - 1) -
      format.mantissa_bits;
  const double rounded =
      std::ldexp(std::nearbyint(std::ldexp(value, -quantum)), quantum);
  if (std::fabs(rounded) > format.largest()) {
    return std::copysign(INFINITY, rounded);
  }
  return rounded;
}

// The bit pattern of a number of the format; some nan for nan.
inline uint64_t encode(double value, const Format& format) {
  const uint64_t sign = std::signbit(value) ? format.sign_bit() : 0;
  if (std::isnan(value)) {
    return sign | format.exponent_mask() | 1;
  }
  if (std::isinf(value)) {
    return sign | format.exponent_mask();
  }
  const double magnitude = std::fabs(value);
  const int smallest_exponent = 1 - format.bias();
  if (magnitude < std::ldexp(1.0, smallest_exponent)) {
    return sign | static_cast<uint64_t>(std::ldexp(
                      magnitude, format.mantissa_bits - smallest_exponent));
  }
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const auto digits = static_cast<uint64_t>(
      std::ldexp(magnitude, format.mantissa_bits - (exponent - 1)));
  return sign |
         (static_cast<uint64_t>(exponent - 1 + format.bias())
          << format.mantissa_bits) |
         (digits & format.mantissa_mask());
}

inline bool is_nan(uint64_t bits, const Format& format) {
  return (bits & format.exponent_mask()) == format.exponent_mask() &&
         (bits & format.mantissa_mask()) != 0;
}

// Equal bits, or two nans: which nan comes out of arithmetic is the
// processor's affair.
inline bool same_value(uint64_t a, uint64_t b, const Format& format) {
  return a == b || (is_nan(a, format) && is_nan(b, format));
}

// One element of pack: cast, then divide, rounding each time.
inline double pack(
    double value, const Format& bucket, const FactorChain& divisors) {
  double stored = round_to(value, bucket);
  for (int k = 0; k < divisors.count; ++k) {
    const double quotient = stored / static_cast<double>(divisors.factors[k]);
    stored = round_to(round_to(quotient, format_of(DType::kFloat)), bucket);
  }
  return stored;
}

// One element of pack on a GPU, where a reciprocal is multiplied.
inline double pack_by_reciprocals(
    double value, const Format& bucket, const FactorChain& reciprocals) {
  double stored = round_to(value, bucket);
  for (int k = 0; k < reciprocals.count; ++k) {
    const double product = stored * static_cast<double>(reciprocals.factors[k]);
    stored = round_to(round_to(product, format_of(DType::kFloat)), bucket);
  }
  return stored;
}

// One element of unpack: multiply, rounding to the bucket's format each time,
// then cast, then add where `present` is not null.
inline double unpack(
    double value,
    const Format& bucket,
    const Format& partition,
    const FactorChain& multipliers,
    const double* present) {
  double scaled = pack_by_reciprocals(value, bucket, multipliers);
  scaled = round_to(scaled, partition);
  if (present == nullptr) {
    return scaled;
  }
  const double sum = round_to(*present + scaled, format_of(DType::kFloat));
  return round_to(sum, partition);
}

} // namespace z3ext::oracle
