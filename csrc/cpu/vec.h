// Vectors of floats: `Wide`, as wide as the instruction set that this file is compiled for, and `One`, a single float with
// the same operations and the same rounding. It uses only compiler intrinsics and builtins: this file is compiled for
// several instruction sets, and of an inline function of the standard library the linker keeps one copy for all, which
// could be the one for a newer processor.
#pragma once

#include <stdint.h>

#include "../rules.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

ZL_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}

ZL_INLINE float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

// Round to nearest, ties to even; a NaN stays a NaN.
ZL_INLINE uint16_t to_bf16(float x) {
  uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

ZL_INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

ZL_INLINE uint16_t to_f16(float x) {
#if defined(__F16C__)
  return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds to 2^16 or more: infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14: let the float adder round at the place of the smallest subnormal, 2^-24.
    float shifted = float_of(magnitude) + 0.5f;
    return (uint16_t)(sign | (bits_of(shifted) - 0x3f000000u));
  }
  return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
#endif
}

ZL_INLINE float from_f16(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  return float_of(sign | bits_of((float)magnitude * 0x1p-24f));
#endif
}

struct One {
  static constexpr int width = 1;
  float v;
  One() = default;
  ZL_MEMBER explicit One(float x) : v(x) {}
  static ZL_MEMBER One load(const float* at) { return One(*at); }
  ZL_MEMBER void store(float* at) const { *at = v; }
};
ZL_INLINE One operator+(One a, One b) { return One(a.v + b.v); }
ZL_INLINE One operator-(One a, One b) { return One(a.v - b.v); }
ZL_INLINE One operator*(One a, One b) { return One(a.v * b.v); }
ZL_INLINE One operator/(One a, One b) { return One(a.v / b.v); }
ZL_INLINE One fma(One a, One b, One c) { return One(__builtin_fmaf(a.v, b.v, c.v)); }
ZL_INLINE One sqrt(One a) { return One(__builtin_sqrtf(a.v)); }
ZL_INLINE One sign_of(One a) { return One((float)((a.v > 0.0f) - (a.v < 0.0f))); }

#if defined(__AVX512F__)

struct Wide {
  static constexpr int width = 16;
  __m512 v;
  Wide() = default;
  ZL_MEMBER Wide(__m512 x) : v(x) {}
  ZL_MEMBER explicit Wide(float x) : v(_mm512_set1_ps(x)) {}
  static ZL_MEMBER Wide load(const float* at) { return _mm512_loadu_ps(at); }
  ZL_MEMBER void store(float* at) const { _mm512_storeu_ps(at, v); }
};
ZL_INLINE Wide operator+(Wide a, Wide b) { return _mm512_add_ps(a.v, b.v); }
ZL_INLINE Wide operator-(Wide a, Wide b) { return _mm512_sub_ps(a.v, b.v); }
ZL_INLINE Wide operator*(Wide a, Wide b) { return _mm512_mul_ps(a.v, b.v); }
ZL_INLINE Wide operator/(Wide a, Wide b) { return _mm512_div_ps(a.v, b.v); }
ZL_INLINE Wide fma(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
ZL_INLINE Wide sqrt(Wide a) { return _mm512_sqrt_ps(a.v); }
ZL_INLINE Wide sign_of(Wide a) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512 positive = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
  return _mm512_mask_mov_ps(positive, _mm512_cmp_ps_mask(a.v, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0f));
}

ZL_INLINE Wide load_bf16(const uint16_t* at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}
ZL_INLINE void store_bf16(Wide a, uint16_t* at) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(rounded));
}
ZL_INLINE Wide load_f16(const uint16_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
ZL_INLINE void store_f16(Wide a, uint16_t* at) {
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__AVX2__)

struct Wide {
  static constexpr int width = 8;
  __m256 v;
  Wide() = default;
  ZL_MEMBER Wide(__m256 x) : v(x) {}
  ZL_MEMBER explicit Wide(float x) : v(_mm256_set1_ps(x)) {}
  static ZL_MEMBER Wide load(const float* at) { return _mm256_loadu_ps(at); }
  ZL_MEMBER void store(float* at) const { _mm256_storeu_ps(at, v); }
};
ZL_INLINE Wide operator+(Wide a, Wide b) { return _mm256_add_ps(a.v, b.v); }
ZL_INLINE Wide operator-(Wide a, Wide b) { return _mm256_sub_ps(a.v, b.v); }
ZL_INLINE Wide operator*(Wide a, Wide b) { return _mm256_mul_ps(a.v, b.v); }
ZL_INLINE Wide operator/(Wide a, Wide b) { return _mm256_div_ps(a.v, b.v); }
ZL_INLINE Wide fma(Wide a, Wide b, Wide c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
ZL_INLINE Wide sqrt(Wide a) { return _mm256_sqrt_ps(a.v); }
ZL_INLINE Wide sign_of(Wide a) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 positive = _mm256_and_ps(_mm256_cmp_ps(a.v, zero, _CMP_GT_OQ), _mm256_set1_ps(1.0f));
  return _mm256_or_ps(positive, _mm256_and_ps(_mm256_cmp_ps(a.v, zero, _CMP_LT_OQ), _mm256_set1_ps(-1.0f)));
}

ZL_INLINE Wide load_bf16(const uint16_t* at) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16));
}
ZL_INLINE void store_bf16(Wide a, uint16_t* at) {
  const __m256i u = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
  _mm_storeu_si128((__m128i*)at, _mm_packus_epi32(low, high));
}
ZL_INLINE Wide load_f16(const uint16_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
ZL_INLINE void store_f16(Wide a, uint16_t* at) {
  _mm_storeu_si128((__m128i*)at, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

#else

typedef One Wide;

#endif

ZL_INLINE One load_bf16_one(const uint16_t* at) { return One(from_bf16(*at)); }
ZL_INLINE One load_f16_one(const uint16_t* at) { return One(from_f16(*at)); }

// Elements [at, at + n) of a 16-bit array as floats, and back.
inline void widen(const void* from, int32_t dtype, int64_t at, float* to, int64_t n) {
  const uint16_t* half = (const uint16_t*)from + at;
  int64_t i = 0;
#if defined(__AVX2__)
  if (dtype == ZL_BF16)
    for (; i + Wide::width <= n; i += Wide::width) load_bf16(half + i).store(to + i);
  else
    for (; i + Wide::width <= n; i += Wide::width) load_f16(half + i).store(to + i);
#endif
  for (; i < n; i++) to[i] = dtype == ZL_BF16 ? from_bf16(half[i]) : from_f16(half[i]);
}

inline void narrow(const float* from, void* to, int32_t dtype, int64_t at, int64_t n) {
  uint16_t* half = (uint16_t*)to + at;
  int64_t i = 0;
#if defined(__AVX2__)
  if (dtype == ZL_BF16)
    for (; i + Wide::width <= n; i += Wide::width) store_bf16(Wide::load(from + i), half + i);
  else
    for (; i + Wide::width <= n; i += Wide::width) store_f16(Wide::load(from + i), half + i);
#endif
  for (; i < n; i++) half[i] = dtype == ZL_BF16 ? to_bf16(from[i]) : to_f16(from[i]);
}

}  // namespace
