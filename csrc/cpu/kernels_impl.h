// The bodies of the CPU kernels, written once over a vector type `Vec` of
// floats. Each kernels_<isa>.cpp defines `Vec` for its instruction set and
// includes this file inside a namespace of its own, so that the linker can
// never merge code of one instruction set into another.
//
// No include guard on purpose, and no include: the including file brings in
// what is needed before it switches the compiler's target.

// --- dispatch from DType to the storage type
// ----------------------------------

template <typename Body>
inline auto with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kHalf:
      return body(Half{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      return body(float{});
  }
}

// --- non-finite test
// ------------------------------------------------------------

// Early exit is looked for once a block: rarely enough to cost nothing, often
// enough that a bad value early in a large buffer ends the read.
constexpr int64_t kBlockBytes = 32 * 1024;

template <typename T>
bool any_nonfinite_of(const T* src, int64_t numel) {
  constexpr int64_t block = kBlockBytes / static_cast<int64_t>(sizeof(T));
  int64_t i = 0;
  // Scalar head up to a vector's alignment.
  while (i < numel &&
         reinterpret_cast<uintptr_t>(src + i) % Vec::kByteAlignment != 0) {
    if (is_nonfinite(src[i++])) {
      return true;
    }
  }
  while (numel - i >= block) {
    if (Vec::block_nonfinite(src + i, block)) {
      return true;
    }
    i += block;
  }
  const int64_t whole = (numel - i) / Vec::kBlockStep<T> * Vec::kBlockStep<T>;
  if (whole > 0 && Vec::block_nonfinite(src + i, whole)) {
    return true;
  }
  i += whole;
  bool bad = false;
  for (; i < numel; ++i) {
    bad |= is_nonfinite(src[i]);
  }
  return bad;
}

bool any_nonfinite(const void* src, DType dtype, int64_t numel) {
  if (dtype == DType::kDouble) {
    return any_nonfinite_of(static_cast<const double*>(src), numel);
  }
  return with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    return any_nonfinite_of(static_cast<const T*>(src), numel);
  });
}

// --- pack
// -------------------------------------------------------------------------

// Vec::round<T>(v) is v rounded to T, kept as floats; storing it is then exact.
template <typename Src, typename Dst>
bool pack_of(
    const Src* src, Dst* dst, int64_t numel, const FactorChain& divisors) {
  auto bad = Vec::no_bad();
  int64_t i = 0;
  for (; i + Vec::kWidth <= numel; i += Vec::kWidth) {
    auto value = Vec::template round<Dst>(Vec::load(src + i));
    for (int k = 0; k < divisors.count; ++k) {
      value = Vec::template round<Dst>(Vec::div(value, divisors.factors[k]));
    }
    bad = Vec::collect_bad(bad, value);
    Vec::store(dst + i, value);
  }
  bool flag = Vec::any_bad(bad);
  for (; i < numel; ++i) {
    dst[i] = store_with_factors<DivideRule, Dst>(to_float(src[i]), divisors);
    flag |= is_nonfinite(dst[i]);
  }
  return flag;
}

bool pack(
    const void* src,
    DType src_dtype,
    void* dst,
    DType dst_dtype,
    int64_t numel,
    const FactorChain& divisors) {
  return with_dtype(src_dtype, [&](auto src_tag) {
    return with_dtype(dst_dtype, [&](auto dst_tag) {
      return pack_of(
          static_cast<const decltype(src_tag)*>(src),
          static_cast<decltype(dst_tag)*>(dst),
          numel,
          divisors);
    });
  });
}

// --- unpack
// ------------------------------------------------------------------------

