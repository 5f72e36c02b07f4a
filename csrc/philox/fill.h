// Filling a slice of a global tensor with random numbers, in one call. No torch here, and a plain C interface.
//
// `to` is the slice, contiguous, of `dtype` (enum gt_dtype); `key` belongs to the op; `slice` is 3 ndim numbers: the
// sizes of the global tensor, then start and stop of each dim. The laws are those of philox.py, which has
// checked and prepared their parameters; the results are the same to the bit. All return 0, or -1 where the dtype is
// none of theirs or there are more than 64 dims.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

int gt_fill_words(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice, uint64_t stream);  // dtype: int64
int gt_fill_uniform(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice,
                    double low, double range, double below);     // low + range n / 2**bits, `below` at most
int gt_fill_normal(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice, double mean, double std);
int gt_fill_exponential(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice,
                        double scale, double smallest);          // 1 / rate, the dtype's smallest number > 0
int gt_fill_integers(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice,
                     uint64_t span_high, uint64_t span_low, uint64_t low);  // span = span_high 2**32 + span_low
int gt_fill_bernoulli(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice, uint64_t threshold);

// For tests: 0 plain, 1 AVX2, 2 AVX-512; more than the processor has is cut down to it. Returns what runs from now on.
int gt_fill_vectors(int level);

#ifdef __cplusplus
}
#endif
