// The innermost loops of a boxing, over runs of contiguous elements. They exist once per instruction set; which one
// runs is decided when the library is loaded, by what the processor can do. All give the same bits.
#pragma once
#include <stdint.h>

#include "region.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define GT_X86 1
#else
#define GT_X86 0
#endif

namespace gt::boxing {

// Elements [begin, end) of every target become the reduction of those of the `n` sources, in their order, cast.
// `stream` stores past the caches: for what is larger than them.
typedef void (*Pass)(char* const* targets, int m, const char* const* sources, int n, int64_t begin, int64_t end,
                     bool stream);

struct Loops {
  Pass pass[3][GT_DTYPES][GT_DTYPES];  // [op][source][target]; NULL where there is none
  void (*stream_copy)(char* to, const char* from, int64_t bytes);
};

extern Loops loops;
void fence();  // after streaming, before anybody is told that the data is there

namespace plain { void fill(Loops&); }
namespace avx2 { void fill(Loops&); }
namespace avx512 { void fill(Loops&); }
namespace bf16 { void fill(Loops&); }

}  // namespace gt::boxing

// For tests: 0 plain, 1 AVX2, 2 AVX-512, 3 with its bfloat16; cut down to what the processor has. Returns what runs
// from now on.
extern "C" int gt_use_vectors(int level);
