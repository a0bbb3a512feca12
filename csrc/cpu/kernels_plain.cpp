// The fallback for every machine: plain loops, one element at a time.
#include "kernels.h"

namespace z3ext::cpu::plain {

struct Vec {
  static constexpr const char* kName = "plain";
  static constexpr int64_t kWidth = 1;
  static constexpr uintptr_t kByteAlignment = 1;
  template <typename T>
  static constexpr int64_t kBlockStep = 1;

  template <typename T>
  static bool block_nonfinite(const T* src, int64_t numel) {
    bool bad = false;
    for (int64_t i = 0; i < numel; ++i) {
      bad |= is_nonfinite(src[i]);
    }
    return bad;
  }

  template <typename T>
  static float load(const T* src) {
    return to_float(*src);
  }
  template <typename T>
  static void store(T* dst, float value) {
    *dst = from_float<T>(value);
  }
  template <typename T>
  static float round(float value) {
    return to_float(from_float<T>(value));
  }
  static float add(float a, float b) {
    return a + b;
  }
  static float mul(float a, float b) {
    return a * b;
  }
  static float div(float a, float b) {
    return a / b;
  }

  static bool no_bad() {
    return false;
  }
  static bool collect_bad(bool bad, float value) {
    return bad | is_nonfinite(value);
  }
  static bool any_bad(bool bad) {
    return bad;
  }

  template <typename T>
  static void sum_squares_4(const T* src, int64_t numel, double* lanes) {
    for (int64_t i = 0; i < numel; i += 4) {
      for (int lane = 0; lane < 4; ++lane) {
        const double value = static_cast<double>(to_float(src[i + lane]));
        lanes[lane] += value * value;
      }
    }
  }
};

#include "kernels_impl.h"

const Kernels& table() {
  return kTable;
}

} // namespace z3ext::cpu::plain
