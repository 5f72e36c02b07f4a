// What one boxing does, as data: every region is a slice of the global tensor, read from the shards of some ranks,
// reduced in their order, and stored into the shards of some ranks. No torch here, and a plain C interface.
//
//     S -> B  on 2 ranks, rank 0:   [0:4] copied from shard 0, [4:8] copied from shard 1
//     P -> B  large, rank 0:        its half of the slice, shard 0 + shard 1, stored into the results of both ranks
//
// A program is compiled once per pair of layouts and shape; where the shards are, and with which strides, is given
// when it runs.
#pragma once
#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GT_DIMS 8  // dims of a region; tensors of more take the way through Python

typedef struct {
  int64_t shard;            // whose: an index into the table of source or of target shards
  int64_t start[GT_DIMS];   // where in that shard the region begins, in elements
} gt_corner;

typedef struct {
  int32_t ndim;
  int32_t sources;          // 0: the region is filled with zeros
  int32_t targets;
  int32_t part, parts;      // only part `part` of `parts` equal ones is done here; others do the rest
  int32_t first;            // in the program's corners: the sources in the order of reduction, then the targets
  int64_t size[GT_DIMS];
} gt_region;

typedef struct {
  char* data;
  int64_t stride[GT_DIMS];  // in elements
} gt_shard;

// Runs the regions. Sums of 16-bit floats are made in float32 and rounded once; the order of the terms is the corners'.
// A source and a target never overlap, unless they are the same elements. Returns 0, or -1 for what a dtype cannot do.
int gt_reduce(const gt_region* regions, int64_t count, const gt_corner* corners, int op,
              const gt_shard* sources, int source_dtype, const gt_shard* targets, int target_dtype);

int gt_itemsize(int dtype);

#ifdef __cplusplus
}
#endif
