// The loops for processors with AVX2 and half precision (2013 on). See loops_body.h.
#if defined(__x86_64__) && defined(__GNUC__)
#define GT_LEVEL 1
#define GT_LEVEL_NAME avx2
#define GT_BYTES 32
#define GT_HERE __attribute__((target("avx2,f16c")))
#include "loops_body.h"
#endif
