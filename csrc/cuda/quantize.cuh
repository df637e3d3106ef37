// Packing and unpacking of rows (zl_quant in ../kernels.h): a warp for each block, eight elements for each lane.
#pragma once

#include "../quant.h"
#include "table.cuh"
#include "values.cuh"

namespace zl {

constexpr int QUANT_WARPS = THREADS / WARP;
// Blocks that fit on a multiprocessor. Without this the compiler takes 32 registers to unpack, and spills two.
constexpr int QUANT_BLOCKS = 4;
static_assert(ZL_QUANT_BLOCK == 2 * WARP * QUAD, "a lane has two quads of a block");
static_assert(sizeof(zl_quant) == 112, "as both compilers see it");

#ifdef ZL_HOST_ONLY

template <int B, int D>
void quantize_kernel(zl_quant call);  // see driver.h
template <int B, int D>
void dequantize_kernel(zl_quant call);

#else

// The first element of a lane's quads.
__device__ __forceinline__ int quad_at(int which) {
  return which * (ZL_QUANT_BLOCK / 2) + (int)(threadIdx.x % WARP) * QUAD;
}

// The warp's block.
__device__ __forceinline__ int64_t block_of_warp() {
  return (int64_t)blockIdx.x * QUANT_WARPS + (int)(threadIdx.x / WARP);
}

// True if all quads of a block of values can be read or written at once.
__device__ __forceinline__ bool in_quads(const char* values, int n, int dtype) {
  return n == ZL_QUANT_BLOCK && (uintptr_t)values % (uintptr_t)(QUAD * size_of(dtype)) == 0;
}

// This lane's elements of a block, with zeros behind its end.
__device__ __forceinline__ void load_lane(const char* values, int n, int dtype, float* x) {
  const bool quads = in_quads(values, n, dtype);
#pragma unroll
  for (int which = 0; which < 2; which++) {
    const int at = quad_at(which);
    if (quads) {
      unpack(load_quad(values + at * size_of(dtype), dtype), dtype, x + which * QUAD);
      continue;
    }
#pragma unroll
    for (int i = 0; i < QUAD; i++)
      x[which * QUAD + i] = at + i < n ? load_one(values + (at + i) * size_of(dtype), dtype) : 0.0f;
  }
}

__device__ __forceinline__ void store_lane(char* values, int n, int dtype, const float* x) {
  const bool quads = in_quads(values, n, dtype);
#pragma unroll
  for (int which = 0; which < 2; which++) {
    const int at = quad_at(which);
    if (quads) {
      store_quad(values + at * size_of(dtype), dtype, x + which * QUAD);
      continue;
    }
#pragma unroll
    for (int i = 0; i < QUAD; i++)
      if (at + i < n) store_one(values + (at + i) * size_of(dtype), dtype, x[which * QUAD + i]);
  }
}

// The codes of a quad are a word of B x 4 bits, the first in the lowest ones. Rows are aligned, but only whole blocks may
// be written in words: behind a row's last code lie its scales.
template <int B>
__device__ __forceinline__ void store_codes(uint8_t* codes, int at, int n, uint32_t word) {
  if (n == ZL_QUANT_BLOCK) {
    if (B == 8)
      *global((uint32_t*)(codes + at)) = word;
    else
      *global((uint16_t*)(codes + at / 2)) = (uint16_t)word;
    return;
  }
#pragma unroll
  for (int i = 0; i < QUAD; i += 8 / B)
    if (at + i < n) *global(codes + (at + i) * B / 8) = (uint8_t)(word >> i * B);
}

template <int B>
__device__ __forceinline__ uint32_t load_codes(const uint8_t* codes, int at, int n) {
  if (n == ZL_QUANT_BLOCK)
    return B == 8 ? *global((const uint32_t*)(codes + at)) : (uint32_t)*global((const uint16_t*)(codes + at / 2));
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < QUAD; i += 8 / B)
    if (at + i < n) word |= (uint32_t)*global(codes + (at + i) * B / 8) << i * B;
  return word;
}

template <int B>
__device__ __forceinline__ float code_in(uint32_t word, int i) {
  return (float)((int32_t)(word << (32 - B - i * B)) >> (32 - B));
}

