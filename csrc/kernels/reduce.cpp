// Running a program: every region is brought to the fewest dims that its sources and targets have in common, and then
// done by the loop that fits what is left.
//
//     dense      one run in all of them                        one pass, or one memcpy
//     rows       all run along the innermost dim, far enough   a pass per row
//     copy       one source, no cast                           grids of two dims, see copy.cpp
//     tiles      some run along another dim                    what does not run along the target's innermost dim is
//                                                              copied into a small buffer first, tile by tile
//
// Which loop does an element never changes its bits: a sum has the order of its sources everywhere.
#include <string.h>

#include <algorithm>
#include <memory>

#include "copy.h"
#include "loops.h"
#include "shape.h"

namespace gt::boxing {

static constexpr int64_t STREAM_FROM = 12 << 20;     // bytes written by a call from which they pass by the caches
static constexpr int64_t ROW = 64;                   // elements of a row from which it is worth a pass of its own
static constexpr int64_t SCRATCH = 48 << 10;         // bytes for the tiles of all sources and one target
static constexpr int64_t CHUNK = 16 << 10;           // bytes copied to one target before the next

static const int ITEM[GT_DTYPES] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1, 8, 16, 1, 2, 4, 8, 16};

namespace {

struct ReduceCall {
  const gt_corner* corners;
  const gt_shard *sources, *targets;
  int source_item, target_item;
  bool copies;        // source and target are of one dtype
  bool stream;
  Pass pass;          // NULL where the dtypes can only be copied
  int64_t words;      // what an element is for the pass: two for complex numbers, else one
};

// ---- one run of n elements
void dense(const ReduceCall& call, char** at, int n, int m, int64_t count) {
  if (n == 0) {
    for (int t = 0; t < m; t++) memset(at[t], 0, count * call.target_item);
  } else if (n > 1 || !call.copies) {
    call.pass(at + n, m, const_cast<const char* const*>(at), n, 0, count * call.words, call.stream);
  } else {
    const int64_t bytes = count * call.source_item, chunk = m == 1 ? bytes : CHUNK;
    for (int64_t done = 0; done < bytes; done += chunk)
      for (int t = 1; t <= m; t++)
        if (at[t] != at[0]) copy_run(at[t] + done, at[0] + done, std::min(chunk, bytes - done), call.stream && m == 1);
  }
}

// ---- the two innermost dims of a region that is not dense: rows x columns
struct Grid {
  const ReduceCall& call;
  const Shape& shape;
  int n, m;
  char** at;          // where each operand is, at the grid's corner
  int64_t rows, columns;

  Side side(int k) const { return {shape.stride(k, shape.ndim - 2), shape.stride(k, shape.ndim - 1)}; }

  void zero() const {
    for (int t = 0; t < m; t++) zero_grid(at[t], side(t), rows, columns, call.target_item);
  }

  void copy() const {
    for (int t = 1; t <= m; t++)
      if (at[t] != at[0])
        copy_grid(at[t], side(t), at[0], side(0), rows, columns, call.source_item, call.stream && m == 1);
  }

  void by_rows() const {
    for (int64_t r = 0; r < rows; r++) {
      dense(call, at, n, m, columns);
      for (int k = 0; k < n + m; k++) at[k] += side(k).row;
    }
    for (int k = 0; k < n + m; k++) at[k] -= side(k).row * rows;
  }

  void by_tiles(char* scratch, char** here, int64_t most) const {
    const int64_t wide = std::min(columns, rows > 1 ? std::max<int64_t>(64, most / rows) : most);
    const int64_t high = std::max<int64_t>(1, most / wide);
    for (int64_t r = 0; r < rows; r += high)
      for (int64_t c = 0; c < columns; c += wide)
        tile(scratch, here, most, r, c, std::min(high, rows - r), std::min(wide, columns - c));
  }

