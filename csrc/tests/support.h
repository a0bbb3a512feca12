// Inputs, guarded outputs and the seed that every kernel test shares.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "../numeric.h"
#include "oracle.h"

namespace z3ext {

inline const char* dtype_text(DType dtype) {
  switch (dtype) {
    case DType::kHalf:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat:
      return "float32";
    default:
      return "float64";
  }
}

namespace testing_support {

constexpr std::initializer_list<DType> kStored = {
    DType::kHalf, DType::kBFloat16, DType::kFloat};
constexpr std::initializer_list<DType> kReadable = {
    DType::kHalf, DType::kBFloat16, DType::kFloat, DType::kDouble};

// Z3EXT_TEST_SEED, or a new one for every run. It is printed once.
inline uint32_t seed() {
  static const uint32_t value = [] {
    const char* asked = std::getenv("Z3EXT_TEST_SEED");
    const auto chosen = asked != nullptr
                            ? static_cast<uint32_t>(std::stoul(asked))
                            : std::random_device{}();
    std::printf("Z3EXT_TEST_SEED=%u\n", chosen);
    return chosen;
  }();
  return value;
}

// A generator that starts at the seed in every test, so that a test repeats
// alone.
inline std::mt19937_64 generator() {
  return std::mt19937_64(seed());
}

inline FactorChain chain_of(std::initializer_list<float> factors) {
  FactorChain chain;
  for (const float factor : factors) {
    chain.factors[chain.count++] = factor;
  }
  return chain;
}

// `numel` elements that end where the allocation ends, so that a sanitizer sees
// a read past them; they begin `shift` elements after an aligned address.
class Source {
 public:
  Source(DType dtype, int64_t numel, int64_t shift = 0)
      : format_(oracle::format_of(dtype)), numel_(numel) {
    const size_t bytes = static_cast<size_t>(numel + shift) * format_.bytes;
    allocation_.reset(
        static_cast<char*>(::operator new(bytes, std::align_val_t{64})));
    begin_ = allocation_.get() + shift * format_.bytes;
  }

  const void* data() const {
    return begin_;
  }
  int64_t numel() const {
    return numel_;
  }
  uint64_t bits(int64_t i) const {
    uint64_t bits = 0;
    std::memcpy(&bits, begin_ + i * format_.bytes, format_.bytes);
    return bits;
  }
  double value(int64_t i) const {
    return oracle::decode(bits(i), format_);
  }
  void set_bits(int64_t i, uint64_t bits) {
    std::memcpy(begin_ + i * format_.bytes, &bits, format_.bytes);
  }
  void set_value(int64_t i, double value) {
    set_bits(i, oracle::encode(value, format_));
  }

  // Finite values: half of them random bit patterns, half of the size that
  // gradients have.
  void fill_finite(std::mt19937_64& random) {
    std::normal_distribution<double> normal(0.0, 1.0);
    for (int64_t i = 0; i < numel_; ++i) {
      const uint64_t pattern = random();
      set_bits(i, pattern);
      if (pattern >> 63 != 0 || !std::isfinite(value(i))) {
        set_value(
            i,
            oracle::round_to(
                normal(random) *
                    std::pow(10.0, static_cast<double>(random() % 9) - 7.0),
                format_));
      }
    }
  }

  // Bit patterns as they come, among them inf and nan.
  void fill_any(std::mt19937_64& random) {
    for (int64_t i = 0; i < numel_; ++i) {
      set_bits(i, random());
    }
  }

 private:
  struct Delete {
    void operator()(char* pointer) const {
      ::operator delete(pointer, std::align_val_t{64});
    }
  };
  oracle::Format format_;
  int64_t numel_;
  std::unique_ptr<char, Delete> allocation_;
  char* begin_;
};

// An output between two guard zones, poisoned before the kernel writes.
class Output {
 public:
  Output(DType dtype, int64_t numel, int64_t shift = 0)
      : format_(oracle::format_of(dtype)),
        numel_(numel),
        storage_(
            static_cast<size_t>(numel + shift) * format_.bytes + 3 * kGuard,
            kPoison) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    begin_ = static_cast<size_t>(
        (64 - address % 64) % 64 + kGuard + shift * format_.bytes);
  }

  void* data() {
    return storage_.data() + begin_;
  }
  uint64_t bits(int64_t i) const {
    uint64_t bits = 0;
    std::memcpy(
        &bits, storage_.data() + begin_ + i * format_.bytes, format_.bytes);
    return bits;
  }
  double value(int64_t i) const {
    return oracle::decode(bits(i), format_);
  }
  void copy_from(const Source& source) {
    std::memcpy(data(), source.data(), numel_ * format_.bytes);
  }

  // No byte outside the output was written.
  void expect_guards() const {
    const size_t end = begin_ + numel_ * format_.bytes;
    for (size_t i = 0; i < storage_.size(); ++i) {
      if (i < begin_ || i >= end) {
        ASSERT_EQ(storage_[i], kPoison)
            << "byte " << static_cast<int64_t>(i - begin_)
            << " of an output of " << end - begin_ << " bytes was written";
      }
    }
  }

 private:
  static constexpr size_t kGuard = 128;
  static constexpr unsigned char kPoison = 0xa7;
  oracle::Format format_;
  int64_t numel_;
  std::vector<unsigned char> storage_;
  size_t begin_;
};

inline void expect_value(
    uint64_t actual, double expected, DType dtype, int64_t index) {
  const oracle::Format format = oracle::format_of(dtype);
  const uint64_t wanted = oracle::encode(expected, format);
  ASSERT_TRUE(oracle::same_value(actual, wanted, format))
      << "element " << index << ": " << std::hex << actual << " but expected "
      << wanted << " (" << expected << ")";
}

} // namespace testing_support
} // namespace z3ext
