// Transfer of a call's segments to the device.
//
// A table is a list of pieces, one per segment that is not empty. Their chunks are numbered consecutively: piece i has
// those from ends[i - 1] to ends[i], and every block of a launch processes one chunk. A table of up to HERE_BYTES is
// passed in the launch's arguments, which needs no copy. A larger one is written by `fill` into host memory, and the
// caller copies it to the device.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../kernels.h"

namespace zl {

constexpr int THREADS = 256, WARP = 32;
constexpr int64_t MOST_BLOCKS = 0x7fffffff;
constexpr int HERE_BYTES = 4096 - 64;  // arguments may have 4 KB; 64 bytes are for the other arguments

template <class Piece>
struct Table {
  static constexpr int room = HERE_BYTES / (int)(sizeof(int64_t) + sizeof(Piece));
  const int64_t* far_ends;  // null: the table is here
  const Piece* far_pieces;
  int32_t count;
  int64_t ends[room];
  Piece pieces[room];

  __device__ __forceinline__ const int64_t* all_ends() const { return far_ends ? far_ends : ends; }
  __device__ __forceinline__ const Piece& piece(int i) const { return far_ends ? far_pieces[i] : pieces[i]; }
};

#ifndef ZL_HOST_ONLY

// Return the piece of a chunk, the first with ends[i] > chunk, for 0 <= chunk < ends[count - 1]. All lanes of a warp
// search at once, so that a thousand pieces take two rounds.
__device__ __forceinline__ int find_piece(const int64_t* ends, int count, int64_t chunk) {
  const int lane = (int)(threadIdx.x % WARP);
  int low = 0, span = count;
  while (span > 1) {
    const int step = (span + WARP - 1) / WARP;
    const int last = (lane + 1) * step - 1;  // of the lane's share
    const bool before = last < span && ends[low + last] <= chunk;
    const int skipped = __popc(__ballot_sync(0xffffffffu, before)) * step;
    low += skipped;
    span = step < span - skipped ? step : span - skipped;
  }
  return low;
}

#endif

#ifndef __CUDACC_RTC__  // from here on code of the host, which NVRTC does not compile

// A table in memory: the header, `capacity` ends, `capacity` pieces.
struct Header {
  int64_t count, capacity;
};

template <class Piece>
int64_t table_bytes(int64_t segments) {
  return (int64_t)sizeof(Header) + segments * (int64_t)(sizeof(int64_t) + sizeof(Piece));
}

inline const int64_t* ends_in(const void* table) { return (const int64_t*)((const Header*)table + 1); }

template <class Piece>
const Piece* pieces_in(const void* table, int64_t capacity) {
  return (const Piece*)(ends_in(table) + capacity);
}

// True if every segment is inside of its tensor and names one of `rows` rows (or owners), and no launch needs more blocks
// than CUDA allows.
template <class Call>
bool good_table(const Call& call, int64_t rows, int64_t chunk) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < call.segments; i++) {
    const int64_t* segment = call.table + i * ZL_TABLE_COLUMNS;
    const int64_t tensor = segment[0], start = segment[1], numel = segment[2], row = segment[3];
    if (tensor < 0 || tensor >= call.tensors || start < 0 || numel < 0 || row < 0 || row >= rows) return false;
    if (numel > call.numels[tensor] - start) return false;
    chunks += numel / chunk + 2;
  }
  return chunks <= MOST_BLOCKS;
}

// Lays out and launches tables of one kind. `maker(i, &piece)` describes the i-th segment and returns its number of
// chunks, 0 for an empty one.
template <class Piece, class Maker>
void fill(const Maker& maker, int64_t segments, void* memory) {
  Header* header = (Header*)memory;
  int64_t* ends = (int64_t*)ends_in(memory);
  Piece* pieces = (Piece*)pieces_in<Piece>(memory, segments);
  header->count = 0;
  header->capacity = segments;
  int64_t end = 0;
  for (int64_t i = 0; i < segments; i++) {
    const int64_t chunks = maker(i, pieces + header->count);
    if (!chunks) continue;
    end += chunks;
    ends[header->count++] = end;
  }
}

// Call launch(blocks) once, for the table whose host copy is `filled` and whose device copy is `copied`.
template <class Piece, class Launch>
int32_t launch_far(const void* filled, const void* copied, Table<Piece>& table, const Launch& launch) {
  const Header* header = (const Header*)filled;
  if (!header->count) return ZL_OK;
  table.far_ends = ends_in(copied);
  table.far_pieces = pieces_in<Piece>(copied, header->capacity);
  table.count = (int32_t)header->count;
  return launch(ends_in(filled)[header->count - 1]);
}

// Call launch(blocks) as often as needed to pass all segments in arguments.
template <class Piece, class Maker, class Launch>
int32_t launch_here(const Maker& maker, int64_t segments, Table<Piece>& table, const Launch& launch) {
  table.far_ends = nullptr;
  table.far_pieces = nullptr;
  for (int64_t i = 0; i < segments;) {
    int64_t end = 0;
    for (table.count = 0; i < segments && table.count < Table<Piece>::room; i++) {
      const int64_t chunks = maker(i, table.pieces + table.count);
      if (!chunks) continue;
      end += chunks;
      table.ends[table.count++] = end;
    }
    const int32_t code = table.count ? launch(end) : (int32_t)ZL_OK;
    if (code) return code;
  }
  return ZL_OK;
}

#endif

}  // namespace zl
