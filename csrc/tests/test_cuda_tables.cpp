// csrc/cuda/tables.h: lists of tensors cut into launches, entries and chunks.
#include <algorithm>

#include "../cuda/tables.h"
#include "support.h"

namespace z3ext::cuda {
namespace {

using namespace testing_support;

const void* pointer(uintptr_t address) {
  return reinterpret_cast<const void*>(address);
}
void* mutable_pointer(uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

// Walks an entry's chunks: they follow one another without gap or overlap from
// 0 to numel, each later one begins at its body, and no chunk is empty.
void check_chunks(int64_t numel, int64_t head) {
  const int64_t chunks = chunk_count(numel, head);
  ASSERT_GE(chunks, 1);
  int64_t end = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const ChunkRange range = chunk_range(chunk, numel, head);
    ASSERT_EQ(range.begin, end);
    ASSERT_LT(range.begin, range.end);
    ASSERT_LE(range.begin, range.body);
    ASSERT_LE(range.body, range.end);
    ASSERT_LE(range.end - range.body, kChunkNumel);
    if (chunk > 0) {
      ASSERT_EQ(range.begin, range.body);
    }
    ASSERT_EQ(range.body, std::min(numel, head + chunk * kChunkNumel));
    end = range.end;
  }
  ASSERT_EQ(end, numel);
}

TEST(CudaChunks, CoverEveryElementOnce) {
  for (int64_t head = 0; head < 16; ++head) {
    for (int64_t numel = 1; numel < 40; ++numel) {
      check_chunks(numel, head);
    }
    for (const int64_t base : {kChunkNumel, 2 * kChunkNumel, 5 * kChunkNumel}) {
      for (int64_t numel = base - 20; numel < base + 20; ++numel) {
        check_chunks(numel, head);
      }
    }
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(CudaChunks, BeyondInt32) {
  for (const int64_t numel :
       {(int64_t{1} << 31) - 1, int64_t{1} << 31, (int64_t{1} << 32) + 12345}) {
    check_chunks(numel, 3);
    ASSERT_FALSE(HasFatalFailure());
  }
}

// --- heads -------------------------------------------------------------------

TEST(CudaEntries, ReadHeadEndsOnTheFirstBoundary) {
  for (const DType dtype : kReadable) {
    const int bytes = dtype_bytes(dtype);
    for (uintptr_t address = 4096; address < 4096 + 64; address += bytes) {
      const ReadEntry entry = make_read_entry(pointer(address), dtype, 1000, 7);
      EXPECT_EQ((address + entry.head * bytes) % kVectorBytes, 0u);
      EXPECT_LT(entry.head, kVectorBytes / bytes);
      EXPECT_EQ(entry.source, pointer(address));
      EXPECT_EQ(entry.numel, 1000);
      EXPECT_EQ(entry.segment, 7);
    }
  }
}

TEST(CudaEntries, TransformHeadAlignsTheDestinationAndTheSourceWherePossible) {
  for (const DType src : kStored) {
    for (const DType dst : kStored) {
      const int src_bytes = dtype_bytes(src);
      const int dst_bytes = dtype_bytes(dst);
      const int group = group_numel(src_bytes, dst_bytes);
      for (int s = 0; s < 16; ++s) {
        for (int d = 0; d < 16; ++d) {
          const uintptr_t source = 4096 + s * src_bytes;
          const uintptr_t destination = 8192 + d * dst_bytes;
          const TransformEntry entry = make_transform_entry(
              pointer(source), src, mutable_pointer(destination), dst, 500);
          bool possible = false;
          for (int i = 0; i < group; ++i) {
            possible |= (source + i * src_bytes) % kVectorBytes == 0 &&
                        (destination + i * dst_bytes) % kVectorBytes == 0;
          }
          EXPECT_EQ(entry.source_aligned, possible);
          EXPECT_LT(entry.head, group);
          EXPECT_EQ((destination + entry.head * dst_bytes) % kVectorBytes, 0u);
          if (possible) {
            EXPECT_EQ((source + entry.head * src_bytes) % kVectorBytes, 0u);
          }
          EXPECT_EQ(entry.source_dtype, src);
          EXPECT_EQ(entry.numel, 500);
        }
      }
    }
  }
}

TEST(CudaEntries, ZeroEntriesHaveNoSource) {
  for (const DType dtype : kStored) {
    const int bytes = dtype_bytes(dtype);
    for (uintptr_t address = 4096; address < 4096 + 16; address += bytes) {
      const TransformEntry entry =
          make_zero_entry(mutable_pointer(address), dtype, 9);
      EXPECT_EQ(entry.source, nullptr);
      EXPECT_EQ((address + entry.head * bytes) % kVectorBytes, 0u);
    }
  }
}

// --- tables ------------------------------------------------------------------

// Every chunk of every launch belongs to the entry that find_entry names, the
// entries come in order, and none with elements is missing.
void check_tables(const std::vector<ReadEntry>& entries) {
  const auto tables = plan_tables(entries);
  std::vector<int64_t> segments;
  int64_t preceding = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    const Table<ReadEntry>& table = tables[t];
    ASSERT_GT(table.chunk_count, 0);
    ASSERT_GT(table.entry_count, 0);
    ASSERT_LE(table.entry_count, kTableCapacity);
    if (t + 1 < tables.size()) {
      ASSERT_EQ(table.entry_count, kTableCapacity);
    }
    ASSERT_EQ(table.preceding_chunks, preceding);
    int64_t chunk = 0;
    for (int i = 0; i < table.entry_count; ++i) {
      const ReadEntry& entry = table.entries[i];
      ASSERT_EQ(entry.first_chunk, chunk);
      const int64_t last = chunk + chunk_count(entry.numel, entry.head) - 1;
      for (const int64_t at : {chunk, (chunk + last) / 2, last}) {
        ASSERT_EQ(find_entry(table, at), i);
      }
      chunk = last + 1;
      segments.push_back(entry.segment);
    }
    ASSERT_EQ(table.chunk_count, chunk);
    preceding += chunk;
  }
  std::vector<int64_t> expected;
  for (const ReadEntry& entry : entries) {
    if (entry.numel > 0) {
      expected.push_back(entry.segment);
    }
  }
  ASSERT_EQ(segments, expected);
}

TEST(CudaTables, EveryEntryInOrderWithoutTheEmptyOnes) {
  auto random = generator();
  for (const int count : {0, 1, 2, 95, 96, 97, 191, 192, 193, 1000}) {
    for (int trial = 0; trial < 5; ++trial) {
      std::vector<ReadEntry> entries;
      for (int i = 0; i < count; ++i) {
        const auto numel = static_cast<int64_t>(
            random() % 3 == 0 ? 0 : random() % (4 * kChunkNumel));
        entries.push_back(make_read_entry(
            pointer(4096 + 2 * (random() % 64)), DType::kHalf, numel, i));
      }
      check_tables(entries);
      ASSERT_FALSE(HasFatalFailure());
    }
  }
}

TEST(CudaTables, NoLaunchWithoutWork) {
  EXPECT_TRUE(plan_tables(std::vector<ReadEntry>{}).empty());
  const std::vector<ReadEntry> empty(
      300, make_read_entry(pointer(4096), DType::kFloat, 0, 0));
  EXPECT_TRUE(plan_tables(empty).empty());
}

TEST(CudaTables, ExactlyFull) {
  const std::vector<ReadEntry> entries(
      2 * kTableCapacity, make_read_entry(pointer(4096), DType::kFloat, 1, 0));
  const auto tables = plan_tables(entries);
  ASSERT_EQ(tables.size(), 2u);
  EXPECT_EQ(tables[1].preceding_chunks, kTableCapacity);
}

TEST(CudaTables, BeyondInt32) {
  std::vector<ReadEntry> entries;
  for (int i = 0; i < 200; ++i) {
    entries.push_back(make_read_entry(
        pointer(4098), DType::kHalf, (int64_t{1} << 45) + i, i));
  }
  check_tables(entries); // chunk numbers exceed int32 too
}

} // namespace
} // namespace z3ext::cuda
