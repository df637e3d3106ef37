// Packing and unpacking of rows (zl_quant in ../kernels.h), a block at a time. A row's last block is filled up with
// zeros in the cache: so every loop has a constant number of elements, and compilers make vectors of it.
#pragma once

#include <string.h>

#include "../quant.h"
#include "vec.h"

namespace {

constexpr int QUANT = ZL_QUANT_BLOCK;

// Added to a float of at most 2^22, it leaves the nearest integer (ties to even) in the low bits of the sum.
constexpr float ROUNDER = 12582912.0f;

ZL_INLINE int bytes_of(int32_t dtype) { return dtype == ZL_F32 ? 4 : 2; }

ZL_INLINE void load_floats(const void* from, int32_t dtype, float* to, int n) {
  if (dtype == ZL_F32)
    memcpy(to, from, n * sizeof(float));
  else
    widen(from, dtype, 0, to, n);
  if (n < QUANT) memset(to + n, 0, (QUANT - n) * sizeof(float));
}

ZL_INLINE void store_floats(const float* from, void* to, int32_t dtype, int n) {
  if (dtype == ZL_F32)
    memcpy(to, from, n * sizeof(float));
  else
    narrow(from, to, dtype, 0, n);
}

// The bits of the largest magnitude. They are in the order of magnitudes; infinities and NaN come last.
ZL_INLINE int32_t largest_of(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < QUANT; i++) {
    const int32_t magnitude = (int32_t)(bits_of(x[i]) & 0x7fffffffu);
    largest = largest < magnitude ? magnitude : largest;
  }
  return largest;
}

ZL_INLINE void store_codes(const int8_t* code, int32_t bits, uint8_t* to, int n) {
  if (bits == 8) {
    memcpy(to, code, n);
    return;
  }
  uint16_t pair[QUANT / 2];  // the first code in the low byte
  uint8_t half[QUANT / 2];
  memcpy(pair, code, QUANT);
  for (int i = 0; i < QUANT / 2; i++) half[i] = (uint8_t)((pair[i] & 0x0fu) | (pair[i] >> 4 & 0xf0u));
  memcpy(to, half, (n + 1) / 2);
}

ZL_INLINE void load_codes(const uint8_t* from, int32_t bits, int8_t* code, int n) {
  if (n < QUANT) memset(code, 0, QUANT);
  if (bits == 8) {
    memcpy(code, from, n);
    return;
  }
  uint16_t pair[QUANT / 2];
  uint8_t half[QUANT / 2] = {};
  memcpy(half, from, (n + 1) / 2);
  for (int i = 0; i < QUANT / 2; i++) pair[i] = (uint16_t)((half[i] & 0x0fu) | (half[i] & 0xf0u) << 4);
  memcpy(code, pair, QUANT);
  for (int i = 0; i < QUANT; i++) code[i] = (int8_t)((code[i] ^ 8) - 8);
}

void quantize(const zl_quant& call, int64_t begin, int64_t end) {
  const float top = call.bits == 8 ? 127.0f : 7.0f, keep = call.keep, take = call.take;
  alignas(64) float x[QUANT], error[QUANT];
  alignas(64) int8_t code[QUANT];
  for (int64_t index = begin; index < end; index++) {
    const zl::QuantBlock block(call, index, bytes_of(call.dtype), bytes_of(call.error_dtype));
    load_floats(block.values, call.dtype, x, block.n);
    if (block.error) {
      load_floats(block.error, call.error_dtype, error, block.n);
      for (int i = 0; i < QUANT; i++) x[i] = x[i] + error[i];
    }
    float most = float_of((uint32_t)largest_of(x));
    if (most < ZL_QUANT_LEAST) most = ZL_QUANT_LEAST;
    const float scale = most / top, inverse = top / most;
    if (most - most == 0.0f) {
      for (int i = 0; i < QUANT; i++)
        code[i] = (int8_t)(uint8_t)(bits_of(x[i] * inverse + ROUNDER) - bits_of(ROUNDER));
      *block.scale = scale;
    } else {
      memset(code, 0, QUANT);
      *block.scale = float_of(0x7fc00000u);
    }
    store_codes(code, call.bits, block.codes, block.n);
    if (!block.error) continue;
    if (most - most == 0.0f)
      for (int i = 0; i < QUANT; i++) error[i] = error[i] * keep + (x[i] - (float)code[i] * scale) * take;
    else
      memset(error, 0, sizeof(error));
    store_floats(error, block.error, call.error_dtype, block.n);
  }
}

void dequantize(const zl_quant& call, int64_t begin, int64_t end) {
  const int64_t rows = call.sum ? call.rows : 1;
  alignas(64) float sum[QUANT];
  alignas(64) int8_t code[QUANT];
  for (int64_t index = begin; index < end; index++) {
    const zl::QuantBlock block(call, index, bytes_of(call.dtype), 0);
    memset(sum, 0, sizeof(sum));
    for (int64_t row = 0; row < rows; row++) {
      const int64_t further = row * call.row_bytes;
      const float scale = *(const float*)((const char*)block.scale + further);
      load_codes(block.codes + further, call.bits, code, block.n);
      for (int i = 0; i < QUANT; i++) sum[i] = sum[i] + (float)code[i] * scale;
    }
    if (call.divisor != 1.0f)
      for (int i = 0; i < QUANT; i++) sum[i] = sum[i] / call.divisor;
    store_floats(sum, block.values, call.dtype, block.n);
  }
}

}  // namespace
