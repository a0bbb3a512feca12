// The kernel tables that this machine can run, as test parameters.
#pragma once

#include "../cpu/kernels.h"
#include "support.h"

namespace z3ext::cpu {

class CpuTable : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    table_ = kernels_by_name(GetParam());
    if (table_ == nullptr) {
      GTEST_SKIP() << "this machine or this build has no " << GetParam();
    }
  }

  const Kernels* table_ = nullptr;
};

// Instantiates a suite, a subclass of CpuTable, for every table.
#define Z3EXT_FOR_EVERY_TABLE(suite)                \
  INSTANTIATE_TEST_SUITE_P(                         \
      Tables,                                       \
      suite,                                        \
      ::testing::Values("plain", "avx2", "avx512"), \
      [](const auto& info) { return std::string(info.param); })

// Around vectors (8, 16 and 32 elements) and unrolled steps.
inline constexpr int64_t kSizes[] = {0,   1,   2,   3,   7,   8,   9,   15,
                                     16,  17,  31,  32,  33,  63,  64,  65,
                                     127, 128, 129, 255, 256, 257, 1025};

inline const FactorChain kChains[] = {
    testing_support::chain_of({}),
    testing_support::chain_of({2.0f}),
    testing_support::chain_of({3.0f}),
    testing_support::chain_of({0.1f, 7.0f}),
    testing_support::chain_of({1e-4f, 3.0f, 0.3f, 1e4f}),
    testing_support::chain_of({-1e-38f}),
    testing_support::chain_of({3e38f}),
};

} // namespace z3ext::cpu
