// The choice between the loops. Any x86-64 runs the plain ones, and so does every other processor: nothing is compiled
// for the machine that happens to build.
#include "loops.h"

#if GT_X86
#include <xmmintrin.h>
#endif

namespace gt::boxing {

void fence() {
#if GT_X86
  _mm_sfence();
#endif
}

static int supported() {
#if GT_X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return 1;
#endif
  return 0;
}

// Maxima that are cast too are rare: they are made in their own dtype, a piece at a time, and cast from there.
template <int OP, int S, int D>
static void in_two(char* const* to, int m, const char* const* from, int n, int64_t begin, int64_t end, bool stream) {
  constexpr int64_t PIECE = 512;
  alignas(64) char room[PIECE * 8];
  constexpr int ITEM = S == GT_F32 ? 4 : S == GT_F64 ? 8 : 2;
  for (int64_t i = begin; i < end; i += PIECE) {
    const int64_t stop = end < i + PIECE ? end : i + PIECE;
    // so that its elements are counted like the others
    char* shifted = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(room) - i * ITEM);
    loops.pass[OP][S][S](&shifted, 1, from, n, i, stop, false);
    const char* source = shifted;
    loops.pass[GT_SUM][S][D](to, m, &source, 1, i, stop, stream);
  }
}

template <int S, int D> static void cast() {
  if constexpr (S == D) return;
  loops.pass[GT_MAX][S][D] = in_two<GT_MAX, S, D>;
  loops.pass[GT_MIN][S][D] = in_two<GT_MIN, S, D>;
}

template <int S> static void casts() { cast<S, GT_F32>(), cast<S, GT_F64>(), cast<S, GT_F16>(), cast<S, GT_BF16>(); }

Loops loops;
static const int level = gt_use_vectors(3);

}  // namespace gt::boxing

using namespace gt::boxing;

extern "C" int gt_use_vectors(int wanted) {
  const int level = wanted < supported() ? wanted : supported();
  casts<GT_F32>(), casts<GT_F64>(), casts<GT_F16>(), casts<GT_BF16>();
#if GT_X86
  if (level >= 2) avx512::fill(loops);
  if (level == 3) bf16::fill(loops);
  if (level >= 2) return level;
  if (level == 1) return avx2::fill(loops), level;
#endif
  return plain::fill(loops), level;
}
