// gt_fill_* of fill.h on a GPU: enqueued on `stream` (a cudaStream_t) of `device`, where `to` lies. Same arguments,
// same numbers to the bit. They allocate nothing, wait for nothing, and can be captured in a CUDA graph, with the key
// that they have then. Return 0, a cudaError_t, or -1 where the dtype is none of theirs or the box has more than 16
// dims that do not merge.
#pragma once
#include <stdint.h>

#include "../kernels/boxing_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

GT_EXPORT int gt_cuda_fill_words(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                 const int64_t* box, uint64_t words_of);  // the stream of the words; dtype: int64
GT_EXPORT int gt_cuda_fill_uniform(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                   const int64_t* box, double low, double range, double below);
GT_EXPORT int gt_cuda_fill_normal(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                  const int64_t* box, double mean, double std);
GT_EXPORT int gt_cuda_fill_exponential(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                       const int64_t* box, double scale, double smallest);
GT_EXPORT int gt_cuda_fill_integers(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                    const int64_t* box, uint64_t span_high, uint64_t span_low, uint64_t low);
GT_EXPORT int gt_cuda_fill_bernoulli(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                                     const int64_t* box, uint64_t threshold);

#ifdef __cplusplus
}
#endif