template <bool Accumulate, typename Src, typename Dst>
void unpack_of(
    const Src* src, Dst* dst, int64_t numel, const FactorChain& multipliers) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= numel; i += Vec::kWidth) {
    auto value = Vec::load(src + i);
    for (int k = 0; k < multipliers.count; ++k) {
      value = Vec::template round<Src>(Vec::mul(value, multipliers.factors[k]));
    }
    value = Vec::template round<Dst>(value);
    if constexpr (Accumulate) {
      value = Vec::template round<Dst>(Vec::add(Vec::load(dst + i), value));
    }
    Vec::store(dst + i, value);
  }
  for (; i < numel; ++i) {
    const Src scaled =
        store_with_factors<MultiplyRule, Src>(to_float(src[i]), multipliers);
    Dst value = from_float<Dst>(to_float(scaled));
    if constexpr (Accumulate) {
      value = from_float<Dst>(to_float(dst[i]) + to_float(value));
    }
    dst[i] = value;
  }
}

void unpack(
    const void* src,
    DType src_dtype,
    void* dst,
    DType dst_dtype,
    int64_t numel,
    const FactorChain& multipliers,
    bool accumulate) {
  with_dtype(src_dtype, [&](auto src_tag) {
    with_dtype(dst_dtype, [&](auto dst_tag) {
      using Src = decltype(src_tag);
      using Dst = decltype(dst_tag);
      const auto body =
          accumulate ? &unpack_of<true, Src, Dst> : &unpack_of<false, Src, Dst>;
      body(
          static_cast<const Src*>(src),
          static_cast<Dst*>(dst),
          numel,
          multipliers);
    });
  });
}

// --- sum of squares
// ------------------------------------------------------------------

inline double to_double(double value) {
  return value;
}
template <typename T>
inline double to_double(T value) {
  return static_cast<double>(to_float(value));
}

// The order of the additions is the op's contract, so nothing here may be
// reassociated. The products are exact in float64 for fp16, bf16 and fp32, so
// contraction to a fused multiply-add changes no bit of those.
template <int Lanes, typename T>
double sum_squares_of(const T* src, int64_t numel) {
  double lanes[Lanes] = {};
  const int64_t whole = numel / Lanes * Lanes;
  if constexpr (Lanes == 4 && sizeof(T) <= sizeof(float)) {
    Vec::sum_squares_4(src, whole, lanes);
  } else {
    for (int64_t i = 0; i < whole; i += Lanes) {
      for (int lane = 0; lane < Lanes; ++lane) {
        const double value = to_double(src[i + lane]);
        lanes[lane] += value * value;
      }
    }
  }
  double total = lanes[0];
  for (int lane = 1; lane < Lanes; ++lane) {
    total += lanes[lane];
  }
  for (int64_t i = whole; i < numel; ++i) {
    const double value = to_double(src[i]);
    total += value * value;
  }
  return total;
}

template <typename T>
double sum_squares_lanes(const T* src, int64_t numel, int lanes) {
  switch (lanes) {
    case 1:
      return sum_squares_of<1>(src, numel);
    case 2:
      return sum_squares_of<2>(src, numel);
    case 4:
      return sum_squares_of<4>(src, numel);
    default:
      return sum_squares_of<8>(src, numel);
  }
}

double sum_squares(const void* src, DType dtype, int64_t numel, int lanes) {
  if (dtype == DType::kDouble) {
    return sum_squares_lanes(static_cast<const double*>(src), numel, lanes);
  }
  return with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    return sum_squares_lanes(static_cast<const T*>(src), numel, lanes);
  });
}

// --- unscale
// -------------------------------------------------------------------------

template <typename T>
void unscale_of(const T* src, float* dst, int64_t numel, float scale) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= numel; i += Vec::kWidth) {
    Vec::store(dst + i, Vec::mul(Vec::load(src + i), scale));
  }
  for (; i < numel; ++i) {
    dst[i] = to_float(src[i]) * scale;
  }
}

void unscale(
    const void* src, DType src_dtype, float* dst, int64_t numel, float scale) {
  with_dtype(src_dtype, [&](auto tag) {
    using T = decltype(tag);
    unscale_of(static_cast<const T*>(src), dst, numel, scale);
  });
}

constexpr Kernels kTable = {
    Vec::kName, any_nonfinite, pack, unpack, sum_squares, unscale};