// Memory traffic: values read, codes written; and errors read and written. Values of one dtype, errors of any.
template <int B, int D>
__global__ void __launch_bounds__(THREADS) quantize_kernel(const __grid_constant__ zl_quant call) {
  const int64_t index = block_of_warp();
  if (index >= blocks_of(call)) return;
  const QuantBlock block(call, index, size_of(D), size_of(call.error_dtype));
  float x[2 * QUAD], error[2 * QUAD] = {};
  load_lane(block.values, block.n, D, x);
  if (block.error) {
    load_lane(block.error, block.n, call.error_dtype, error);
#pragma unroll
    for (int i = 0; i < 2 * QUAD; i++) x[i] = __fadd_rn(x[i], error[i]);
  }
  // Bits of magnitudes are in the order of magnitudes; infinities and NaN come last.
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 2 * QUAD; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  const bool finite = largest < 0x7f800000u;
  const float most = max(__uint_as_float(finite ? largest : 0u), ZL_QUANT_LEAST), top = B == 8 ? 127.0f : 7.0f;
  const float scale = __fdiv_rn(most, top), inverse = __fdiv_rn(top, most);
#pragma unroll
  for (int which = 0; which < 2; which++) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
      // The sum has the nearest integer, ties to even, in its low bits.
      const float sum = __fadd_rn(__fmul_rn(x[which * QUAD + i], inverse), 12582912.0f);
      const uint32_t code = finite ? __float_as_uint(sum) & ((1u << B) - 1u) : 0u;
      word |= code << i * B;
      const float lost = __fsub_rn(x[which * QUAD + i], __fmul_rn(code_in<B>(code, 0), scale));
      float& old = error[which * QUAD + i];
      old = finite ? __fadd_rn(__fmul_rn(old, call.keep), __fmul_rn(lost, call.take)) : 0.0f;
    }
    store_codes<B>(block.codes, quad_at(which), block.n, word);
  }
  if (threadIdx.x % WARP == 0) *global(block.scale) = finite ? scale : __uint_as_float(0x7fc00000u);
  if (block.error) store_lane(block.error, block.n, call.error_dtype, error);
}

// Memory traffic: the codes of all rows read, values written once.
template <int B, int D>
__global__ void __launch_bounds__(THREADS, QUANT_BLOCKS) dequantize_kernel(const __grid_constant__ zl_quant call) {
  const int64_t index = block_of_warp();
  if (index >= blocks_of(call)) return;
  const QuantBlock block(call, index, size_of(D), 0);
  const int64_t rows = call.sum ? call.rows : 1;
  float sum[2 * QUAD] = {};
#pragma unroll 4
  for (int64_t row = 0; row < rows; row++) {
    const int64_t further = row * call.row_bytes;
    const float scale = *global((const float*)((const char*)block.scale + further));
#pragma unroll
    for (int which = 0; which < 2; which++) {
      const uint32_t word = load_codes<B>(block.codes + further, quad_at(which), block.n);
#pragma unroll
      for (int i = 0; i < QUAD; i++)
        sum[which * QUAD + i] = __fadd_rn(sum[which * QUAD + i], __fmul_rn(code_in<B>(word, i), scale));
    }
  }
  if (call.divisor != 1.0f)
#pragma unroll
    for (int i = 0; i < 2 * QUAD; i++) sum[i] = __fdiv_rn(sum[i], call.divisor);
  store_lane(block.values, block.n, D, sum);
}

#endif

#ifndef __CUDACC_RTC__  // from here on code of the host, which NVRTC does not compile

typedef void (*QuantKernel)(zl_quant);

template <int B>
QuantKernel quantize_kernel_for(int32_t dtype) {
  if (dtype == ZL_F32) return quantize_kernel<B, ZL_F32>;
  return dtype == ZL_BF16 ? quantize_kernel<B, ZL_BF16> : quantize_kernel<B, ZL_F16>;
}

template <int B>
QuantKernel dequantize_kernel_for(int32_t dtype) {
  if (dtype == ZL_F32) return dequantize_kernel<B, ZL_F32>;
  return dtype == ZL_BF16 ? dequantize_kernel<B, ZL_BF16> : dequantize_kernel<B, ZL_F16>;
}

#endif

}  // namespace zl
