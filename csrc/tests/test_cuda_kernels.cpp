// The CUDA kernels, run on the CPU, against the oracle.
#include "cuda_emulation.h"

#include "../cuda/check_kernel.cuh"
#include "../cuda/overflow_kernel.cuh"
#include "../cuda/pack_kernel.cuh"
#include "../cuda/unpack_kernel.cuh"
#include "../cuda/unscale_kernel.cuh"

namespace z3ext::cuda {
namespace {

using namespace testing_support;
using emulation::run_independent;
using emulation::run_together;

// Around groups (4 to 16 elements), a block's stride and chunks.
constexpr int64_t kSizes[] = {
    1, 2, 7, 8, 9, 15, 16, 17, 100, 2049, 8191, 8192, 8193, 8205, 20001};

template <typename Body>
void with_stored(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kHalf:
      return body(Half{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      return body(float{});
  }
}

template <typename Body>
void with_readable(DType dtype, const Body& body) {
  dtype == DType::kDouble ? body(double{}) : with_stored(dtype, body);
}

// --- overflow ----------------------------------------------------------------

TEST(CudaKernels, Overflow) {
  for (const DType dtype : kReadable) {
    with_readable(dtype, [&](auto tag) {
      using T = decltype(tag);
      for (const int64_t numel : kSizes) {
        for (const int64_t shift : {0, 1, 3}) {
          Source source(dtype, numel, shift);
          for (int64_t i = 0; i < numel; ++i) {
            source.set_value(i, oracle::format_of(dtype).largest());
          }
          const auto overflows = [&] {
            const auto entry = make_read_entry(source.data(), dtype, numel, 0);
            const int64_t chunks = chunk_count(numel, entry.head);
            bool flag = false;
            run_independent(
                2, 64, [&] { overflow_kernel<T>(entry, chunks, &flag); });
            return flag;
          };
          ASSERT_FALSE(overflows());
          const int64_t stride = numel < 20 ? 1 : numel / 5;
          for (int64_t bad = numel - 1; bad >= 0; bad -= stride) {
            const uint64_t before = source.bits(bad);
            source.set_value(bad, bad % 2 == 0 ? INFINITY : NAN);
            ASSERT_TRUE(overflows()) << bad << " of " << numel;
            source.set_bits(bad, before);
          }
        }
      }
    });
  }
}

// --- lists of tensors --------------------------------------------------------

// Where each tensor of a list lies in one flat buffer, with gaps between.
struct Places {
  std::vector<int64_t> numels;
  std::vector<int64_t> offsets;
  int64_t total = 0;

  explicit Places(std::mt19937_64& random, int count) {
    for (int i = 0; i < count; ++i) {
      numels.push_back(
          count > 20 ? static_cast<int64_t>(random() % 40)
                     : kSizes[random() % std::size(kSizes)]);
      total += static_cast<int64_t>(random() % 9);
      offsets.push_back(total);
      total += numels.back();
    }
    total += 3;
  }
};

void* element(void* base, int64_t index, DType dtype) {
  return static_cast<char*>(base) + index * dtype_bytes(dtype);
}

// Elements in no tensor's place keep the poison.
void expect_gaps(
    const Output& output, const Output& poison, const Places& places) {
  std::vector<bool> used(places.total, false);
  for (size_t i = 0; i < places.numels.size(); ++i) {
    for (int64_t k = 0; k < places.numels[i]; ++k) {
      used[places.offsets[i] + k] = true;
    }
  }
  for (int64_t i = 0; i < places.total; ++i) {
    ASSERT_TRUE(used[i] || output.bits(i) == poison.bits(i)) << i;
  }
}

void check_pack(
    DType src, DType dst, int count, const FactorChain& reciprocals) {
  auto random = generator();
  const Places places(random, count);
  Output output(dst, places.total, 1);
  const Output poison(dst, places.total);
  std::vector<Source> sources;
  std::vector<TransformEntry> entries;
  bool expected_flag = false;
  for (int i = 0; i < count; ++i) {
    sources.emplace_back(
        src, places.numels[i], static_cast<int64_t>(random() % 9));
    count % 2 == 0 ? sources[i].fill_finite(random)
                   : sources[i].fill_any(random);
    entries.push_back(make_transform_entry(
        sources[i].data(),
        src,
        element(output.data(), places.offsets[i], dst),
        dst,
        places.numels[i]));
  }
  bool flag = false;
  with_stored(src, [&](auto src_tag) {
    with_stored(dst, [&](auto dst_tag) {
      for (const auto& table : plan_tables(entries)) {
        run_independent(3, 64, [&] {
          pack_kernel<decltype(src_tag), decltype(dst_tag)>(
              table, reciprocals, &flag);
        });
      }
    });
  });
  for (int i = 0; i < count; ++i) {
    for (int64_t k = 0; k < places.numels[i]; ++k) {
      const double expected = oracle::pack_by_reciprocals(
          sources[i].value(k), oracle::format_of(dst), reciprocals);
      expected_flag |= !std::isfinite(expected);
      expect_value(output.bits(places.offsets[i] + k), expected, dst, k);
      if (::testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }
  EXPECT_EQ(flag, expected_flag);
  expect_gaps(output, poison, places);
  output.expect_guards();
}

TEST(CudaKernels, Pack) {
  for (const DType src : kStored) {
    for (const DType dst : kStored) {
      for (const int count : {1, 6, 7, 150, 201}) {
        check_pack(src, dst, count, chain_of({}));
        check_pack(src, dst, count, chain_of({1.0f / 3.0f, 7.0f}));
        ASSERT_FALSE(HasFatalFailure());
      }
    }
  }
}

void check_unpack(
    DType src,
    DType dst,
    int count,
    const FactorChain& multipliers,
    bool accumulate) {
  auto random = generator();
  const Places places(random, count);
  Source bucket(src, places.total, 3);
  bucket.fill_any(random);
  Source present(dst, places.total);
  present.fill_any(random);
  Output output(dst, places.total, 2);
  output.copy_from(present);
  std::vector<TransformEntry> entries;
  std::vector<int64_t> padding_begins;
  for (int i = 0; i < count; ++i) {
    // The bucket's slices lie in another order than the partitions'.
    const int64_t source = places.total - places.offsets[i] - places.numels[i];
    const int64_t numel = places.numels[i] - places.numels[i] / 3;
    void* destination = element(output.data(), places.offsets[i], dst);
    const auto* from =
        static_cast<const char*>(bucket.data()) + source * dtype_bytes(src);
    entries.push_back(make_transform_entry(from, src, destination, dst, numel));
    if (!accumulate) {
      entries.push_back(make_zero_entry(
          element(destination, numel, dst), dst, places.numels[i] - numel));
    }
    padding_begins.push_back(numel);
  }
  with_stored(src, [&](auto src_tag) {
    with_stored(dst, [&](auto dst_tag) {
      for (const auto& table : plan_tables(entries)) {
        run_independent(2, 96, [&] {
          unpack_kernel<decltype(src_tag), decltype(dst_tag)>(
              table, multipliers, accumulate);
        });
      }
    });
  });
  std::vector<bool> written(places.total, false);
  for (int i = 0; i < count; ++i) {
    const int64_t source = places.total - places.offsets[i] - places.numels[i];
    for (int64_t k = 0; k < places.numels[i]; ++k) {
      const int64_t at = places.offsets[i] + k;
      const bool padding = k >= padding_begins[i];
      if (padding && accumulate) {
        continue;
      }
      written[at] = true;
      const double before = present.value(at);
      const double expected = padding ? 0.0
                                      : oracle::unpack(
                                            bucket.value(source + k),
                                            oracle::format_of(src),
                                            oracle::format_of(dst),
                                            multipliers,
                                            accumulate ? &before : nullptr);
      expect_value(output.bits(at), expected, dst, k);
      if (::testing::Test::HasFatalFailure()) {
        return;
      }
    }
  }
  for (int64_t i = 0; i < places.total; ++i) {
    ASSERT_TRUE(written[i] || output.bits(i) == present.bits(i)) << i;
  }
  output.expect_guards();
}

TEST(CudaKernels, Unpack) {
  for (const DType src : kStored) {
    for (const DType dst : kStored) {
      for (const bool accumulate : {false, true}) {
        for (const int count : {1, 5, 130}) {
          check_unpack(src, dst, count, chain_of({}), accumulate);
          check_unpack(src, dst, count, chain_of({3.0f, 0.1f}), accumulate);
          ASSERT_FALSE(HasFatalFailure());
        }
      }
    }
  }
}

// --- unscale -----------------------------------------------------------------

TEST(CudaKernels, Unscale) {
  auto random = generator();
  for (const DType src : kStored) {
    with_stored(src, [&](auto tag) {
      for (const int64_t numel : kSizes) {
        Source source(src, numel, numel % 5);
        source.fill_any(random);
        Output output(DType::kFloat, numel, numel % 3);
        const double scale = 0.1;
        const auto narrow = static_cast<float>(scale);
        const auto entry = make_transform_entry(
            source.data(), src, output.data(), DType::kFloat, numel);
        const bool is_double = numel % 2 == 0;
        const void* scale_pointer = is_double
                                        ? static_cast<const void*>(&scale)
                                        : static_cast<const void*>(&narrow);
        run_independent(2, 64, [&] {
          unscale_kernel<decltype(tag)>(
              entry, chunk_count(numel, entry.head), scale_pointer, is_double);
        });
        for (int64_t i = 0; i < numel; ++i) {
          const double product = source.value(i) * static_cast<double>(narrow);
          expect_value(
              output.bits(i),
              oracle::round_to(product, oracle::format_of(DType::kFloat)),
              DType::kFloat,
              i);
          ASSERT_FALSE(HasFatalFailure());
        }
        output.expect_guards();
      }
    });
  }
}

// --- segments ----------------------------------------------------------------

std::vector<double> segment_sums(
    const Source& source,
    DType dtype,
    const std::vector<int64_t>& bounds,
    unsigned grid,
    bool* flag) {
  std::vector<ReadEntry> entries;
  const auto* base = static_cast<const char*>(source.data());
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    entries.push_back(make_read_entry(
        base + bounds[i] * dtype_bytes(dtype),
        dtype,
        bounds[i + 1] - bounds[i],
        static_cast<int64_t>(i)));
  }
  const auto tables = plan_tables(entries);
  int64_t chunks = 0;
  for (const auto& table : tables) {
    chunks += table.chunk_count;
  }
  std::vector<double> partials(chunks, NAN);
  std::vector<double> sums(bounds.size() - 1, 0.0);
  constexpr unsigned threads = 64;
  with_readable(dtype, [&](auto tag) {
    for (const auto& table : tables) {
      run_together(grid, threads, [&] {
        segment_partials_kernel<decltype(tag)>(table, partials.data(), flag);
      });
      run_together(grid, threads, [&] {
        segment_sums_kernel(table, partials.data(), sums.data());
      });
    }
  });
  return sums;
}

TEST(CudaKernels, SegmentSums) {
  auto random = generator();
  const std::vector<int64_t> bounds = {0, 0, 1, 8, 8, 70, 9000, 30001, 30001};
  for (const DType dtype : kReadable) {
    Source source(dtype, bounds.back(), 1);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < source.numel(); ++i) {
      source.set_value(
          i, oracle::round_to(normal(random), oracle::format_of(dtype)));
    }
    bool flag = false;
    const auto sums = segment_sums(source, dtype, bounds, 1, &flag);
    EXPECT_FALSE(flag);
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
      long double expected = 0.0L;
      for (int64_t k = bounds[i]; k < bounds[i + 1]; ++k) {
        const long double value = source.value(k);
        expected += value * value;
      }
      EXPECT_NEAR(sums[i], expected, 1e-12L * expected) << i;
    }
    EXPECT_EQ(segment_sums(source, dtype, bounds, 3, &flag), sums);
    EXPECT_FALSE(flag);
    source.set_value(30000, NAN);
    segment_sums(source, dtype, bounds, 2, &flag);
    EXPECT_TRUE(flag);
  }
}

TEST(CudaKernels, SegmentSumsOverSeveralLaunches) {
  std::vector<int64_t> bounds = {0};
  for (int i = 0; i < 210; ++i) {
    bounds.push_back(bounds.back() + i % 7);
  }
  Source source(DType::kFloat, bounds.back());
  for (int64_t i = 0; i < source.numel(); ++i) {
    source.set_value(i, static_cast<double>(i % 13)); // exact sums
  }
  bool flag = false;
  const auto sums = segment_sums(source, DType::kFloat, bounds, 2, &flag);
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    double expected = 0.0;
    for (int64_t k = bounds[i]; k < bounds[i + 1]; ++k) {
      expected += source.value(k) * source.value(k);
    }
    ASSERT_EQ(sums[i], expected) << i;
  }
}

} // namespace
} // namespace z3ext::cuda
