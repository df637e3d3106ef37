// Calls that pack and unpack rows (zl_quant in kernels.h): what both processors check and count.
#pragma once

#include "rules.h"

namespace zl {

ZL_INLINE bool is_float(int32_t dtype) { return dtype == ZL_F32 || dtype == ZL_BF16 || dtype == ZL_F16; }

ZL_INLINE int64_t blocks_of_row(const zl_quant& call) { return (call.numel + ZL_QUANT_BLOCK - 1) / ZL_QUANT_BLOCK; }

// Blocks of a call: those of one row where rows are summed.
ZL_INLINE int64_t blocks_of(const zl_quant& call) { return blocks_of_row(call) * (call.sum ? 1 : call.rows); }

ZL_INLINE int32_t check(const zl_quant& call) {
  if (!is_float(call.dtype)) return ZL_BAD_DTYPE;
  if (call.error ? !is_float(call.error_dtype) : call.error_dtype != ZL_NONE) return ZL_BAD_DTYPE;
  if (call.bits != 8 && call.bits != 4) return ZL_BAD_ROWS;
  if (call.rows < (call.sum ? 1 : 0) || call.rows > (int64_t)1 << 31) return ZL_BAD_ROWS;
  if (call.numel < 0 || call.numel > (int64_t)1 << 48) return ZL_BAD_ROWS;
  if ((uintptr_t)call.packed % 16 || call.row_bytes % 16 || call.scale_offset % 16) return ZL_BAD_ROWS;
  if (call.scale_offset < (call.numel * call.bits + 7) / 8) return ZL_BAD_ROWS;
  return call.row_bytes < call.scale_offset + blocks_of_row(call) * 4 ? ZL_BAD_ROWS : ZL_OK;
}

// a / b. 64-bit divisions take a GPU many instructions.
ZL_INLINE int64_t quotient(int64_t a, int64_t b) {
  return (uint64_t)(a | b) >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b);
}

// Where one block of a call lies. The arrays of values and errors have `size` and `error_size` bytes an element.
struct QuantBlock {
  char* values;  // in the first row where rows are summed
  char* error;   // or null
  uint8_t* codes;
  float* scale;
  int n;  // elements

  ZL_MEMBER QuantBlock(const zl_quant& call, int64_t index, int size, int error_size) {
    const int64_t per_row = blocks_of_row(call), row = quotient(index, per_row);
    const int64_t start = (index - row * per_row) * ZL_QUANT_BLOCK;
    const int64_t at = row * call.numel + start, rest = call.numel - start;
    n = rest < ZL_QUANT_BLOCK ? (int)rest : ZL_QUANT_BLOCK;
    values = (char*)call.values + at * size;
    error = call.error ? (char*)call.error + at * error_size : 0;
    uint8_t* const packed = (uint8_t*)call.packed + row * call.row_bytes;
    codes = packed + start / 8 * call.bits;
    scale = (float*)(packed + call.scale_offset) + start / ZL_QUANT_BLOCK;
  }
};

}  // namespace zl
