// The CPU kernels behind one table of function pointers, chosen at run time for
// the instruction set of the machine. Each function works on one contiguous
// range in the calling thread; csrc/cpu/ops_cpu.cpp splits the work.
#pragma once

#include <cstdint>

#include "../numeric.h"

namespace z3ext::cpu {

struct Kernels {
  // "plain", "avx2" or "avx512".
  const char* name;

  // Whether any of `numel` elements is inf or nan.
  bool (*any_nonfinite)(const void* src, DType dtype, int64_t numel);

  // dst[i] = src[i] cast to dst's dtype, then divided by each factor in turn,
  // rounded to dst's dtype each time. Returns whether a stored value is inf or
  // nan.
  bool (*pack)(
      const void* src,
      DType src_dtype,
      void* dst,
      DType dst_dtype,
      int64_t numel,
      const FactorChain& divisors);

  // v = src[i] multiplied by each factor in turn, rounded to src's dtype each
  // time, then cast to dst's dtype; dst[i] = v, or dst[i] += v.
  void (*unpack)(
      const void* src,
      DType src_dtype,
      void* dst,
      DType dst_dtype,
      int64_t numel,
      const FactorChain& multipliers,
      bool accumulate);

  // Sum of squares in float64 with `lanes` interleaved accumulators, added in
  // order, then the tail.
  double (*sum_squares)(const void* src, DType dtype, int64_t numel, int lanes);

  // dst[i] = float(src[i]) * scale. dst may be src.
  void (*unscale)(
      const void* src, DType src_dtype, float* dst, int64_t numel, float scale);
};

// The best table for this machine; Z3EXT_CPU_CAPABILITY=plain|avx2|avx512 asks
// for a lower one. A name that is unknown or unsupported is told on stderr.
const Kernels& kernels();

// The table of that name, or nullptr where the machine or the build lacks it.
const Kernels* kernels_by_name(const char* name);

} // namespace z3ext::cpu
