// One float with the operations of the rules, and four neighbouring elements of an array in their own dtype.
#pragma once

#ifndef ZL_HOST_ONLY
#include <cuda_fp16.h>
#endif
#include <stdint.h>

#include "../rules.h"

namespace zl {

constexpr __host__ __device__ int size_of(int dtype) { return dtype == ZL_F32 ? 4 : 2; }

// Elements that a thread processes at once: 16 bytes of fp32, 8 of a 16-bit dtype. Neighbouring threads process
// neighbouring elements, so that a warp reads and writes whole cache lines of every array, whatever its dtype.
constexpr int QUAD = 4;

#ifndef ZL_HOST_ONLY  // from here on code of the device

// Intrinsics: each operation rounds to nearest, and no compiler flag can fuse two of them, which would change bits.
struct One {
  float v;
  One() = default;
  __device__ __forceinline__ explicit One(float x) : v(x) {}
};
__device__ __forceinline__ One operator+(One a, One b) { return One(__fadd_rn(a.v, b.v)); }
__device__ __forceinline__ One operator-(One a, One b) { return One(__fsub_rn(a.v, b.v)); }
__device__ __forceinline__ One operator*(One a, One b) { return One(__fmul_rn(a.v, b.v)); }
__device__ __forceinline__ One operator/(One a, One b) { return One(__fdiv_rn(a.v, b.v)); }
__device__ __forceinline__ One fma(One a, One b, One c) { return One(__fmaf_rn(a.v, b.v, c.v)); }
__device__ __forceinline__ One sqrt(One a) { return One(__fsqrt_rn(a.v)); }
__device__ __forceinline__ One sign_of(One a) { return One((float)((a.v > 0.0f) - (a.v < 0.0f))); }

// Tell the compiler that a pointer loaded from a table points to global memory: it then uses faster instructions.
template <class T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// Conversion from and to the low 16 bits of a word. Rounds to nearest, ties to even; a NaN stays a NaN.
__device__ __forceinline__ float widen(uint32_t half, int dtype) {
  if (dtype == ZL_BF16) return __uint_as_float(half << 16);
  return __half2float(__ushort_as_half((unsigned short)half));
}

__device__ __forceinline__ uint32_t narrow(float x, int dtype) {
  if (dtype == ZL_F16) return __half_as_ushort(__float2half_rn(x));
  const uint32_t u = __float_as_uint(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return x == x ? rounded : 0x7fc0u;
}


struct Quad {
  uint4 word;  // of a 16-bit dtype, two elements in each of the first two
};

__device__ __forceinline__ Quad load_quad(const char* at, int dtype) {
  Quad quad;
  if (dtype == ZL_F32) {
    quad.word = *global((const uint4*)at);
  } else {
    const uint2 half = *global((const uint2*)at);
    quad.word = make_uint4(half.x, half.y, 0u, 0u);
  }
  return quad;
}

__device__ __forceinline__ void unpack_halves(uint2 half, int dtype, float* x) {
  x[0] = widen(half.x & 0xffffu, dtype);
  x[1] = widen(half.x >> 16, dtype);
  x[2] = widen(half.y & 0xffffu, dtype);
  x[3] = widen(half.y >> 16, dtype);
}

__device__ __forceinline__ void unpack(const Quad& quad, int dtype, float* x) {
  const uint4 word = quad.word;
  if (dtype == ZL_F32) {
    x[0] = __uint_as_float(word.x);
    x[1] = __uint_as_float(word.y);
    x[2] = __uint_as_float(word.z);
    x[3] = __uint_as_float(word.w);
  } else if (dtype == ZL_BF16) {
    unpack_halves(make_uint2(word.x, word.y), ZL_BF16, x);
  } else {
    unpack_halves(make_uint2(word.x, word.y), ZL_F16, x);
  }
}

__device__ __forceinline__ uint2 pack_halves(const float* x, int dtype) {
  return make_uint2(narrow(x[0], dtype) | narrow(x[1], dtype) << 16, narrow(x[2], dtype) | narrow(x[3], dtype) << 16);
}

__device__ __forceinline__ void store_quad(char* at, int dtype, const float* x) {
  if (dtype == ZL_F32)
    *global((uint4*)at) =
        make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  else if (dtype == ZL_BF16)
    *global((uint2*)at) = pack_halves(x, ZL_BF16);
  else
    *global((uint2*)at) = pack_halves(x, ZL_F16);
}

__device__ __forceinline__ float load_one(const char* at, int dtype) {
  return dtype == ZL_F32 ? *global((const float*)at) : widen(*global((const uint16_t*)at), dtype);
}

__device__ __forceinline__ void store_one(char* at, int dtype, float x) {
  if (dtype == ZL_F32)
    *global((float*)at) = x;
  else
    *global((uint16_t*)at) = (uint16_t)narrow(x, dtype);
}

#endif

}  // namespace zl
