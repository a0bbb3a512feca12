// Moves packed gradients to the rows of a rank-major bucket. All positions and
// sizes here are bytes. No torch, so that the C++ tests build it alone.
//
// A gradient over many ranks has chunks of a few bytes, each in a row of its
// own. Written gradient by gradient, every chunk would be a cache line and
// often a page that was last touched one gradient ago, with thousands of others
// in between. So converted gradients wait in a buffer that stays in the second
// cache, and go to a few rows at a time.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace z3ext::cpu {

// Where a gradient's chunks stand: row r's begins at base + r * row_bytes. The
// gradient's byte b belongs to row b / chunk_bytes.
struct RowPlace {
  char* base;
  int64_t row_bytes;
  int64_t chunk_bytes;
};

namespace detail {

// `count` chunks, one after the other at `from`, to one row each. A `step` of 0
// writes the same chunk to every row.
struct ChunkCopy {
  const char* from;
  int64_t step;
  char* to;
  int64_t row_bytes;
  int64_t count;
};

// A size that the compiler knows is copied in a few moves instead of a call.
template <int kBytes>
void copy_chunks(ChunkCopy copy) {
  for (; copy.count > 0; --copy.count) {
    std::memcpy(copy.to, copy.from, kBytes);
    copy.from += copy.step;
    copy.to += copy.row_bytes;
  }
}

constexpr int64_t kMostFixedBytes = 64;

using CopyChunks = void (*)(ChunkCopy);

// copy_chunks of 2, 4, 6, ... bytes: no dtype has an odd number.
template <int... kHalf>
constexpr std::array<CopyChunks, sizeof...(kHalf)> fixed_copies(
    std::integer_sequence<int, kHalf...>) {
  return {copy_chunks<2 * (kHalf + 1)>...};
}

inline constexpr auto kFixedCopies =
    fixed_copies(std::make_integer_sequence<int, kMostFixedBytes / 2>{});

struct CopyFrom {
  const char* from;

  void piece(char* to, int64_t bytes) {
    std::memcpy(to, from, bytes);
    from += bytes;
  }
  void chunks(char* to, int64_t count, const RowPlace& place) {
    const int64_t bytes = place.chunk_bytes;
    if (bytes <= kMostFixedBytes) {
      kFixedCopies[bytes / 2 - 1]({from, bytes, to, place.row_bytes, count});
      from += count * bytes;
      return;
    }
    for (; count > 0; --count) {
      piece(to, bytes);
      to += place.row_bytes;
    }
  }
};

struct Zeros {
  void piece(char* to, int64_t bytes) {
    std::memset(to, 0, bytes);
  }
  void chunks(char* to, int64_t count, const RowPlace& place) {
    static constexpr char kZeros[kMostFixedBytes] = {};
    const int64_t bytes = place.chunk_bytes;
    if (bytes <= kMostFixedBytes) {
      kFixedCopies[bytes / 2 - 1]({kZeros, 0, to, place.row_bytes, count});
      return;
    }
    for (; count > 0; --count) {
      piece(to, bytes);
      to += place.row_bytes;
    }
  }
};

// Writes bytes [begin, end) of a gradient: what is left of a chunk, whole
// chunks, the beginning of a chunk.
template <typename Source>
void write_rows(
    int64_t begin, int64_t end, const RowPlace& place, Source& source) {
  const int64_t chunk = place.chunk_bytes;
  int64_t row = begin / chunk;
  const int64_t within = begin - row * chunk;
  char* to = place.base + row * place.row_bytes;
  if (within > 0) {
    const int64_t bytes = std::min(end - begin, chunk - within);
    source.piece(to + within, bytes);
    begin += bytes;
    to += place.row_bytes;
  }
  const int64_t count = (end - begin) / chunk;
  source.chunks(to, count, place);
  begin += count * chunk;
  if (end > begin) {
    source.piece(to + count * place.row_bytes, end - begin);
  }
}

} // namespace detail

// Zeroes bytes [begin, end) of a gradient: its padding.
inline void zero_rows(int64_t begin, int64_t end, const RowPlace& place) {
  detail::Zeros zeros;
  if (begin < end) {
    detail::write_rows(begin, end, place, zeros);
  }
}

// Collects packed parts of gradients, and writes them to their rows.
class RowScatter {
 public:
  RowScatter()
      : buffer_(
            static_cast<char*>(
                ::operator new(kBufferBytes, std::align_val_t{kAlignment}))) {
    parts_.reserve(kMostParts);
  }

