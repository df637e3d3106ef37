// Sums of squares of many tensors in one launch, in double.
//
// A sum depends on its segment alone. The place of an element in its segment, and not its address, decides which thread
// adds it. The order of additions depends neither on the grid nor on which block finishes first. So all ranks and stages
// get the same bits.
#pragma once

#ifndef __CUDACC_RTC__
#include <algorithm>
#include <numeric>
#include <vector>
#endif

#include "table.cuh"
#include "values.cuh"

namespace zl {

struct NormPiece {
  const char* values;
  int64_t numel, owner;
};

// partial: a double per chunk; total: one per piece; arrived: number of finished chunks of each piece, then of finished
// pieces. The caller sets `arrived` to 0.
struct NormArguments {
  double* sums;
  double* partial;
  double* total;
  unsigned* arrived;
  Table<NormPiece> table;
};
static_assert(sizeof(NormArguments) <= 4096, "the arguments of a launch have 4 KB");
static_assert(sizeof(NormPiece) == 24 && sizeof(NormArguments) == 56 + 126 * 32, "as both compilers see it");

#ifdef ZL_HOST_ONLY

template <int D>
void norm_kernel(NormArguments a);  // see driver.h

#else

// Return the sum of all threads' values, in the first thread. Call __syncthreads() before the next sum.
__device__ __forceinline__ double sum_of_block(double x) {
  __shared__ double of_warp[THREADS / WARP];
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) x += __shfl_down_sync(0xffffffffu, x, step);
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
  __syncthreads();
  double sum = 0.0;
  if (threadIdx.x == 0)
    for (int i = 0; i < THREADS / WARP; i++) sum += of_warp[i];
  return sum;
}

// Load the elements in the 16 bytes at `at`, with zeros in place of elements from n on.
template <int D>
__device__ __forceinline__ uint4 gather(const char* values, int at, int n) {
  uint32_t word[4] = {};
#pragma unroll
  for (int i = 0; i < 16 / size_of(D); i++) {
    if (at + i >= n) break;
    if (D == ZL_F32)
      word[i % 4] = global((const uint32_t*)values)[at + i];
    else
      word[i / 2] |= (uint32_t)global((const uint16_t*)values)[at + i] << (i % 2 * 16);
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

template <int D>
__device__ __forceinline__ void add_squares(uint4 word, double* sum) {
  float x[2 * QUAD];
  unpack(Quad{word}, D, x);
  if (D != ZL_F32) unpack(Quad{make_uint4(word.z, word.w, 0u, 0u)}, D, x + QUAD);
#pragma unroll
  for (int i = 0; i < 16 / size_of(D); i++) sum[i % 4] = __fma_rn((double)x[i], (double)x[i], sum[i % 4]);
}

// This thread's share of the squares of n elements: the threads take turns at 16 bytes each.
template <int D>
__device__ __forceinline__ double squares_of_thread(const char* values, int n) {
  constexpr int WIDTH = 16 / size_of(D), STRIDE = THREADS * WIDTH;
  double sum[4] = {};
  int at = (int)threadIdx.x * WIDTH;
  if ((uintptr_t)values % 16 == 0) {
    const auto word = [&](int i) { return *global((const uint4*)(values + (at + i * STRIDE) * size_of(D))); };
#pragma unroll 1
    for (; at + 3 * STRIDE + WIDTH <= n; at += 4 * STRIDE) {
      const uint4 first = word(0), second = word(1), third = word(2), fourth = word(3);
      add_squares<D>(first, sum);
      add_squares<D>(second, sum);
      add_squares<D>(third, sum);
      add_squares<D>(fourth, sum);
    }
#pragma unroll 1
    for (; at + WIDTH <= n; at += STRIDE) add_squares<D>(word(0), sum);
  }
#pragma unroll 1
  for (; at < n; at += STRIDE) add_squares<D>(gather<D>(values, at, n), sum);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Return true if this block is the last of `count` to come here; then it sees what the first threads of the others have
// written before. Called by all threads.
__device__ __forceinline__ bool last_to_arrive(unsigned* arrived, unsigned count) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1u) == count - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Add the pieces' totals to their owners' sums. Pieces of one owner are neighbours, and one thread adds them in order.
__device__ __forceinline__ void add_to_owners(const NormArguments& a) {
  for (int i = (int)threadIdx.x; i < a.table.count; i += THREADS) {
    const int64_t owner = a.table.piece(i).owner;
    if (i && a.table.piece(i - 1).owner == owner) continue;
    double sum = a.sums[owner];
    for (int j = i; j < a.table.count && a.table.piece(j).owner == owner; j++) sum += __ldcg(a.total + j);
    a.sums[owner] = sum;
  }
}

template <int D>
__global__ void __launch_bounds__(THREADS) norm_kernel(const __grid_constant__ NormArguments a) {
  const int64_t* ends = a.table.all_ends();
  const int i = find_piece(ends, a.table.count, blockIdx.x);
  const NormPiece& piece = a.table.piece(i);
  const int64_t begin = i ? ends[i - 1] : 0, end = ends[i];
  const int64_t start = ((int64_t)blockIdx.x - begin) * ZL_NORM_CHUNK, rest = piece.numel - start;
  const int n = rest < ZL_NORM_CHUNK ? (int)rest : (int)ZL_NORM_CHUNK;
  const double partial = sum_of_block(squares_of_thread<D>(piece.values + start * size_of(D), n));
  if (threadIdx.x == 0) a.partial[blockIdx.x] = partial;
  if (!last_to_arrive(a.arrived + i, (unsigned)(end - begin))) return;
  double mine = 0.0;
  for (int64_t j = begin + threadIdx.x; j < end; j += THREADS) mine += __ldcg(a.partial + j);
  const double total = sum_of_block(mine);
  if (threadIdx.x == 0) a.total[i] = total;
  if (last_to_arrive(a.arrived + a.table.count, (unsigned)a.table.count)) add_to_owners(a);
}

#endif

#ifndef __CUDACC_RTC__  // from here on code of the host, which NVRTC does not compile

typedef void (*NormKernel)(NormArguments);

inline NormKernel norm_kernel_for(int32_t dtype) {
  if (dtype == ZL_F32) return norm_kernel<ZL_F32>;
  return dtype == ZL_BF16 ? norm_kernel<ZL_BF16> : norm_kernel<ZL_F16>;
}

// Describes segments of a call (see `fill`), those of one owner one after the other.
class NormMaker {
 public:
  explicit NormMaker(const zl_norm& call) : call_(call), order_((size_t)call.segments) {
    std::iota(order_.begin(), order_.end(), (int64_t)0);
    std::stable_sort(order_.begin(), order_.end(), [&call](int64_t i, int64_t j) {
      return call.table[i * ZL_TABLE_COLUMNS + 3] < call.table[j * ZL_TABLE_COLUMNS + 3];
    });
  }

  int64_t operator()(int64_t i, NormPiece* piece) const {
    const int64_t* segment = call_.table + order_[(size_t)i] * ZL_TABLE_COLUMNS;
    piece->values = (const char*)call_.values[segment[0]] + segment[1] * size_of(call_.dtype);
    piece->numel = segment[2];
    piece->owner = segment[3];
    return (segment[2] + ZL_NORM_CHUNK - 1) / ZL_NORM_CHUNK;
  }

 private:
  const zl_norm& call_;
  std::vector<int64_t> order_;
};

#endif

}  // namespace zl
