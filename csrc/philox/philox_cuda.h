// gt_fill_* of fill.h on a GPU: enqueued on `stream` (a cudaStream_t) of `device`, where `to` is. Same arguments,
// same numbers to the bit. They allocate nothing, wait for nothing, and can be captured in a CUDA graph, with the key
// that they have then. Return 0, a cudaError_t, or -1 where the dtype is none of theirs or the slice has more than 16
// dims that do not merge.
#pragma once
#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

GT_EXPORT int gt_cuda_fill_words(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                 const int64_t* slice, uint64_t words_of);  // the stream of the words; dtype: int64
GT_EXPORT int gt_cuda_fill_uniform(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                   const int64_t* slice, double low, double range, double below);
GT_EXPORT int gt_cuda_fill_normal(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                  const int64_t* slice, double mean, double std);
GT_EXPORT int gt_cuda_fill_exponential(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                       const int64_t* slice, double scale, double smallest);
GT_EXPORT int gt_cuda_fill_integers(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                    const int64_t* slice, uint64_t span_high, uint64_t span_low, uint64_t low);
GT_EXPORT int gt_cuda_fill_bernoulli(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                     const int64_t* slice, uint64_t threshold);

#ifdef __cplusplus
}
#endif
