// The values of blocks for one instruction set; philox.cpp includes this once for each.
//
// Sixteen blocks go side by side. The hash is written with vectors, because a product of 32 x 32 -> 64 bits is one
// instruction per 64-bit lane, which compilers do not find: a word is in the low half of a lane, and what is above it
// does no harm until it moves down. The laws are those of philox.h in a plain loop over the lanes, which compilers do
// turn into vectors.
//
// No include guard: it is meant to be included again.

namespace GT_LEVEL_NAME {

#if GT_X86
typedef uint64_t wide __attribute__((vector_size(GT_BYTES)));
typedef uint32_t narrow __attribute__((vector_size(GT_BYTES / 2)));

GT_HERE GT_INLINE wide product(wide a, uint32_t b) {  // of the low halves
#if GT_LEVEL == 2
  return (wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif GT_LEVEL == 1
  return (wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return (wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#endif
}

GT_HERE GT_INLINE void hash(const uint64_t* blocks, uint32_t stream, uint64_t key, uint32_t (&words)[4][LANES]) {
  for (int lane = 0; lane < LANES; lane += GT_BYTES / 8) {
    wide c0, c1, c2 = wide{} + stream, c3 = {};
    memcpy(&c0, blocks + lane, sizeof c0);
    c1 = c0 >> 32;
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    GT_UNROLL
    for (int round = 0; round < 10; ++round) {
      const wide product0 = product(c0, MULTIPLIER0), product2 = product(c2, MULTIPLIER2);
      c0 = (product2 >> 32) ^ c1 ^ key0;
      c2 = (product0 >> 32) ^ c3 ^ key1;
      c1 = product2;
      c3 = product0;
      key0 += KEY_STEP0;
      key1 += KEY_STEP1;
    }
    const wide counters[4] = {c0, c1, c2, c3};
    for (int i = 0; i < 4; ++i) {
      const narrow low = __builtin_convertvector(counters[i], narrow);
      memcpy(&words[i][lane], &low, sizeof low);
    }
  }
}
#else
GT_INLINE void hash(const uint64_t* blocks, uint32_t stream, uint64_t key, uint32_t (&words)[4][LANES]) {
  for (int lane = 0; lane < LANES; ++lane) {
    uint32_t own[4];
    philox(blocks[lane], stream, key, own);
    for (int i = 0; i < 4; ++i) words[i][lane] = own[i];
  }
}
#endif

// `blocks` counts a multiple of LANES of them; `values` gets four for each.
template <class Law>
GT_HERE void make(const void* parameters, uint64_t key, uint32_t stream, const uint64_t* blocks, int count,
                  void* values) {
  const Law law = *static_cast<const Law*>(parameters);
  auto* to = static_cast<typename Law::value*>(values);
  for (int first = 0; first < count; first += LANES, to += 4 * LANES) {
    uint32_t all[Law::streams][4][LANES];
    for (int s = 0; s < Law::streams; ++s) hash(blocks + first, stream + s, key, all[s]);
    for (int lane = 0; lane < LANES; ++lane) {
      uint32_t words[Law::streams][4];
      typename Law::value four[4];
      GT_UNROLL
      for (int s = 0; s < Law::streams; ++s)
        GT_UNROLL
        for (int i = 0; i < 4; ++i) words[s][i] = GT_WORD(all[s][i][lane]);
      law(words, four);
      GT_UNROLL
      for (int i = 0; i < 4; ++i) to[4 * lane + i] = four[i];
    }
  }
}

// From the type that a law computes in to the one that is stored; `count` is a multiple of 4 LANES.
template <class Cast>
GT_HERE void cast(const void* values, int count, void* stored) {
  const auto* from = static_cast<const typename Cast::from*>(values);
  auto* to = static_cast<typename Cast::to*>(stored);
  for (int first = 0; first < count; first += 4 * LANES)
    for (int i = first; i < first + 4 * LANES; ++i) to[i] = Cast::of(from[i]);
}

}  // namespace GT_LEVEL_NAME
