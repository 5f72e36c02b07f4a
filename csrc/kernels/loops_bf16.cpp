// The loops for processors with AVX-512 and its rounding to bfloat16. See loops_body.h.
#if defined(__x86_64__) && defined(__GNUC__)
#define GT_LEVEL 3
#define GT_LEVEL_NAME bf16
#define GT_BYTES 64
#define GT_HERE __attribute__((target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")))
#include "loops_body.h"
#endif
