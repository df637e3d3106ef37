// The C interface of zerolite's kernels: raw pointers, lengths and scalars. No torch, no Python, no state between calls.
#pragma once

#include <stdint.h>

#define ZL_ABI 9  // raised with every change of the interface; the Python side compares it

enum zl_dtype { ZL_NONE = 0, ZL_F32 = 1, ZL_BF16 = 2, ZL_F16 = 3 };

// Columns of a row of scalars, by rule. Column 0, `scale`, multiplies the gradient (beside *factor) and is negative if
// the loss is maximised. rules.h describes the other columns, with each rule.
enum zl_rule { ZL_ADAM = 0, ZL_LION = 1, ZL_ADAGRAD = 2, ZL_SGD = 3, ZL_RULES = 4 };
enum { ZL_COLUMNS = 8, ZL_TABLE_COLUMNS = 4 };

// Processor paths; ZL_BEST asks for the widest that the processor has.
enum zl_isa { ZL_BEST = -1, ZL_PLAIN = 0, ZL_AVX2 = 1, ZL_AVX512 = 2 };

enum zl_error {
  ZL_OK = 0,
  ZL_BAD_RULE = 1,
  ZL_BAD_DTYPE = 2,
  ZL_BAD_ISA = 3,
  ZL_BAD_TABLE = 4,
  ZL_BAD_ROWS = 5,
};

// Threads of a call: `parallel` is GOMP_parallel of the OpenMP runtime that torch uses and `thread_num` its
// omp_get_thread_num, so that torch and this library share one pool. Null: own threads, which end with the call.
typedef void (*zl_body)(void*);
typedef struct {
  void (*parallel)(zl_body, void*, unsigned threads, unsigned flags);
  int (*thread_num)(void);
  int32_t threads;
} zl_threads;

// Tensors are lists of flat arrays; the i-th of every list has the same length. A segment is
// (tensor, start, numel, row): elements [start, start + numel) of the tensor-th arrays, updated with rows[row].
// Segments do not overlap. `factor` multiplies every gradient. If `skip` is not 0, nothing is changed. Both may be null.
// `outs` are null for ZL_NONE. Otherwise they hold the parameters rounded to `out_dtype` and receive the updated ones. If
// an element differs from the rounded parameter, the user has written it, and the update starts from that value.
typedef struct {
  int32_t rule;
  int32_t param_dtype, grad_dtype, state_dtype, out_dtype;
  int32_t isa;
  int64_t tensors, segments;
  const int64_t* numels;  // [tensors]
  void* const* params;
  const void* const* grads;
  void* const* states[2];
  void* const* outs;
  const int64_t* table;  // [segments][ZL_TABLE_COLUMNS]
  const float* rows;     // [row_count][ZL_COLUMNS]
  int64_t row_count;
  const float* factor;
  const float* skip;
  zl_threads threads;
} zl_update;

// sums[owner] += the sum of the squares of every segment (tensor, start, numel, owner). It is computed in double, in an
// order that depends on the segment alone. `partial` is memory for one double per ZL_NORM_CHUNK elements of a segment.
enum { ZL_NORM_CHUNK = 16384 };
typedef struct {
  int32_t dtype;
  int32_t isa;
  int64_t tensors, segments, partials;
  const int64_t* numels;  // [tensors]
  const void* const* values;
  const int64_t* table;
  double* partial;
  double* sums;  // [owners]
  int64_t owners;
  zl_threads threads;
} zl_norm;

// Rows of numbers as integer codes, with one scale for each block of ZL_QUANT_BLOCK neighbours of a row: a number is
// about code x scale. Codes have 8 bits, -127 to 127, or 4 bits, -7 to 7, two to a byte, the first in the low half. The
// scale is the block's largest magnitude / 127, or / 7. Below ZL_QUANT_LEAST a largest magnitude counts as that, so that
// no scale is a denormal. A block with an infinity or a NaN has the scale NaN, and so arrives as NaN.
//
// A packed row of row_bytes bytes has its codes first, then, at scale_offset, its scales in fp32. Rows and scales are
// aligned to 16 bytes; what lies between is not written.
//
// Packing reads `values` [rows][numel]. With `error` [rows][numel] it packs values + error, and then replaces error by
// keep x error + take x (values + error - code x scale), or by 0 in a block with the scale NaN.
// Unpacking writes `values`: [rows][numel]; or with `sum` [numel], the sum of the rows from the first one on, / divisor.
#define ZL_QUANT_BLOCK 256
#define ZL_QUANT_LEAST 0x1p-119f
typedef struct {
  int32_t bits;
  int32_t dtype, error_dtype;  // error_dtype is ZL_NONE without `error`
  int32_t isa;
  int32_t sum;
  float keep, take, divisor;
  int64_t rows, numel, row_bytes, scale_offset;
  void* values;
  void* packed;
  void* error;
  zl_threads threads;
} zl_quant;

// A step of AdamW on one flat array whose moments are codes of 8 bits, in blocks of ZL_QUANT_BLOCK elements, each with
// its largest magnitude. The array begins `lead` elements after the beginning of its first block. A moment is
// numbers[code] x maximum, and a code is the number of `borders` below moment / maximum.
//
// A cell has the numbers from -1 to 1 with one sign and the same upper 16 bits, counted from those of ZL_CELL_LEAST,
// which stands for all smaller magnitudes too. Negative numbers have the second half of the cells. cells[i] is the code
// of the lowest number of the cell. Each cell has at most one border.
enum { ZL_CELLS = 8192, ZL_CELL_LEAST = 0x337f, ZL_CODES = 256 };
typedef struct {
  uint8_t* codes;        // [numel]
  float* maxima;         // [blocks]
  const float* numbers;  // [ZL_CODES]
  const float* borders;  // [ZL_CODES], infinities at the end
  const uint8_t* cells;  // [ZL_CELLS]
} zl_moment;
typedef struct {
  int32_t param_dtype, grad_dtype;
  int32_t isa;
  // 1 - lr x decay, 1 - beta1, beta2, 1 - beta2, sqrt(1 - beta2^t), eps, -lr / (1 - beta1^t)
  float keep, mean, keep_square, square, correction2, eps, step;
  int64_t numel, lead;
  void* param;
  const void* grad;
  zl_moment moments[2];
  zl_threads threads;
} zl_adam8;
