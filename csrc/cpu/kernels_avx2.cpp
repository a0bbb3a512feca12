// AVX2 + F16C kernels. Compiled on x86-64 only, and run only where the
// processor has both (csrc/cpu/dispatch.cpp).
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

// Everything included stands above this line: a header's inline function that
// is compiled for AVX2 here could be the copy that the linker keeps for all.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

namespace z3ext::cpu::avx2 {

struct Vec {
  static constexpr const char* kName = "avx2";
  static constexpr int64_t kWidth = 8;
  static constexpr uintptr_t kByteAlignment = 32;
  // Elements that block_nonfinite takes at a time: four vectors.
  template <typename T>
  static constexpr int64_t kBlockStep = 128 / static_cast<int64_t>(sizeof(T));

  static __m256i exponent_mask(const Half*) {
    return _mm256_set1_epi16(0x7c00);
  }
  static __m256i exponent_mask(const BFloat16*) {
    return _mm256_set1_epi16(0x7f80);
  }
  static __m256i exponent_mask(const float*) {
    return _mm256_set1_epi32(0x7f800000);
  }
  static __m256i exponent_mask(const double*) {
    return _mm256_set1_epi64x(0x7ff0000000000000ll);
  }
  template <int Bytes>
  static __m256i equal(__m256i a, __m256i b) {
    if constexpr (Bytes == 2) {
      return _mm256_cmpeq_epi16(a, b);
    } else if constexpr (Bytes == 4) {
      return _mm256_cmpeq_epi32(a, b);
    } else {
      return _mm256_cmpeq_epi64(a, b);
    }
  }

  template <typename T>
  static bool block_nonfinite(const T* src, int64_t numel) {
    const __m256i mask = exponent_mask(src);
    const auto* at = reinterpret_cast<const __m256i*>(src);
    const auto* end = reinterpret_cast<const __m256i*>(src + numel);
    __m256i bad = _mm256_setzero_si256();
    for (; at != end; at += 4) {
      for (int k = 0; k < 4; ++k) {
        const __m256i bits = _mm256_and_si256(_mm256_loadu_si256(at + k), mask);
        bad = _mm256_or_si256(bad, equal<sizeof(T)>(bits, mask));
      }
    }
    return !_mm256_testz_si256(bad, bad);
  }

  static __m256 load(const float* src) {
    return _mm256_loadu_ps(src);
  }
  static __m256 load(const Half* src) {
    return _mm256_cvtph_ps(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
  }
  static __m256 load(const BFloat16* src) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }

  // The values are already rounded to the stored dtype.
  static void store(float* dst, __m256 value) {
    _mm256_storeu_ps(dst, value);
  }
  static void store(Half* dst, __m256 value) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(dst),
        _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store(BFloat16* dst, __m256 value) {
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(value), 16);
    const __m256i packed = _mm256_packus_epi32(high, high);
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0x08);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(dst), _mm256_castsi256_si128(ordered));
  }

  template <typename T>
  static __m256 round(__m256 value) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return value;
    } else {
      return round_to(static_cast<const T*>(nullptr), value);
    }
  }
  static __m256 round_to(const Half*, __m256 value) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  static __m256 round_to(const BFloat16*, __m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(
        bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    const __m256i chosen =
        _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
    return _mm256_castsi256_ps(_mm256_and_si256(
        chosen, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  static __m256 add(__m256 a, __m256 b) {
    return _mm256_add_ps(a, b);
  }
  static __m256 mul(__m256 a, float b) {
    return _mm256_mul_ps(a, _mm256_set1_ps(b));
  }
  static __m256 div(__m256 a, float b) {
    return _mm256_div_ps(a, _mm256_set1_ps(b));
  }

  static __m256i no_bad() {
    return _mm256_setzero_si256();
  }
  static __m256i collect_bad(__m256i bad, __m256 value) {
    const __m256i mask = _mm256_set1_epi32(0x7f800000);
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(value), mask);
    return _mm256_or_si256(bad, _mm256_cmpeq_epi32(bits, mask));
  }
  static bool any_bad(__m256i bad) {
    return !_mm256_testz_si256(bad, bad);
  }

  template <typename T>
  static void sum_squares_4(const T* src, int64_t numel, double* lanes) {
    __m256d total = _mm256_loadu_pd(lanes);
    int64_t i = 0;
    for (; i + kWidth <= numel; i += kWidth) {
      const __m256 value = load(src + i);
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
      total = _mm256_add_pd(total, _mm256_mul_pd(low, low));
      total = _mm256_add_pd(total, _mm256_mul_pd(high, high));
    }
    _mm256_storeu_pd(lanes, total);
    for (; i < numel; ++i) { // at most one group of four
      const double value = static_cast<double>(to_float(src[i]));
      lanes[i % 4] += value * value;
    }
  }
};

#include "kernels_impl.h"

const Kernels& table() {
  return kTable;
}

} // namespace z3ext::cpu::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif // __x86_64__