  void tile(char* scratch, char** here, int64_t most, int64_t r, int64_t c, int64_t high, int64_t wide) const {
    const auto flat = [&](const Side& s, int item) { return s.column == item && (high == 1 || s.row == item * wide); };
    int targets = 0;                                 // those that can be stored to in place, after the sources
    char* packed = nullptr;
    for (int k = 0; k < n + m; k++) {
      const Side s = side(k);
      const int item = k < n ? call.source_item : call.target_item;
      char* place = at[k] + r * s.row + c * s.column;
      if (k >= n) {
        if (flat(s, item)) here[n + targets++] = place;
        else packed = scratch + n * most * call.source_item;
      } else if (flat(s, item)) {
        here[k] = place;
      } else {
        here[k] = scratch + k * most * item;
        copy_grid(here[k], {wide * item, item}, place, s, high, wide, item, false);
      }
    }
    if (packed) here[n + targets++] = packed;
    call.pass(here + n, targets, const_cast<const char* const*>(here), n, 0, high * wide * call.words, false);
    for (int k = n; packed && k < n + m; k++) {
      const Side s = side(k);
      if (flat(s, call.target_item)) continue;
      copy_grid(at[k] + r * s.row + c * s.column, s, packed, {wide * call.target_item, call.target_item}, high, wide,
                call.target_item, false);
    }
  }
};

// Everything but one run: the grids, one for every index of the dims above.
void sparse(const ReduceCall& call, const Shape& shape, char** at, int n, int m) {
  const int d = shape.ndim;
  Grid grid{call, shape, n, m, at, shape.size[d - 2], shape.size[d - 1]};
  bool rows = grid.columns >= ROW;
  for (int k = 0; k < n + m && rows; k++) rows = grid.side(k).column == (k < n ? call.source_item : call.target_item);
  const bool copies = n == 1 && call.copies, tiles = n > 0 && !copies && !rows;

  const int64_t each = n * call.source_item + call.target_item;
  const int64_t most = tiles ? std::max<int64_t>(16, std::min<int64_t>(4096, SCRATCH / each)) : 0;
  alignas(64) char small[SCRATCH];
  std::unique_ptr<char[]> large(tiles && most * each > SCRATCH ? new char[most * each] : nullptr);
  FewArray<char*> here(tiles ? n + m : 0);

  const int64_t all = grid.rows, step = std::min(shape.chunk, all);
  for (int64_t row = 0; row < all; row += step) {
    grid.rows = std::min(step, all - row);
    int64_t index[Shape::DIMS] = {};
    for (int i = 0; i >= 0;) {
      if (n == 0) grid.zero();
      else if (copies) grid.copy();
      else if (rows) grid.by_rows();
      else grid.by_tiles(large ? large.get() : small, here.data, most);
      for (i = d - 3; i >= 0; i--) {
        const bool more = ++index[i] < shape.size[i];
        for (int k = 0; k < n + m; k++) at[k] += shape.stride(k, i) * (more ? 1 : 1 - shape.size[i]);
        if (more) break;
        index[i] = 0;
      }
    }
    for (int k = 0; k < n + m; k++) at[k] += shape.stride(k, d - 2) * step;
  }
}

// A slice of a region: from `from` on, counted within the region.
void run(const ReduceCall& call, const gt_region& region, const int64_t* from, const int64_t* size) {
  const int n = region.sources, m = region.targets, ndim = region.ndim;
  const gt_corner* corner = call.corners + region.first;
  FewArray<char*> at(n + m);
  FewArray<const int64_t*> strides(n + m);
  bool flat = true;
  int64_t count = 1;
  for (int k = 0; k < n + m; k++) {
    const gt_shard& shard = (k < n ? call.sources : call.targets)[corner[k].shard];
    int64_t offset = 0, dense_stride = 1;
    for (int d = ndim - 1; d >= 0; d--) {
      offset += (corner[k].start[d] + from[d]) * shard.stride[d];
      flat &= shard.stride[d] == dense_stride || size[d] == 1;
      dense_stride *= size[d];
    }
    count = dense_stride;
    at.data[k] = shard.data + offset * (k < n ? call.source_item : call.target_item);
    strides.data[k] = shard.stride;
  }
  if (count == 0 || m == 0) return;
  if (flat) return dense(call, at.data, n, m, count);
  Shape shape(ndim, size, strides.data, n, m, call.source_item, call.target_item);
  if (shape.ndim == 1) dense(call, at.data, n, m, count);
  else sparse(call, shape, at.data, n, m);
}

void whole(const ReduceCall& call, const gt_region& region) {
  static const int64_t zeros[GT_DIMS] = {};
  if (region.parts <= 1) return run(call, region, zeros, region.size);
  PartSlices slices(region);
  while (slices.next()) run(call, region, slices.from, slices.size);
}

}  // namespace
}  // namespace gt::boxing

using namespace gt::boxing;

extern "C" int gt_itemsize(int dtype) { return dtype < 0 || dtype >= GT_DTYPES ? 0 : ITEM[dtype]; }

extern "C" int gt_reduce(const gt_region* regions, int64_t count, const gt_corner* corners, int op,
                         const gt_shard* sources, int source_dtype, const gt_shard* targets, int target_dtype) {
  ReduceCall call{corners, sources, targets, gt_itemsize(source_dtype), gt_itemsize(target_dtype),
            source_dtype == target_dtype, false, nullptr, 1};
  if (!call.source_item || !call.target_item || op < GT_SUM || op > GT_MIN) return -1;
  const bool is_complex = call.copies && op == GT_SUM && (source_dtype == GT_C64 || source_dtype == GT_C128);
  if (is_complex) source_dtype = target_dtype = source_dtype == GT_C64 ? GT_F32 : GT_F64, call.words = 2;
  call.pass = loops.pass[op][source_dtype][target_dtype];
  int64_t written = 0;
  for (int64_t i = 0; i < count; i++) {
    const gt_region& region = regions[i];
    if (region.ndim < 0 || region.ndim > GT_DIMS) return -1;
    if (!call.pass && (region.sources > 1 || (region.sources == 1 && !call.copies))) return -1;
    int64_t bytes = call.target_item * static_cast<int64_t>(region.targets);
    for (int d = 0; d < region.ndim; d++) bytes *= region.size[d];
    written += region.parts > 1 ? bytes / region.parts : bytes;
  }
  call.stream = written >= STREAM_FROM;
  for (int64_t i = 0; i < count; i++) whole(call, regions[i]);
  if (call.stream) fence();
  return 0;
}
