// Splits lists of tensors into kernel launches. Host code without torch and
// without CUDA; the geometry below is also what the kernels follow.
//
// An entry is one contiguous run of elements, cut into chunks. A thread block
// works on one chunk at a time, and a chunk never crosses an entry:
//
//   | head |      chunk 0      |      chunk 1      |  chunk 2  | tail |
//          ^ 16-byte aligned
//
// Chunk 0 also holds the head, the few elements before the first 16-byte
// boundary; every later chunk begins on a boundary. The tail, what the last
// chunk has left after its last whole group, is shorter than one group.
#pragma once

#include <cstdint>
#include <vector>

#include "../numeric.h"

namespace z3ext::cuda {

// Width of the widest load and store of one thread.
constexpr int kVectorBytes = 16;

// Elements per chunk, head aside. A multiple of every group size; large enough
// that the bookkeeping of a chunk is small beside its loads, small enough that
// a 32 MiB pending list still gives every multiprocessor several chunks.
constexpr int64_t kChunkNumel = 8192;

// Entries per launch, at most. A table travels in the kernel's arguments, which
// every driver takes up to 4 KB.
constexpr int kTableCapacity = 96;
constexpr int kEntriesBytes = kTableCapacity * 40;

Z3EXT_HOST_DEVICE constexpr int dtype_bytes(DType dtype) {
  return dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2;
}

// Elements that one thread moves as a group: the narrower side fills one
// vector, the wider side two.
Z3EXT_HOST_DEVICE constexpr int group_numel(
    int source_bytes, int destination_bytes) {
  return kVectorBytes /
         (source_bytes < destination_bytes ? source_bytes : destination_bytes);
}

// --- entries -----------------------------------------------------------------

// A run that is read only.
struct ReadEntry {
  const void* source;
  int64_t numel;
  int64_t first_chunk; // within its launch; set by plan_tables
  int64_t segment;
  uint8_t head;
};

// A run that is read, changed element by element and written elsewhere.
struct TransformEntry {
  const void* source; // null: the destination is filled with zeros
  void* destination;
  int64_t numel;
  int64_t first_chunk; // within its launch; set by plan_tables
  DType source_dtype;
  uint8_t head;
  bool source_aligned; // the source is on a boundary where the destination is
};

namespace detail {

inline bool is_aligned(uintptr_t address) {
  return address % kVectorBytes == 0;
}

} // namespace detail

inline ReadEntry make_read_entry(
    const void* source, DType dtype, int64_t numel, int64_t segment) {
  const int bytes = dtype_bytes(dtype);
  const auto address = reinterpret_cast<uintptr_t>(source);
  int head = 0;
  while (head + 1 < kVectorBytes / bytes &&
         !detail::is_aligned(address + head * bytes)) {
    ++head;
  }
  return {source, numel, 0, segment, static_cast<uint8_t>(head)};
}

// The head ends where source and destination are both on a boundary, or, where
// no such element exists, on the destination's first boundary: stores are kept
// whole and the source is then read element by element.
inline TransformEntry make_transform_entry(
    const void* source,
    DType source_dtype,
    void* destination,
    DType destination_dtype,
    int64_t numel) {
  const int source_bytes = dtype_bytes(source_dtype);
  const int destination_bytes = dtype_bytes(destination_dtype);
  const int group = group_numel(source_bytes, destination_bytes);
  const auto source_address = reinterpret_cast<uintptr_t>(source);
  const auto destination_address = reinterpret_cast<uintptr_t>(destination);
  int head = 0;
  bool destination_found = false;
  bool both_found = false;
  for (int i = 0; i < group && !both_found; ++i) {
    if (detail::is_aligned(destination_address + i * destination_bytes)) {
      both_found = detail::is_aligned(source_address + i * source_bytes);
      if (both_found || !destination_found) {
        head = i;
      }
      destination_found = true;
    }
  }
  return {
      source,
      destination,
      numel,
      0,
      source_dtype,
      static_cast<uint8_t>(head),
      both_found};
}

inline TransformEntry make_zero_entry(
    void* destination, DType destination_dtype, int64_t numel) {
  return make_transform_entry(
      nullptr, destination_dtype, destination, destination_dtype, numel);
}

// --- chunks ------------------------------------------------------------------

// Elements [begin, end) of an entry: scalars up to body, then whole groups,
// then scalars.
struct ChunkRange {
  int64_t begin;
  int64_t body;
  int64_t end;
};

// Chunks of an entry of at least one element.
Z3EXT_HOST_DEVICE int64_t chunk_count(int64_t numel, int64_t head) {
  return numel <= head ? 1 : (numel - head - 1) / kChunkNumel + 1;
}

Z3EXT_HOST_DEVICE ChunkRange
chunk_range(int64_t chunk, int64_t numel, int64_t head) {
  const int64_t body = head + chunk * kChunkNumel;
  const int64_t next = body + kChunkNumel;
  ChunkRange range;
  range.begin = chunk == 0 ? 0 : body;
  range.body = body < numel ? body : numel;
  range.end = next < numel ? next : numel;
  return range;
}

// --- tables ------------------------------------------------------------------

// The entries of one launch, passed to the kernel by value.
template <typename EntryT>
struct Table {
  static constexpr int kCapacity =
      sizeof(EntryT) * kTableCapacity <= kEntriesBytes
          ? kTableCapacity
          : kEntriesBytes / static_cast<int>(sizeof(EntryT));
  int64_t chunk_count = 0;
  int64_t preceding_chunks = 0; // in the launches before this one
  int32_t entry_count = 0;
  EntryT entries[kCapacity] = {};
};

// The rest of the 4 KB is for a kernel's other arguments.
static_assert(sizeof(Table<ReadEntry>) <= 4000);
static_assert(sizeof(Table<TransformEntry>) <= 4000);

// Index of the entry that holds a chunk of the launch: the last one that begins
// at it or before.
template <typename EntryT>
Z3EXT_HOST_DEVICE int find_entry(const Table<EntryT>& table, int64_t chunk) {
  int low = 0;
  int high = table.entry_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.entries[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Of a list of mixed dtypes: the kernels take one dtype per launch.
template <typename EntryT>
std::vector<EntryT> entries_of_dtype(
    const std::vector<EntryT>& entries, DType source_dtype) {
  std::vector<EntryT> matching;
  for (const EntryT& entry : entries) {
    if (entry.source_dtype == source_dtype) {
      matching.push_back(entry);
    }
  }
  return matching;
}

// One table per launch, none of them without work: empty entries are dropped.
template <typename EntryT>
std::vector<Table<EntryT>> plan_tables(const std::vector<EntryT>& entries) {
  std::vector<Table<EntryT>> tables;
  int64_t chunks = 0;
  for (const EntryT& entry : entries) {
    if (entry.numel == 0) {
      continue;
    }
    if (tables.empty() ||
        tables.back().entry_count == Table<EntryT>::kCapacity) {
      tables.emplace_back();
      tables.back().preceding_chunks = chunks;
    }
    Table<EntryT>& table = tables.back();
    EntryT& planned = table.entries[table.entry_count++];
    planned = entry;
    planned.first_chunk = table.chunk_count;
    const int64_t count = chunk_count(entry.numel, entry.head);
    table.chunk_count += count;
    chunks += count;
  }
  return tables;
}

} // namespace z3ext::cuda
