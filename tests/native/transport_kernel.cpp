// The boxing kernel as plainly as it can be said, so that the transport is tested without the fast one.
#include <string.h>

#include "../../csrc/kernels/region.h"

namespace {

template <class T>
void element(const gt_region& r, const gt_corner* corner, const gt_shard* sources, const gt_shard* targets,
             const int64_t* at) {
  auto where = [&](const gt_shard& shard, const gt_corner& c) {
    int64_t offset = 0;
    for (int d = 0; d < r.ndim; ++d) offset += (c.start[d] + at[d]) * shard.stride[d];
    return reinterpret_cast<T*>(shard.data) + offset;
  };
  T sum = 0;
  for (int i = 0; i < r.sources; ++i) sum = static_cast<T>(sum + *where(sources[corner[i].shard], corner[i]));
  for (int i = r.sources; i < r.sources + r.targets; ++i) *where(targets[corner[i].shard], corner[i]) = sum;
}

template <class T>
void region(const gt_region& r, const gt_corner* corner, const gt_shard* sources, const gt_shard* targets) {
  for (int d = 0; d < r.ndim; ++d)
    if (!r.size[d]) return;
  int64_t at[GT_DIMS] = {};
  for (;;) {
    element<T>(r, corner, sources, targets, at);
    int d = r.ndim - 1;
    while (d >= 0 && ++at[d] == r.size[d]) at[d--] = 0;
    if (d < 0) return;
  }
}

}  // namespace

extern "C" {

int gt_itemsize(int dtype) { return dtype == GT_I64 ? 8 : dtype == GT_F32 || dtype == GT_I32 ? 4 : 1; }

int gt_reduce(const gt_region* regions, int64_t count, const gt_corner* corners, int op, const gt_shard* sources,
              int source_dtype, const gt_shard* targets, int target_dtype) {
  if (op != GT_SUM || source_dtype != target_dtype) return -1;
  for (int64_t i = 0; i < count; ++i) {
    const gt_corner* corner = corners + regions[i].first;
    if (source_dtype == GT_I64) region<int64_t>(regions[i], corner, sources, targets);
    else if (source_dtype == GT_F32) region<float>(regions[i], corner, sources, targets);
    else if (source_dtype == GT_I8) region<int8_t>(regions[i], corner, sources, targets);
    else return -1;
  }
  return 0;
}

}  // extern "C"
