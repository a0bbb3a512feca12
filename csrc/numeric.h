// Element rules shared by the CPU and the CUDA kernels: storage types,
// conversions, the non-finite test and the rounding points of a division.
//
// No torch and no CUDA header is needed here, so that the same source compiles
// under g++ (for the C++ tests) and under nvcc.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define Z3EXT_HOST_DEVICE __host__ __device__ inline
#else
#define Z3EXT_HOST_DEVICE inline
#endif

namespace z3ext {

// The dtypes that a kernel can read or write.
enum class DType : int8_t { kHalf = 0, kBFloat16 = 1, kFloat = 2, kDouble = 3 };

// Storage of IEEE binary16 and of bfloat16. Arithmetic happens in float.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

namespace detail {

Z3EXT_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

Z3EXT_HOST_DEVICE float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

} // namespace detail

// The 16-bit conversions select among results instead of branching: the threads
// of a warp then stay together, whatever their values.

// --- to float: always exact --------------------------------------------------

Z3EXT_HOST_DEVICE float to_float(float value) {
  return value;
}

Z3EXT_HOST_DEVICE float to_float(BFloat16 value) {
  return detail::bits_float(static_cast<uint32_t>(value.bits) << 16);
}

Z3EXT_HOST_DEVICE float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  // Inf and nan go to the top exponent and keep their payload.
  const uint32_t bias = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;
  const uint32_t normal = (magnitude << 13) + bias;
  // Zero and subnormals: magnitude * 2^-24, exact.
  const uint32_t subnormal = detail::float_bits(
      static_cast<float>(static_cast<int32_t>(magnitude)) *
      5.9604644775390625e-8f);
  return detail::bits_float(sign | (magnitude < 0x0400u ? subnormal : normal));
}

// --- from float: round to nearest, ties to even ------------------------------

template <typename T>
Z3EXT_HOST_DEVICE T from_float(float value);

template <>
Z3EXT_HOST_DEVICE float from_float<float>(float value) {
  return value;
}

template <>
Z3EXT_HOST_DEVICE BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = detail::float_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x0040u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BFloat16{static_cast<uint16_t>(is_nan ? quiet_nan : rounded)};
}

template <>
Z3EXT_HOST_DEVICE Half from_float<Half>(float value) {
  const uint32_t bits = detail::float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal =
      (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Below 2^-14: a multiple of 2^-24. Adding 0.5 aligns the float's last bit
  // with 2^-24, so the hardware's own rounding (to nearest even) does the work;
  // the difference is the integer.
  const uint32_t subnormal =
      detail::float_bits(detail::bits_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t rounded = magnitude < 0x38800000u ? subnormal : normal;
  rounded = magnitude >= 0x477ff000u ? 0x7c00u : rounded; // 65520 and above
  rounded = magnitude > 0x7f800000u ? quiet_nan : rounded;
  return Half{static_cast<uint16_t>(sign | rounded)};
}

// --- non-finite: all exponent bits set ---------------------------------------

Z3EXT_HOST_DEVICE bool is_nonfinite(Half value) {
  return (value.bits & 0x7c00u) == 0x7c00u;
}
Z3EXT_HOST_DEVICE bool is_nonfinite(BFloat16 value) {
  return (value.bits & 0x7f80u) == 0x7f80u;
}
Z3EXT_HOST_DEVICE bool is_nonfinite(float value) {
  return (detail::float_bits(value) & 0x7f800000u) == 0x7f800000u;
}
Z3EXT_HOST_DEVICE bool is_nonfinite(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7ff0000000000000ull) == 0x7ff0000000000000ull;
}

// --- factors with stock's rounding points ------------------------------------

// The factors applied to an element one after the other, each result rounded to
// the stored dtype, as a chain of torch `div_` or `mul` calls would round it.
// Plain data, so that it can travel in a kernel's arguments.
struct FactorChain {
  static constexpr int kMaxFactors = 4;
  int count = 0;
  float factors[kMaxFactors] = {1.0f, 1.0f, 1.0f, 1.0f};
};

// torch's CPU `div_` divides in float; its CUDA `div_` multiplies by the float
// reciprocal. `mul` multiplies on both.
struct DivideRule {
  static Z3EXT_HOST_DEVICE float apply(float value, float factor) {
    return value / factor;
  }
};
struct MultiplyRule {
  static Z3EXT_HOST_DEVICE float apply(float value, float factor) {
    return value * factor;
  }
};

// `value` cast to `T`, then each factor applied and rounded to `T`.
template <typename Rule, typename T>
Z3EXT_HOST_DEVICE T store_with_factors(float value, const FactorChain& chain) {
  T stored = from_float<T>(value);
  for (int i = 0; i < chain.count; ++i) {
    stored = from_float<T>(Rule::apply(to_float(stored), chain.factors[i]));
  }
  return stored;
}

} // namespace z3ext
