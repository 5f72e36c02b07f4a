// Fewest dims, and parts of a region: see shape.h.
#include "shape.h"

#include <algorithm>
#include <numeric>

namespace gt::boxing {

Shape::Shape(int dims, const int64_t* sizes, const int64_t* const* strides, int n, int m, int source_item,
             int target_item)
    : operands(n + m), steps((n + m) * DIMS) {
  for (int d = 0; d < dims; d++) {
    if (sizes[d] == 1) continue;
    size[ndim] = sizes[d];
    for (int k = 0; k < operands; k++) step(k, ndim) = strides[k][d] * (k < n ? source_item : target_item);
    // an insertion sort: far steps of the first target first, and of two alike those of the first source
    int i = ndim++;
    const auto before = [&](int a, int b) {
      const int64_t x = std::abs(step(n, a)), y = std::abs(step(n, b));
      return x != y ? x < y : n > 0 && std::abs(step(0, a)) < std::abs(step(0, b));
    };
    for (; i > 0 && before(i - 1, i); i--) swap(i - 1, i);
  }
  merge();
  if (ndim == 1 && one_run(n, source_item, target_item)) return;
  if (ndim == 1) {                                   // a row above it, so that there is a grid
    size[1] = size[0], size[0] = 1, ndim = 2;
    for (int k = 0; k < operands; k++) step(k, 1) = step(k, 0), step(k, 0) *= size[1];
  } else {
    choose_rows(n, source_item);
  }
}

void Shape::swap(int a, int b) {
  std::swap(size[a], size[b]);
  for (int k = 0; k < operands; k++) std::swap(step(k, a), step(k, b));
}

void Shape::merge() {
  int last = 0;
  for (int d = 1; d < ndim; d++) {
    bool one = true;
    for (int k = 0; k < operands && one; k++) one = step(k, last) == step(k, d) * size[d];
    if (one) size[last] *= size[d];
    else size[++last] = size[d];
    for (int k = 0; k < operands; k++) step(k, last) = step(k, d);
  }
  ndim = last + 1;
}

bool Shape::one_run(int n, int source_item, int target_item) const {
  for (int k = 0; k < operands; k++)
    if (stride(k, 0) != (k < n ? source_item : target_item)) return false;
  return true;
}

void Shape::choose_rows(int n, int source_item) {
  int rows = ndim - 2;
  for (int k = 0; k < n; k++) {
    if (stride(k, ndim - 1) == source_item) continue;
    int nearest = ndim - 1;
    for (int d = 0; d < ndim; d++)
      if (std::abs(stride(k, d)) < std::abs(stride(k, nearest))) nearest = d;
    if (nearest < ndim - 1) {
      rows = nearest;
      break;
    }
  }
  if (size[rows] * size[ndim - 1] < 64) {            // a grid of few elements is not worth its loop: the longest dim
    rows = static_cast<int>(std::max_element(size, size + ndim - 1) - size);
    int64_t inner = 1;
    for (int d = rows + 1; d < ndim; d++) inner *= size[d];
    chunk = std::max<int64_t>(16, 8192 / inner);     // a piece of it at a time, which the caches keep for the others
  }
  for (; rows < ndim - 2; rows++) swap(rows, rows + 1);
}

// ---- parts
// Where part `part` begins, in elements. Whole rows of the outermost dims are kept together where there are enough.
static int64_t beginning(const gt_region& region, int64_t part) {
  int64_t total = 1;
  for (int d = 0; d < region.ndim; d++) total *= region.size[d];
  int64_t unit = 64, inner = total;
  for (int d = 0; d < region.ndim && total > 0; d++) {
    inner /= region.size[d];
    const int64_t rows = std::lcm(inner, int64_t{64});
    if (total / rows >= 32 * static_cast<int64_t>(region.parts)) {
      unit = rows;
      break;
    }
  }
  const int64_t units = (total + unit - 1) / unit, q = units / region.parts, r = units % region.parts;
  return std::min(total, (q * part + std::min(part, r)) * unit);
}

PartSlices::PartSlices(const gt_region& of)
    : region(of), at(beginning(of, of.part)), end(beginning(of, of.part + 1)) {}

// The largest slice that begins at `at`: rows of one dim, whole in the dims below.
bool PartSlices::next() {
  if (at >= end) return false;
  int64_t rest = at, inner = 1;
  int dim = region.ndim;                             // the slice is whole in dims from here on
  for (; dim > 0 && rest % (inner * region.size[dim - 1]) == 0 && at + inner * region.size[dim - 1] <= end; dim--)
    inner *= region.size[dim - 1];
  int64_t left = at;
  for (int d = region.ndim - 1; d >= 0; d--) {
    from[d] = left % region.size[d], left /= region.size[d];
    size[d] = d >= dim ? region.size[d] : 1;
  }
  if (dim > 0) {
    size[dim - 1] = std::min((end - at) / inner, region.size[dim - 1] - from[dim - 1]);
    at += size[dim - 1] * inner;
  } else {
    at = end;
  }
  return true;
}

}  // namespace gt::boxing