  // Where the next part's values go, and how many bytes of them there is room
  // for: more than 0.
  char* room() {
    return buffer_.get() + used_;
  }
  int64_t room_bytes() const {
    return kBufferBytes - used_;
  }

  // Takes bytes [begin, end) of a gradient. Those before value_end have been
  // stored at room(); those after are padding.
  void add(
      int64_t begin, int64_t value_end, int64_t end, const RowPlace& place) {
    const int64_t bytes = value_end - begin;
    parts_.push_back({place, room(), begin, value_end, end});
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (used_ >= kBufferBytes || parts_.size() == kMostParts) {
      flush();
    }
  }

  void flush() {
    if (parts_.empty()) {
      return;
    }
    int64_t row = INT64_MAX;
    int64_t end = 0;
    for (const Part& part : parts_) {
      row = std::min(row, part.at / part.place.chunk_bytes);
      end = std::max(end, (part.end - 1) / part.place.chunk_bytes + 1);
    }
    const int64_t tile_rows = find_spans();
    for (fetch(row, std::min(row + tile_rows, end)); row < end;
         row += tile_rows) {
      fetch(row + tile_rows, std::min(row + 2 * tile_rows, end));
      for (Part& part : parts_) {
        write_tile(part, row + tile_rows);
      }
    }
    parts_.clear();
    used_ = 0;
  }

 private:
  static constexpr int64_t kAlignment = 64;

  // In the second cache with room for what is written.
  static constexpr int64_t kBufferBytes = 128 * 1024;

  static constexpr size_t kMostParts = 1024;

  // Rows are written a tile at a time: the lines that are being filled stay in
  // the first cache, and their pages in the TLB.
  static constexpr int64_t kTileBytes = 32 * 1024;
  static constexpr int64_t kFewestTileRows = 8;
  static constexpr int64_t kMostTileRows = 128;
  static constexpr int64_t kLineBytes = 64;

  struct Part {
    RowPlace place;
    const char* from;
    int64_t at; // the first byte that is still to be written
    int64_t value_end;
    int64_t end;
  };

  // What the parts cover of row 0, and of every other row at the same distance.
  struct Span {
    char* begin;
    char* end;
  };

  struct Delete {
    void operator()(char* pointer) const {
      ::operator delete(pointer, std::align_val_t{kAlignment});
    }
  };

  // Neighbours become one span. Returns the rows of a tile.
  int64_t find_spans() {
    spans_.clear();
    int64_t bytes = 0;
    for (const Part& part : parts_) {
      char* begin = part.place.base;
      char* end = begin + part.place.chunk_bytes;
      bytes += part.place.chunk_bytes;
      if (!spans_.empty() && spans_.back().end == begin) {
        spans_.back().end = end;
      } else {
        spans_.push_back({begin, end});
      }
    }
    return std::clamp(kTileBytes / bytes, kFewestTileRows, kMostTileRows);
  }

  // Asks for the lines of rows [row, end): the hardware foresees long runs, but
  // not a jump to the next row.
  void fetch(int64_t row, int64_t end) const {
    const int64_t row_bytes = parts_.front().place.row_bytes;
    for (; row < end; ++row) {
      for (const Span& span : spans_) {
        const char* to = span.begin + row * row_bytes;
        const char* last = span.end - 1 + row * row_bytes;
        const int64_t bytes =
            std::min<int64_t>(last - to, kTileBytes / kFewestTileRows);
        for (int64_t at = 0; at < bytes; at += kLineBytes) {
          __builtin_prefetch(to + at, /*rw=*/1);
        }
        __builtin_prefetch(to + bytes, /*rw=*/1);
      }
    }
  }

  // Writes what a part has in the rows before row_end.
  static void write_tile(Part& part, int64_t row_end) {
    const int64_t end = std::min(part.end, row_end * part.place.chunk_bytes);
    const int64_t value_end = std::min(end, part.value_end);
    if (part.at < value_end) {
      detail::CopyFrom source{part.from};
      detail::write_rows(part.at, value_end, part.place, source);
      part.from = source.from;
      part.at = value_end;
    }
    if (part.at < end) {
      zero_rows(part.at, end, part.place);
      part.at = end;
    }
  }

  std::unique_ptr<char, Delete> buffer_;
  std::vector<Part> parts_;
  std::vector<Span> spans_;
  int64_t used_ = 0;
};

} // namespace z3ext::cpu
