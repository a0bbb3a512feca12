// csrc/cpu/rows.h: bytes of gradients go to their rows, whatever the parts.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "../cpu/rows.h"
#include "support.h"

namespace z3ext::cpu {
namespace {

using namespace testing_support;

constexpr unsigned char kUntouched = 0xa7;

// A gradient's bytes, and where its chunks stand in a row.
struct Gradient {
  std::vector<unsigned char> values;
  int64_t chunk_bytes;
  int64_t offset;
};

// Rows with gaps between the chunks, and what they should hold at the end.
class Rows {
 public:
  Rows(
      std::mt19937_64& random,
      const std::vector<int64_t>& sizes,
      int64_t world_size,
      int64_t gap)
      : world_size_(world_size) {
    for (const int64_t size : sizes) {
      const int64_t chunk = ((size / 2 + world_size - 1) / world_size) * 2;
      gradients_.push_back(
          {std::vector<unsigned char>(size), chunk, row_bytes_});
      for (unsigned char& value : gradients_.back().values) {
        value = static_cast<unsigned char>(random());
      }
      row_bytes_ += chunk + gap;
    }
    bytes_.assign(world_size * row_bytes_ + 1, kUntouched);
    expected_ = bytes_;
    for (const Gradient& gradient : gradients_) {
      const auto size = static_cast<int64_t>(gradient.values.size());
      for (int64_t i = 0; i < padded_bytes(gradient); ++i) {
        expected_
            [i / gradient.chunk_bytes * row_bytes_ + gradient.offset +
             i % gradient.chunk_bytes] = i < size ? gradient.values[i] : 0;
      }
    }
  }

  const std::vector<Gradient>& gradients() const {
    return gradients_;
  }
  int64_t padded_bytes(const Gradient& gradient) const {
    return gradient.chunk_bytes * world_size_;
  }
  RowPlace place(const Gradient& gradient) {
    return {
        reinterpret_cast<char*>(bytes_.data()) + gradient.offset,
        row_bytes_,
        gradient.chunk_bytes};
  }
  void expect() const {
    ASSERT_EQ(bytes_, expected_);
  }

 private:
  int64_t world_size_;
  int64_t row_bytes_ = 0;
  std::vector<Gradient> gradients_;
  std::vector<unsigned char> bytes_;
  std::vector<unsigned char> expected_;
};

// Hands [begin, end) of a gradient over as the op does.
void add(
    RowScatter& scatter,
    const Gradient& gradient,
    int64_t begin,
    int64_t end,
    const RowPlace& place) {
  const auto size = static_cast<int64_t>(gradient.values.size());
  while (begin < end) {
    ASSERT_GT(scatter.room_bytes(), 0);
    const int64_t values = std::clamp<int64_t>(
        size - begin, 0, std::min(end - begin, scatter.room_bytes()));
    if (values > 0) {
      std::memcpy(scatter.room(), gradient.values.data() + begin, values);
    }
    const int64_t part_end = begin + values < size ? begin + values : end;
    scatter.add(begin, begin + values, part_end, place);
    begin = part_end;
  }
}

void check(
    const std::vector<int64_t>& sizes,
    int64_t world_size,
    int64_t gap,
    bool in_parts) {
  auto random = generator();
  Rows rows(random, sizes, world_size, gap);
  RowScatter scatter;
  for (const Gradient& gradient : rows.gradients()) {
    const int64_t end = rows.padded_bytes(gradient);
    int64_t begin = 0;
    while (begin < end) {
      // Parts begin and end anywhere, also in the padding, and other parts may
      // be written between them.
      const int64_t part_end =
          in_parts
              ? std::min(
                    end, begin + 2 + 2 * static_cast<int64_t>(random() % 40))
              : end;
      add(scatter, gradient, begin, part_end, rows.place(gradient));
      if (in_parts && random() % 16 == 0) {
        scatter.flush();
      }
      begin = part_end;
    }
  }
  scatter.flush();
  rows.expect();
}

TEST(CpuRows, EveryChunkSize) {
  for (int64_t chunk = 2; chunk <= 150; chunk += 2) {
    for (const int64_t world_size : {1, 2, 7, 8, 65}) {
      for (const int64_t missing : {int64_t{0}, int64_t{2}, chunk - 2, chunk}) {
        const int64_t size = chunk * world_size - missing;
        if (size > 0) {
          check({size, 6, size}, world_size, 2, false);
          check({size}, world_size, 0, true);
          ASSERT_FALSE(HasFatalFailure())
              << chunk << " bytes, " << world_size << " ranks";
        }
      }
    }
  }
}

TEST(CpuRows, RaggedListsInParts) {
  auto random = generator();
  for (int round = 0; round < 60; ++round) {
    std::vector<int64_t> sizes(random() % 30 + 1);
    for (int64_t& size : sizes) {
      size = 2 + 2 * static_cast<int64_t>(random() % 900);
    }
    const auto world_size = static_cast<int64_t>(random() % 300 + 1);
    check(sizes, world_size, round % 3 * 2, round % 2 == 0);
    ASSERT_FALSE(HasFatalFailure()) << "round " << round;
  }
}

TEST(CpuRows, MoreThanTheBufferHolds) {
  for (const int64_t world_size : {1, 3, 64, 1000}) {
    check({200'000, 2, 131'072, 131'070, 40'002}, world_size, 2, false);
    check(std::vector<int64_t>(400, 4224), world_size, 0, false);
    ASSERT_FALSE(HasFatalFailure()) << world_size << " ranks";
  }
}

TEST(CpuRows, MorePartsThanItKeeps) {
  check(std::vector<int64_t>(2500, 2), 9, 0, false);
  check(std::vector<int64_t>(1100, 6), 2, 4, true);
}

TEST(CpuRows, NothingToWrite) {
  RowScatter scatter;
  scatter.flush();
  zero_rows(6, 6, {nullptr, 10, 2});
}

TEST(CpuRows, ZeroesPaddingOnly) {
  for (const int64_t chunk : {2, 64, 66, 5000}) {
    std::vector<unsigned char> bytes(4 * (chunk + 2), kUntouched);
    const RowPlace place{
        reinterpret_cast<char*>(bytes.data()), chunk + 2, chunk};
    const int64_t begin = chunk + chunk / 4 * 2;
    zero_rows(begin, 4 * chunk, place);
    for (int64_t row = 0; row < 4; ++row) {
      for (int64_t k = 0; k < chunk + 2; ++k) {
        const bool zeroed = k < chunk && row * chunk + k >= begin;
        ASSERT_EQ(bytes[row * (chunk + 2) + k], zeroed ? 0 : kUntouched);
      }
    }
  }
}

} // namespace
} // namespace z3ext::cpu
