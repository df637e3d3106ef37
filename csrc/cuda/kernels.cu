// The entry points of the CUDA library. They take the calls of ../kernels.h, in which `factor`, `skip`, `partial`,
// `sums`, `packed`, `error` and the arrays of params, grads, states, outs and values lie on the device, all else on the
// host.
// They return ZL_OK, a zl_error, or the negative of a cudaError_t, and never wait for the device.
//
// A table too large for a launch's arguments (zl_cuda_*_bytes is not 0) is given in two copies: `filled`, on the host,
// by zl_cuda_*_fill, and `copied`, its copy on the device. With `filled` null a call needs no memory but the tensors:
// it becomes as many launches as its table has portions, whose arguments a captured graph keeps.
//
// Either nvcc compiles all of it; or NVRTC compiles the device code, and a C++ compiler the rest (with ZL_HOST_ONLY, see
// driver.h).
#ifdef ZL_HOST_ONLY
#include "driver.h"
#endif

#include "norm.cuh"
#include "quantize.cuh"
#include "update.cuh"

#ifndef __CUDACC_RTC__

#define ZL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using zl::is_float;

int32_t check(const zl_update& call) {
  if (call.rule < 0 || call.rule >= ZL_RULES) return ZL_BAD_RULE;
  if (!is_float(call.param_dtype) || !is_float(call.grad_dtype) || !is_float(call.state_dtype)) return ZL_BAD_DTYPE;
  if (call.out_dtype != ZL_NONE && call.out_dtype != ZL_BF16 && call.out_dtype != ZL_F16) return ZL_BAD_DTYPE;
  return zl::good_table(call, call.row_count, zl::UPDATE_CHUNK) ? ZL_OK : ZL_BAD_TABLE;
}

int32_t check(const zl_norm& call) {
  if (!is_float(call.dtype)) return ZL_BAD_DTYPE;
  return zl::good_table(call, call.owners, ZL_NORM_CHUNK) ? ZL_OK : ZL_BAD_TABLE;
}

template <class Piece>
int64_t far_bytes(int64_t segments) {
  return segments > zl::Table<Piece>::room ? zl::table_bytes<Piece>(segments) : 0;
}

int32_t code_of(cudaError_t error) { return -(int32_t)error; }

template <class Arguments>
int32_t launch(void (*kernel)(Arguments), int64_t blocks, Arguments& arguments, void* stream) {
  void* list[] = {&arguments};
  return code_of(cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3(zl::THREADS), list, 0, (cudaStream_t)stream));
}

int32_t launch_quant(const zl_quant& call, zl::QuantKernel kernel, int32_t device, void* stream) {
  if (const int32_t code = zl::check(call)) return code;
  const int64_t blocks = (zl::blocks_of(call) + zl::QUANT_WARPS - 1) / zl::QUANT_WARPS;
  if (blocks > zl::MOST_BLOCKS) return ZL_BAD_ROWS;
  if (!blocks) return ZL_OK;
  if (const cudaError_t error = cudaSetDevice(device)) return code_of(error);
  zl_quant copy = call;
  return launch(kernel, blocks, copy, stream);
}

int64_t chunks_of(const zl_norm& call) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < call.segments; i++)
    chunks += (call.table[i * ZL_TABLE_COLUMNS + 2] + ZL_NORM_CHUNK - 1) / ZL_NORM_CHUNK;
  return chunks;
}

// One double per chunk, one per piece, one counter per piece, and one more.
int64_t partials_of(const zl_norm& call) { return chunks_of(call) + call.segments + call.segments / 2 + 1; }

}  // namespace

ZL_EXPORT int32_t zl_abi() { return ZL_ABI; }

// Text for a code that an entry point returned; it is static.
ZL_EXPORT const char* zl_cuda_error_string(int32_t code) {
  switch (code) {
    case ZL_OK: return "no error";
    case ZL_BAD_RULE: return "unknown rule";
    case ZL_BAD_DTYPE: return "a dtype that is not fp32, bf16 or fp16";
    case ZL_BAD_TABLE:
      return "a segment that is not within its tensor or names a row that is not there, or too many elements";
    case ZL_BAD_ROWS: return "rows that are not aligned, too short for their codes and scales, or not of 8 or 4 bits";
    default: return code < 0 ? cudaGetErrorString((cudaError_t)-code) : "unknown code";
  }
}

