// Casts and chains of factors for a group of elements at a time, so that the
// loop over the factors is paid for once per group.
#pragma once

#include <type_traits>

#include "device_types.cuh"

namespace z3ext::cuda {

template <typename T, typename SourceT>
__device__ __forceinline__ T cast(SourceT value) {
  if constexpr (std::is_same_v<T, SourceT>) {
    return value;
  } else {
    return from_float<T>(to_float(value));
  }
}

// Each stored value times each factor in turn, every product rounded to `T`:
// the rounding points of store_with_factors<MultiplyRule, T>.
template <typename T, int N>
__device__ __forceinline__ void multiply_by_factors(
    T (&stored)[N], const FactorChain& chain) {
#pragma unroll 1
  for (int i = 0; i < chain.count; ++i) {
    const float factor = chain.factors[i];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      stored[k] =
          from_float<T>(MultiplyRule::apply(to_float(stored[k]), factor));
    }
  }
}

} // namespace z3ext::cuda
