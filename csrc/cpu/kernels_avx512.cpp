// AVX-512 (F, BW, VL, DQ) kernels. Compiled on x86-64 only, and run only where
// the processor has them (csrc/cpu/dispatch.cpp).
#include "kernels.h"

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC bug 105593: the header's own "undefined" vectors warn when inlined.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

// Everything included stands above this line: a header's inline function that
// is compiled for AVX-512 here could be the copy that the linker keeps for all.
#if defined(__clang__)
#pragma clang attribute push(                                      \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif

namespace z3ext::cpu::avx512 {

struct Vec {
  static constexpr const char* kName = "avx512";
  static constexpr int64_t kWidth = 16;
  static constexpr uintptr_t kByteAlignment = 64;
  // Elements that block_nonfinite takes at a time: four vectors.
  template <typename T>
  static constexpr int64_t kBlockStep = 256 / static_cast<int64_t>(sizeof(T));

  static uint64_t exponent_full(__m512i bits, const Half*) {
    const __m512i mask = _mm512_set1_epi16(0x7c00);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, mask), mask);
  }
  static uint64_t exponent_full(__m512i bits, const BFloat16*) {
    const __m512i mask = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, mask), mask);
  }
  static uint64_t exponent_full(__m512i bits, const float*) {
    const __m512i mask = _mm512_set1_epi32(0x7f800000);
    return _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, mask), mask);
  }
  static uint64_t exponent_full(__m512i bits, const double*) {
    const __m512i mask = _mm512_set1_epi64(0x7ff0000000000000ll);
    return _mm512_cmpeq_epi64_mask(_mm512_and_si512(bits, mask), mask);
  }

  template <typename T>
  static bool block_nonfinite(const T* src, int64_t numel) {
    const auto* at = reinterpret_cast<const char*>(src);
    const auto* end = reinterpret_cast<const char*>(src + numel);
    uint64_t bad = 0;
    for (; at != end; at += 256) {
      const uint64_t first = exponent_full(_mm512_loadu_si512(at), src) |
                             exponent_full(_mm512_loadu_si512(at + 64), src);
      const uint64_t second = exponent_full(_mm512_loadu_si512(at + 128), src) |
                              exponent_full(_mm512_loadu_si512(at + 192), src);
      bad |= first | second;
    }
    return bad != 0;
  }

  static __m512 load(const float* src) {
    return _mm512_loadu_ps(src);
  }
  static __m512 load(const Half* src) {
    return _mm512_cvtph_ps(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)));
  }
  static __m512 load(const BFloat16* src) {
    const __m256i bits =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }

  // The values are already rounded to the stored dtype.
  static void store(float* dst, __m512 value) {
    _mm512_storeu_ps(dst, value);
  }
  static void store(Half* dst, __m512 value) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(dst),
        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store(BFloat16* dst, __m512 value) {
    const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(value), 16);
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(dst), _mm512_cvtepi32_epi16(high));
  }

  template <typename T>
  static __m512 round(__m512 value) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return value;
    } else {
      return round_to(static_cast<const T*>(nullptr), value);
    }
  }
  static __m512 round_to(const Half*, __m512 value) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  static __m512 round_to(const BFloat16*, __m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd =
        _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(
        bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_or_epi32(
        rounded, is_nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_castsi512_ps(_mm512_and_si512(
        chosen, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  static __m512 add(__m512 a, __m512 b) {
    return _mm512_add_ps(a, b);
  }
  static __m512 mul(__m512 a, float b) {
    return _mm512_mul_ps(a, _mm512_set1_ps(b));
  }
  static __m512 div(__m512 a, float b) {
    return _mm512_div_ps(a, _mm512_set1_ps(b));
  }

  static __mmask16 no_bad() {
    return 0;
  }
  static __mmask16 collect_bad(__mmask16 bad, __m512 value) {
    const __m512i mask = _mm512_set1_epi32(0x7f800000);
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(value), mask);
    return static_cast<__mmask16>(bad | _mm512_cmpeq_epi32_mask(bits, mask));
  }
  static bool any_bad(__mmask16 bad) {
    return bad != 0;
  }

  // Four accumulators are one 256-bit vector: wider ones would change the order
  // of the additions, which is the op's contract.
  template <typename T>
  static void sum_squares_4(const T* src, int64_t numel, double* lanes) {
    __m256d total = _mm256_loadu_pd(lanes);
    int64_t i = 0;
    for (; i + kWidth <= numel; i += kWidth) {
      const __m512 value = load(src + i);
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
      const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
      const __m512d low_sq = _mm512_mul_pd(low, low);
      const __m512d high_sq = _mm512_mul_pd(high, high);
      total = _mm256_add_pd(total, _mm512_castpd512_pd256(low_sq));
      total = _mm256_add_pd(total, _mm512_extractf64x4_pd(low_sq, 1));
      total = _mm256_add_pd(total, _mm512_castpd512_pd256(high_sq));
      total = _mm256_add_pd(total, _mm512_extractf64x4_pd(high_sq, 1));
    }
    _mm256_storeu_pd(lanes, total);
    for (; i < numel; ++i) { // fewer than four groups of four
      const double value = static_cast<double>(to_float(src[i]));
      lanes[i % 4] += value * value;
    }
  }
};

#include "kernels_impl.h"

const Kernels& table() {
  return kTable;
}

} // namespace z3ext::cpu::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif // __x86_64__
