// From regions to jobs: what the GPU kernel reads, and how the host makes it.
//
// A region says what; a job also says how: which loop, over how many units of how many bytes. The host looks at where
// and with which strides shards are laid out, once, so that the kernel needs no decision but a switch:
//
//     dims that are contiguous in every shard merge              [4, 6, 5] contiguous on both sides -> [120]
//     the widest word that all addresses and steps allow         16 bytes; else 8, 4, 2, 1
//     a run that begins or ends within a word is cut             5 + 8 x 16 + 3 elements: three jobs
//     the fast dim of source and target differ                   tiles, turned in shared memory
//
// The jobs of a launch are a table of 8-byte words: an index (where each job's tiles begin), then the jobs. A tile is
// what a block does at a time.
#pragma once
#include <stdint.h>

#include "../common/device.h"
#include "reduce_cuda.h"

enum gt_path : uint8_t {
  GT_COPY = 0,     // + log2 of the word; without a source it stores zeros
  GT_TURN = 5,     // + log2 of the word
  GT_CAST = 10,    // + dtype of the source: a turn that casts. Other casts are reductions of one source
  GT_REDUCE = 16,  // + 4 dtype + (0: sum, 2: largest or smallest) + (0: an element at a time, 1: gt_lanes of them)
};

// Jobs of one kind share a kernel, and a table: all in one kernel would not fit the registers.
enum gt_kind { GT_MOVES, GT_FLOATS, GT_INTEGERS, GT_KINDS };

enum { GT_UNITS = 4, GT_TILE = GT_UNITS * GT_THREADS };  // units per thread and per tile: of narrow words, some times
// as many, as a GPU is kept busy by the bytes that are on their way.
__host__ __device__ constexpr int gt_times(int path) {
  return path == GT_COPY || path == GT_COPY + 1 ? 4 : path == GT_COPY + 2 ? 2 : 1;
}
// Values that are reduced at a time: 16 bytes of them, but of small integers only 4 values.
__host__ __device__ constexpr int gt_lanes(int itemsize, bool is_float) {
  return is_float || itemsize > 2 ? 16 / itemsize : 4;
}
__host__ __device__ constexpr int gt_turn_side(int itemsize) {
  return itemsize <= 4 && GT_THREADS >= 64 ? 64 : GT_THREADS >= 32 ? 32 : GT_THREADS;
}

struct gt_job {
  uint8_t path, ndim, to;  // to: dtype of the targets
  uint8_t each;            // 1: every source has strides of its own, 2: every target; else all have the first one's
  uint16_t sources, targets;
  uint32_t units;          // the product of the sizes (not of a turn)
  uint32_t across, down;   // of a turn: tiles along the last dim and the one before
  uint8_t least;           // of a reduction: smallest
  uint8_t shift[GT_DIMS + 3];
  // Then, in words: {size, magic} of every dim; addresses of sources and targets; their strides in bytes. For the last
  // dim, size counts units.

  GT_DEVICE const uint32_t* dims() const { return (const uint32_t*)(this + 1); }
  GT_DEVICE char* const* places() const { return (char* const*)(dims() + 2 * ndim); }
  GT_DEVICE const int64_t* source_strides(int i) const {
    return (const int64_t*)(places() + sources + targets) + (each & 1 ? i * ndim : 0);
  }
  GT_DEVICE const int64_t* target_strides(int i) const {
    return source_strides(0) + (each & 1 ? sources : sources > 0) * ndim + (each & 2 ? i * ndim : 0);
  }
};
static_assert(sizeof(gt_job) % 8 == 0, "a job is whole words");
struct gt_entry { uint32_t tile, word; };  // of the index: where a job's tiles begin, and where the job
