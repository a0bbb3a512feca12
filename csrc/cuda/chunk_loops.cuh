// The loops over a chunk: read every element, move every element from a source
// to a destination, or zero every element. What happens to an element is the
// caller's functor.
#pragma once

#include "device_types.cuh"

namespace z3ext::cuda {

// Groups whose loads one thread issues before it uses the first.
Z3EXT_HOST_DEVICE constexpr int groups_in_flight(int group_bytes) {
  return group_bytes < kBytesInFlight ? kBytesInFlight / group_bytes : 1;
}

// The elements of a chunk that are in no whole group, at most one group before
// the body and one after: spread over the threads, element(index) for each.
template <int kGroup, typename Element>
__device__ __forceinline__ void for_each_scalar(
    const ChunkRange& range, const Element& element) {
  const int head = static_cast<int>(range.body - range.begin);
  const int tail = static_cast<int>((range.end - range.body) % kGroup);
  for (int i = static_cast<int>(threadIdx.x); i < head + tail;
       i += static_cast<int>(blockDim.x)) {
    element(i < head ? range.begin + i : range.end - tail + (i - head));
  }
}

// visit(value) for every element of the chunk.
template <typename T, typename Visit>
__device__ __forceinline__ void read_chunk(
    const T* source, const ChunkRange& range, Visit& visit) {
  constexpr int kGroup = Vector<T>::kNumel;
  constexpr int kInFlight = groups_in_flight(kVectorBytes);
  const int threads = static_cast<int>(blockDim.x);
  const int groups = static_cast<int>((range.end - range.body) / kGroup);
  const T* body = source + range.body;

  for (int first = static_cast<int>(threadIdx.x); first < groups;
       first += kInFlight * threads) {
    T values[kInFlight][kGroup];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int group = first + u * threads;
      if (group < groups) {
        load_vectors(body + group * kGroup, values[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (first + u * threads < groups) {
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          visit(values[u][k]);
        }
      }
    }
  }

  for_each_scalar<kGroup>(range, [&](int64_t i) { visit(source[i]); });
}

// Changes whole groups; transform_chunk says how. A source that is not aligned
// needs one register per element on its way, so that only one group at a time
// is under way there.
template <
    bool kSourceAligned,
    typename SourceT,
    typename DestinationT,
    typename Change>
__device__ __forceinline__ void transform_groups(
    const SourceT* source,
    DestinationT* destination,
    int groups,
    Change& change) {
  constexpr int kSourceBytes = static_cast<int>(sizeof(SourceT));
  constexpr int kDestinationBytes = static_cast<int>(sizeof(DestinationT));
  constexpr int kGroup = group_numel(kSourceBytes, kDestinationBytes);
  constexpr int kInFlight =
      kSourceAligned
          ? groups_in_flight(
                kGroup * (kSourceBytes < kDestinationBytes ? kDestinationBytes
                                                           : kSourceBytes))
          : 1;
  const int threads = static_cast<int>(blockDim.x);
  const bool reads_destination = change.reads_destination();

  for (int first = static_cast<int>(threadIdx.x); first < groups;
       first += kInFlight * threads) {
    SourceT values[kInFlight][kGroup];
    DestinationT results[kInFlight][kGroup] = {};
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int group = first + u * threads;
      if (group < groups) {
        if constexpr (kSourceAligned) {
          load_vectors(source + group * kGroup, values[u]);
        } else {
          load_scalars(source + group * kGroup, values[u]);
        }
        if (reads_destination) {
          load_vectors(destination + group * kGroup, results[u]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int group = first + u * threads;
      if (group < groups) {
        change(values[u], results[u]);
        store_vectors(destination + group * kGroup, results[u]);
      }
    }
  }
}

// Moves every element of a chunk. change(values, results) is called for some
// elements at a time, with their source values; it overwrites `results`, which
// hold the destination's present values where change.reads_destination() says
// so and zeros elsewhere. An element's thread reads it before it writes, so
// that source and destination may be one and the same.
template <typename SourceT, typename DestinationT, typename Change>
__device__ __forceinline__ void transform_chunk(
    const TransformEntry& entry, int64_t chunk, Change& change) {
  constexpr int kGroup = group_numel(sizeof(SourceT), sizeof(DestinationT));
  const auto* source = static_cast<const SourceT*>(entry.source);
  auto* destination = static_cast<DestinationT*>(entry.destination);
  const ChunkRange range = chunk_range(chunk, entry.numel, entry.head);
  const int groups = static_cast<int>((range.end - range.body) / kGroup);

  if (entry.source_aligned) {
    transform_groups<true>(
        source + range.body, destination + range.body, groups, change);
  } else {
    transform_groups<false>(
        source + range.body, destination + range.body, groups, change);
  }

  for_each_scalar<kGroup>(range, [&](int64_t i) {
    const SourceT value[1] = {source[i]};
    DestinationT result[1] = {};
    if (change.reads_destination()) {
      result[0] = destination[i];
    }
    change(value, result);
    destination[i] = result[0];
  });
}

// destination[i] = 0 for every element of the chunk.
template <typename DestinationT>
__device__ __forceinline__ void zero_chunk(
    DestinationT* destination, const ChunkRange& range) {
  constexpr int kGroup = Vector<DestinationT>::kNumel;
  const DestinationT zeros[kGroup] = {};
  const int groups = static_cast<int>((range.end - range.body) / kGroup);
  for (int group = static_cast<int>(threadIdx.x); group < groups;
       group += static_cast<int>(blockDim.x)) {
    store_vectors(destination + range.body + group * kGroup, zeros);
  }
  for_each_scalar<kGroup>(
      range, [&](int64_t i) { destination[i] = DestinationT{}; });
}

} // namespace z3ext::cuda
