// Vectors of floats as wide as the processor's registers.
//
// Only the vector extensions that GCC and Clang share, no intrinsics: one source serves AVX-512, AVX2, 64-bit Arm and
// anything else. Arithmetic between lanes happens in a fixed order, so a result depends on the width of the vectors,
// and on nothing else.
#pragma once
#include <cstdint>
#include <utility>

#ifndef FUSED_LANES  // floats in a vector; may be given to try another width
#if defined(__AVX512F__)
#define FUSED_LANES 16
#elif defined(__AVX__)
#define FUSED_LANES 8
#else
#define FUSED_LANES 4
#endif
#endif

// Tiles live in registers only if the loops over them are unrolled, and the loops around them are not.
#define FUSED_INLINE inline __attribute__((always_inline))
#ifdef __clang__
#define FUSED_UNROLL _Pragma("clang loop unroll(full)")
#define FUSED_UNROLL_4 _Pragma("clang loop unroll_count(4)")
#define FUSED_NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define FUSED_UNROLL _Pragma("GCC unroll 32")
#define FUSED_UNROLL_4 _Pragma("GCC unroll 4")
#define FUSED_NO_UNROLL _Pragma("GCC unroll 1")
#endif

namespace fused {

constexpr int LANES = FUSED_LANES;
constexpr int ALIGNMENT = 64;

typedef float Vector __attribute__((vector_size(LANES * 4), may_alias));
typedef float UnalignedVector __attribute__((vector_size(LANES * 4), may_alias, aligned(4)));
typedef int32_t IntVector __attribute__((vector_size(LANES * 4), may_alias));
typedef uint32_t UintVector __attribute__((vector_size(LANES * 4), may_alias));
typedef uint8_t ByteVector __attribute__((vector_size(LANES), may_alias));

FUSED_INLINE Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
FUSED_INLINE Vector load_unaligned(const float* from) { return *reinterpret_cast<const UnalignedVector*>(from); }
FUSED_INLINE void store(float* to, Vector v) { *reinterpret_cast<Vector*>(to) = v; }
FUSED_INLINE Vector splat(float x) { return x - Vector{}; }
FUSED_INLINE Vector select(IntVector mask, Vector a, Vector b) {
  return (Vector)((mask & (IntVector)a) | (~mask & (IntVector)b));
}

// The larger of each pair; where one is NaN, b. So `elementwise_max(bound, x)` keeps a NaN in x.
FUSED_INLINE Vector elementwise_max(Vector a, Vector b) { return a > b ? a : b; }

template <int... I>
FUSED_INLINE UintVector lane_numbers(std::integer_sequence<int, I...>) {
  return UintVector{I...};
}
FUSED_INLINE UintVector lane_numbers() { return lane_numbers(std::make_integer_sequence<int, LANES>{}); }

template <int SHIFT, int... I>
FUSED_INLINE Vector shuffle_xor(Vector v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I ^ SHIFT)...);
}
// Lane i gets lane i ^ SHIFT.
template <int SHIFT>
FUSED_INLINE Vector shuffle_xor(Vector v) {
  return shuffle_xor<SHIFT>(v, std::make_integer_sequence<int, LANES>{});
}

// Sum of all lanes, in every lane.
template <int SHIFT = LANES / 2>
FUSED_INLINE Vector sum_lanes(Vector v) {
  if constexpr (SHIFT > 0) return sum_lanes<SHIFT / 2>(v + shuffle_xor<SHIFT>(v));
  return v;
}

template <int SHIFT, int... I>
FUSED_INLINE void exchange_blocks(Vector& a, Vector& b, std::integer_sequence<int, I...>) {
  const Vector low = __builtin_shufflevector(a, b, ((I & SHIFT) ? LANES + (I ^ SHIFT) : I)...);
  const Vector high = __builtin_shufflevector(a, b, ((I & SHIFT) ? LANES + I : (I ^ SHIFT))...);
  a = low;
  b = high;
}
// Transpose LANES vectors of LANES lanes in place: exchange off-diagonal blocks of 1, 2, 4 ... lanes.
template <int SHIFT = 1>
FUSED_INLINE void transpose_lanes(Vector* rows) {
  if constexpr (SHIFT < LANES) {
    FUSED_UNROLL
    for (int i = 0; i < LANES; i++)
      if (!(i & SHIFT)) exchange_blocks<SHIFT>(rows[i], rows[i + SHIFT], std::make_integer_sequence<int, LANES>{});
    transpose_lanes<SHIFT * 2>(rows);
  }
}

// 2^x for x <= 0, relative error 1.5e-7; below 2^-100 it stays there. NaN gives NaN.
// Adding 1.5 * 2^23 rounds x to an integer (not under -ffast-math, which would remove it); the further 127 makes its
// low bits the exponent of the result. The polynomial is a minimax fit of 2^r on [-0.5, 0.5].
FUSED_INLINE Vector exp2_of_negative(Vector x) {
  x = elementwise_max(splat(-100.0f), x);
  const Vector rounded = x + 12583039.0f;
  const Vector r = x - (rounded - 12583039.0f);
  Vector p = splat(0.00132647184f);
  p = p * r + 0.00967151326f;
  p = p * r + 0.0555073377f;
  p = p * r + 0.240222421f;
  p = p * r + 0.693146978f;
  p = p * r + 1.0f;
  return p * (Vector)((IntVector)rounded << 23);
}

}  // namespace fused
