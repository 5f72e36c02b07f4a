// The shape that the sources and targets of a region have in common: dims of one element dropped, the rest sorted by
// the strides of the first target, and merged where all operands step through two dims as through one. And the slices
// that make up a part of a region.
#pragma once
#include <stdint.h>

#include "region.h"

namespace gt::boxing {

// Room for n things, on the stack where they are few.
template <class T, int FEW = 16> struct FewArray {
  explicit FewArray(int n) : data(n <= FEW ? few : new T[n]) {}
  ~FewArray() {
    if (data != few) delete[] data;
  }
  FewArray(const FewArray&) = delete;
  FewArray& operator=(const FewArray&) = delete;
  T* data;
  T few[FEW];
};

struct Shape {
  static constexpr int DIMS = GT_DIMS + 1;

  // `strides[k]` are the strides, in elements, of operand k: of `n` sources, then of `m` targets. Never less than two
  // dims, but for one run in all operands; then one. The last two are the grid that copies and tiles work on: the first
  // target runs along the last; along the one before it a source that does not.
  Shape(int ndim, const int64_t* size, const int64_t* const* strides, int n, int m, int source_item, int target_item);

  int64_t stride(int k, int d) const { return steps.data[k * DIMS + d]; }  // in bytes

  int ndim = 0;
  int64_t size[DIMS];
  int64_t chunk = INT64_MAX;             // rows to do at a time, before the dims above are stepped through

 private:
  void swap(int a, int b);
  void merge();
  bool one_run(int n, int source_item, int target_item) const;
  void choose_rows(int n, int source_item);
  int64_t& step(int k, int d) { return steps.data[k * DIMS + d]; }

  int operands;
  FewArray<int64_t, 16 * DIMS> steps;
};

// The slices of part `part` of `parts` of a region. The cut depends on the region's sizes only, so that all processes
// that share it cut alike wherever its operands are: at multiples of 64 elements, or of whole rows that are as many.
struct PartSlices {
  explicit PartSlices(const gt_region& region);
  bool next();

  int64_t from[GT_DIMS], size[GT_DIMS];  // of the slice that next() found

 private:
  const gt_region& region;
  int64_t at, end;                       // elements, row-major
};

}  // namespace gt::boxing