// Bytes of the table of so many segments, or 0 if it fits into a launch's arguments.
ZL_EXPORT int64_t zl_cuda_update_bytes(int64_t segments) { return far_bytes<zl::UpdatePiece>(segments); }
ZL_EXPORT int64_t zl_cuda_norm_bytes(int64_t segments) { return far_bytes<zl::NormPiece>(segments); }

ZL_EXPORT int32_t zl_cuda_update_fill(const zl_update* call, void* table) {
  const int32_t code = check(*call);
  if (!code) zl::fill<zl::UpdatePiece>(zl::UpdateMaker{*call}, call->segments, table);
  return code;
}

ZL_EXPORT int32_t zl_cuda_update(const zl_update* call, const void* filled, const void* copied, int32_t device,
                                 void* stream) {
  if (const int32_t code = check(*call)) return code;
  // This library has a CUDA runtime of its own, which does not know the device that torch has made current.
  if (const cudaError_t error = cudaSetDevice(device)) return code_of(error);
  const zl::UpdateKernel kernel = zl::update_kernel_for(*call);
  zl::UpdateArguments a{call->factor,
                        call->skip,
                        (int8_t)call->param_dtype,
                        (int8_t)call->grad_dtype,
                        (int8_t)call->state_dtype,
                        (int8_t)call->out_dtype,
                        {}};
  const auto launch_one = [&](int64_t blocks) { return launch(kernel, blocks, a, stream); };
  if (filled) return zl::launch_far(filled, copied, a.table, launch_one);
  return zl::launch_here(zl::UpdateMaker{*call}, call->segments, a.table, launch_one);
}

// Number of doubles in `partial`; 0 for a call that is refused, whose table may have any numbers.
ZL_EXPORT int64_t zl_cuda_norm_partials(const zl_norm* call) { return check(*call) ? 0 : partials_of(*call); }

ZL_EXPORT int32_t zl_cuda_norm_fill(const zl_norm* call, void* table) {
  const int32_t code = check(*call);
  if (!code) zl::fill<zl::NormPiece>(zl::NormMaker(*call), call->segments, table);
  return code;
}

ZL_EXPORT int32_t zl_cuda_norm(const zl_norm* call, const void* filled, const void* copied, int32_t device,
                               void* stream) {
  if (const int32_t code = check(*call)) return code;
  if (call->partials < partials_of(*call)) return ZL_BAD_TABLE;
  if (const cudaError_t error = cudaSetDevice(device)) return code_of(error);
  const zl::NormKernel kernel = zl::norm_kernel_for(call->dtype);
  double* const total = call->partial + chunks_of(*call);
  zl::NormArguments a{call->sums, call->partial, total, (unsigned*)(total + call->segments), {}};
  const auto launch_one = [&](int64_t blocks) {
    const size_t bytes = sizeof(unsigned) * ((size_t)a.table.count + 1);
    const cudaError_t error = cudaMemsetAsync(a.arrived, 0, bytes, (cudaStream_t)stream);
    return error ? code_of(error) : launch(kernel, blocks, a, stream);
  };
  if (filled) return zl::launch_far(filled, copied, a.table, launch_one);
  return zl::launch_here(zl::NormMaker(*call), call->segments, a.table, launch_one);
}

ZL_EXPORT int32_t zl_cuda_quantize(const zl_quant* call, int32_t device, void* stream) {
  const bool bytes = call->bits == 8;
  return launch_quant(*call, bytes ? zl::quantize_kernel_for<8>(call->dtype) : zl::quantize_kernel_for<4>(call->dtype),
                      device, stream);
}

ZL_EXPORT int32_t zl_cuda_dequantize(const zl_quant* call, int32_t device, void* stream) {
  const bool bytes = call->bits == 8;
  return launch_quant(
      *call, bytes ? zl::dequantize_kernel_for<8>(call->dtype) : zl::dequantize_kernel_for<4>(call->dtype), device,
      stream);
}

#endif
