// The loops for one instruction set; loops_*.cpp include this once each. Vectors are GCC's vector types of GT_BYTES
// bytes, so that one text serves all; what differs (16-bit floats, streaming) is chosen by GT_LEVEL.
//
// A dtype is a struct that says how to load some elements of it into the type in which they are reduced (`wide`), and
// how to pack them from there. Floats come by the half vector of 16 bits: as two vectors of float, or four of double.
// Floats of 16 bits are reduced in float32 and rounded once, to nearest even.
#include <type_traits>

#include "loops.h"

#if GT_X86
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"             // vectors are passed between inlined functions only
#pragma GCC diagnostic ignored "-Wuninitialized"     // of the "undefined" vectors in the intrinsics' own headers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define GT_INLINE GT_HERE inline __attribute__((always_inline))

namespace gt::boxing::GT_LEVEL_NAME {

constexpr int BYTES = GT_BYTES;
template <class T> struct vector_of { typedef T type __attribute__((vector_size(BYTES))); };
template <class T> using vec = typename vector_of<T>::type;
typedef vec<float> vf;
typedef vec<double> vd;
typedef vec<uint32_t> vu;
typedef vec<uint16_t> words;
struct Floats { vf low, high; };
struct Doubles { vd part[4]; };

template <class X> GT_INLINE X load(const char* at) {
  X x;
  __builtin_memcpy(&x, at, sizeof x);
  return x;
}

// ---- stores, and stores past the caches, for which `at` is aligned
template <bool STREAM, class X> GT_INLINE void put(char* at, const X& x) {
#if GT_LEVEL >= 2
  if constexpr (STREAM) return _mm512_stream_si512(reinterpret_cast<__m512i*>(at), (__m512i)x);
#elif GT_LEVEL == 1
  if constexpr (STREAM) return _mm256_stream_si256(reinterpret_cast<__m256i*>(at), (__m256i)x);
#elif GT_X86
  if constexpr (STREAM) return _mm_stream_si128(reinterpret_cast<__m128i*>(at), (__m128i)x);
#endif
  __builtin_memcpy(at, &x, sizeof x);
}
template <bool STREAM> GT_INLINE void put(char* at, const Floats& x) {
  put<STREAM>(at, x.low), put<STREAM>(at + BYTES, x.high);
}
template <bool STREAM> GT_INLINE void put(char* at, const Doubles& x) {
  for (int i = 0; i < 4; i++) put<STREAM>(at + i * BYTES, x.part[i]);
}

// ---- conversions
GT_INLINE Floats narrow(const Doubles& x) {
  constexpr int N = BYTES / 8;
  Floats y;
  for (int i = 0; i < N; i++) {
    y.low[i] = static_cast<float>(x.part[0][i]), y.low[N + i] = static_cast<float>(x.part[1][i]);
    y.high[i] = static_cast<float>(x.part[2][i]), y.high[N + i] = static_cast<float>(x.part[3][i]);
  }
  return y;
}

GT_INLINE Doubles widen(const Floats& x) {
  constexpr int N = BYTES / 8;
  Doubles y;
  for (int i = 0; i < N; i++) {
    y.part[0][i] = x.low[i], y.part[1][i] = x.low[N + i];
    y.part[2][i] = x.high[i], y.part[3][i] = x.high[N + i];
  }
  return y;
}

struct Longs { vu low, high; };

GT_INLINE Longs raised(words x) {                    // every word as the upper half of 32 bits
#if GT_LEVEL >= 2
  const __m512i low = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0,
                                       7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
  const __m512i high = _mm512_or_si512(low, _mm512_set1_epi16(16));
  return {(vu)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, low, (__m512i)x),
          (vu)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, high, (__m512i)x)};
#elif GT_LEVEL == 1
  const __m256i apart = _mm256_permute4x64_epi64((__m256i)x, 0xd8), zero = _mm256_setzero_si256();
  return {(vu)_mm256_unpacklo_epi16(zero, apart), (vu)_mm256_unpackhi_epi16(zero, apart)};
#elif GT_X86
  const __m128i zero = _mm_setzero_si128();
  return {(vu)_mm_unpacklo_epi16(zero, (__m128i)x), (vu)_mm_unpackhi_epi16(zero, (__m128i)x)};
#else
  Longs y;
  for (int i = 0; i < BYTES / 4; i++) y.low[i] = uint32_t{x[i]} << 16, y.high[i] = uint32_t{x[BYTES / 4 + i]} << 16;
  return y;
#endif
}

GT_INLINE words upper(vu low, vu high) {             // the upper halves, back to words
#if GT_LEVEL >= 2
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,
                                       31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (words)_mm512_permutex2var_epi16((__m512i)low, odd, (__m512i)high);
#elif GT_LEVEL == 1
  const __m256i both = _mm256_packus_epi32((__m256i)(low >> 16), (__m256i)(high >> 16));
  return (words)_mm256_permute4x64_epi64(both, 0xd8);
#elif GT_X86
  return (words)_mm_packs_epi32(_mm_srai_epi32((__m128i)low, 16), _mm_srai_epi32((__m128i)high, 16));
#else
  words y;
  for (int i = 0; i < BYTES / 4; i++) y[i] = low[i] >> 16, y[BYTES / 4 + i] = high[i] >> 16;
  return y;
#endif
}

GT_INLINE vu rounded(vf x) {                         // to bfloat16, in the upper half
  const vu bits = (vu)x, up = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x != x ? vu{} + 0x7fc00000u : up;
}

GT_INLINE words to_bf16(const Floats& x) {
#if GT_LEVEL == 3
  // The instruction makes zeros of subnormal numbers; nothing else is different.
  const __m512 low = (__m512)x.low, high = (__m512)x.high;
  constexpr int SUBNORMAL = 0x20;
  if (!(_mm512_fpclass_ps_mask(low, SUBNORMAL) | _mm512_fpclass_ps_mask(high, SUBNORMAL)))
    return (words)_mm512_cvtne2ps_pbh(high, low);
#endif
  return upper(rounded(x.low), rounded(x.high));
}

#if GT_LEVEL == 0
GT_INLINE vf half_to_float(vu raised) {              // from the upper half
  const vu sign = raised & 0x80000000u, rest = (raised & 0x7fff0000u) >> 16;
  const vf small = __builtin_convertvector((vec<int32_t>)rest, vf) * 0x1p-24f;           // subnormal, exact
  const vu normal = (rest << 13) + 0x38000000u, special = (rest << 13) | 0x7f800000u;    // exponent 15 -> 127
  return (vf)((rest < 0x400u ? (vu)small : rest >= 0x7c00u ? special : normal) | sign);
}

GT_INLINE vu float_to_half(vf x) {                   // to the upper half
  const vu sign = (vu)x & 0x80000000u, rest = (vu)x & 0x7fffffffu;
  const vu normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;           // a carry: the next exponent
  const vu small = (vu)((vf)rest + 0.5f) - 0x3f000000u;                                  // the addition rounds at 2^-24
  const vu large = rest > 0x7f800000u ? vu{} + 0x7e00u : vu{} + 0x7c00u;
  return (rest < 0x38800000u ? small : rest >= 0x47800000u ? large : normal) << 16 | sign;
}
#endif

GT_INLINE Floats from_f16(const char* at) {
#if GT_LEVEL >= 2
  return {(vf)_mm512_cvtph_ps(load<__m256i>(at)), (vf)_mm512_cvtph_ps(load<__m256i>(at + 32))};
#elif GT_LEVEL == 1
  return {(vf)_mm256_cvtph_ps(load<__m128i>(at)), (vf)_mm256_cvtph_ps(load<__m128i>(at + 16))};
#else
  const Longs x = raised(load<words>(at));
  return {half_to_float(x.low), half_to_float(x.high)};
#endif
}

GT_INLINE words to_f16(const Floats& x) {
  constexpr int nearest = 8;                         // to even, without exceptions
#if GT_LEVEL >= 2
  return (words)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph((__m512)x.low, nearest)),
                                   _mm512_cvtps_ph((__m512)x.high, nearest), 1);
#elif GT_LEVEL == 1
  return (words)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph((__m256)x.low, nearest)),
                                        _mm256_cvtps_ph((__m256)x.high, nearest), 1);
#else
  (void)nearest;
  return upper(float_to_half(x.low), float_to_half(x.high));
#endif
}

// ---- dtypes
struct Float { static constexpr int lanes = BYTES / 2; };

struct F32 : Float {
  typedef Floats wide;
  static constexpr int size = 4;
  static GT_INLINE Floats get(const char* at) { return {load<vf>(at), load<vf>(at + BYTES)}; }
  static GT_INLINE Floats pack(const Floats& x) { return x; }
  static GT_INLINE Floats pack(const Doubles& x) { return narrow(x); }
};

struct F64 : Float {
  typedef Doubles wide;
  static constexpr int size = 8;
  static GT_INLINE Doubles get(const char* at) {
    return {{load<vd>(at), load<vd>(at + BYTES), load<vd>(at + 2 * BYTES), load<vd>(at + 3 * BYTES)}};
  }
  static GT_INLINE Doubles pack(const Floats& x) { return widen(x); }
  static GT_INLINE Doubles pack(const Doubles& x) { return x; }
};

struct F16 : Float {
  typedef Floats wide;
  static constexpr int size = 2;
  static GT_INLINE Floats get(const char* at) { return from_f16(at); }
  static GT_INLINE words pack(const Floats& x) { return to_f16(x); }
  static GT_INLINE words pack(const Doubles& x) { return to_f16(narrow(x)); }
};

struct BF16 : Float {
  typedef Floats wide;
  static constexpr int size = 2;
  static GT_INLINE Floats get(const char* at) {
    const Longs x = raised(load<words>(at));
    return {(vf)x.low, (vf)x.high};
  }
  static GT_INLINE words pack(const Floats& x) { return to_bf16(x); }
  static GT_INLINE words pack(const Doubles& x) { return to_bf16(narrow(x)); }
};

template <class T> struct Int {
  typedef vec<T> wide;
  static constexpr int size = sizeof(T), lanes = BYTES / sizeof(T);
  static GT_INLINE wide get(const char* at) { return load<wide>(at); }
  static GT_INLINE wide pack(wide x) { return x; }
};

// ---- reductions of two vectors; a NaN wins every comparison, as in torch.maximum and torch.minimum
template <int OP, class X> GT_INLINE X combine(const X& a, const X& b) {
  if constexpr (OP == GT_SUM) return a + b;
  if constexpr (OP == GT_MAX) return (a > b) | (a != a) ? a : b;
  if constexpr (OP == GT_MIN) return (a < b) | (a != a) ? a : b;
}
template <int OP> GT_INLINE Floats combine(const Floats& a, const Floats& b) {
  return {combine<OP>(a.low, b.low), combine<OP>(a.high, b.high)};
}
template <int OP> GT_INLINE Doubles combine(const Doubles& a, const Doubles& b) {
  Doubles c;
  for (int i = 0; i < 4; i++) c.part[i] = combine<OP>(a.part[i], b.part[i]);
  return c;
}

// ---- the loop
// U times `lanes` elements from i on: all sources are read before a target is written, which may be the same memory.
template <class S, class D, int OP, int U, bool STREAM>
GT_INLINE void step(char* const* to, int m, const char* const* from, int n, int64_t i) {
  typename S::wide sum[U];
  for (int u = 0; u < U; u++) sum[u] = S::get(from[0] + (i + u * S::lanes) * S::size);
  for (int j = 1; j < n; j++) {
    const char* at = from[j] + i * S::size;
    for (int u = 0; u < U; u++) sum[u] = combine<OP>(sum[u], S::get(at + u * S::lanes * S::size));
  }
  decltype(D::pack(sum[0])) packed[U];
  for (int u = 0; u < U; u++) packed[u] = D::pack(sum[u]);
  for (int t = 0; t < m; t++)
    for (int u = 0; u < U; u++) put<STREAM>(to[t] + (i + u * S::lanes) * D::size, packed[u]);
}

template <class S, class D, int OP, bool STREAM>
GT_INLINE int64_t steps(char* const* to, int m, const char* const* from, int n, int64_t i, int64_t end) {
  constexpr int L = S::lanes, U = STREAM ? 1 : S::size == 2 ? 4 : 2;      // streams of several lines disturb each other
  // Where much is done to each line, the processor does not look far enough ahead in many sources by itself.
  constexpr int64_t BLOCK = 512 / S::size, AHEAD = 4 * BLOCK;
  static_assert(BLOCK % (U * L) == 0);
  if ((S::size == 2 ? 2 * n : n) >= 6)
    for (; i + AHEAD <= end; i += BLOCK) {
      for (int j = 0; j < n; j++)
        for (int byte = 0; byte < 512; byte += 64) __builtin_prefetch(from[j] + (i + AHEAD) * S::size + byte);
      for (int64_t k = i; k < i + BLOCK; k += U * L) step<S, D, OP, U, STREAM>(to, m, from, n, k);
    }
  for (; i + U * L <= end; i += U * L) step<S, D, OP, U, STREAM>(to, m, from, n, i);
  for (; i + L <= end; i += L) step<S, D, OP, 1, STREAM>(to, m, from, n, i);
  return i;
}

template <class S, class D, int OP>
GT_INLINE auto one(const char* const* from, int n, int64_t i) {
  typename S::wide sum = S::get(from[0] + i * S::size);
  for (int j = 1; j < n; j++) sum = combine<OP>(sum, S::get(from[j] + i * S::size));
  return D::pack(sum);
}

// Less than a vector: by way of a buffer.
template <class S, class D, int OP>
GT_HERE void few(char* const* to, int m, const char* const* from, int n, int64_t i, int64_t count) {
  char buffer[S::lanes * S::size] = {};
  const char* at = buffer;
  __builtin_memcpy(buffer, from[0] + i * S::size, count * S::size);
  typename S::wide sum = S::get(at);
  for (int j = 1; j < n; j++) {
    __builtin_memcpy(buffer, from[j] + i * S::size, count * S::size);
    sum = combine<OP>(sum, S::get(at));
  }
  auto packed = D::pack(sum);
  for (int t = 0; t < m; t++) __builtin_memcpy(to[t] + i * D::size, &packed, count * D::size);
}

template <class S, class D, int OP>
GT_HERE void pass(char* const* to, int m, const char* const* from, int n, int64_t begin, int64_t end, bool streaming) {
  constexpr int L = S::lanes;
  if (end - begin < L) {
    if (begin < end) few<S, D, OP>(to, m, from, n, begin, end - begin);
    return;
  }
  // What is left at the end is computed first, from one full vector that overlaps the others, and stored last: where a
  // target is a source, its elements are read before they change.
  auto last = one<S, D, OP>(from, n, end - L);
  int64_t i = begin;
  if (streaming) {
    int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to[0] + i * D::size) & 63) / D::size;
    bool aligned = head + 4 * L <= end - i;
    for (int t = 0; t < m; t++) aligned &= (reinterpret_cast<uintptr_t>(to[t] + (i + head) * D::size) & 63) == 0;
    if (aligned) {
      if (head) {
        int64_t k = i;
        for (; k + L <= i + head; k += L) step<S, D, OP, 1, false>(to, m, from, n, k);
        if (k < i + head) few<S, D, OP>(to, m, from, n, k, i + head - k);
        i += head;
      }
      i = steps<S, D, OP, true>(to, m, from, n, i, end);
    }
  }
  i = steps<S, D, OP, false>(to, m, from, n, i, end);
  if (i < end)
    for (int t = 0; t < m; t++) put<false>(to[t] + (end - L) * D::size, last);
}

[[maybe_unused]] GT_HERE static void stream_copy(char* to, const char* from, int64_t bytes) {
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 63);
  if (bytes < 512) head = bytes;
  __builtin_memcpy(to, from, head);
  int64_t i = head;
  for (; i + 4 * BYTES <= bytes; i += 4 * BYTES) {
    vu line[4];
    for (int u = 0; u < 4; u++) line[u] = load<vu>(from + i + u * BYTES);
    for (int u = 0; u < 4; u++) put<true>(to + i + u * BYTES, line[u]);
  }
  __builtin_memcpy(to + i, from + i, bytes - i);
}

// ---- the table
template <int OP, class S> void same(Loops& into, int dtype) { into.pass[OP][dtype][dtype] = pass<S, S, OP>; }

template <class S> void floats(Loops& into, int source) {
  into.pass[GT_SUM][source][GT_F32] = pass<S, F32, GT_SUM>;
  into.pass[GT_SUM][source][GT_F64] = pass<S, F64, GT_SUM>;
  into.pass[GT_SUM][source][GT_F16] = pass<S, F16, GT_SUM>;
  into.pass[GT_SUM][source][GT_BF16] = pass<S, BF16, GT_SUM>;
  same<GT_MAX, S>(into, source), same<GT_MIN, S>(into, source);
}

template <class T, class U> void ints(Loops& into, int dtype) {
  same<GT_SUM, Int<U>>(into, dtype);                 // unsigned, as these may wrap around
  same<GT_MAX, Int<T>>(into, dtype), same<GT_MIN, Int<T>>(into, dtype);
}

#if GT_LEVEL == 3
void fill(Loops& into) {                             // over those of AVX-512: only where there is something to round
  into.pass[GT_SUM][GT_F32][GT_BF16] = pass<F32, BF16, GT_SUM>;
  into.pass[GT_SUM][GT_F64][GT_BF16] = pass<F64, BF16, GT_SUM>;
  into.pass[GT_SUM][GT_F16][GT_BF16] = pass<F16, BF16, GT_SUM>;
  into.pass[GT_SUM][GT_BF16][GT_BF16] = pass<BF16, BF16, GT_SUM>;
}
#else
void fill(Loops& into) {
  floats<F32>(into, GT_F32), floats<F64>(into, GT_F64), floats<F16>(into, GT_F16), floats<BF16>(into, GT_BF16);
  ints<int8_t, uint8_t>(into, GT_I8), ints<int16_t, uint16_t>(into, GT_I16), ints<int32_t, uint32_t>(into, GT_I32);
  ints<int64_t, uint64_t>(into, GT_I64), ints<uint8_t, uint8_t>(into, GT_U8);
  same<GT_MAX, Int<uint8_t>>(into, GT_BOOL), same<GT_MIN, Int<uint8_t>>(into, GT_BOOL);
  into.pass[GT_SUM][GT_BOOL][GT_BOOL] = into.pass[GT_MAX][GT_BOOL][GT_BOOL];             // a sum is an or
  into.stream_copy = stream_copy;
}
#endif

}  // namespace gt::boxing::GT_LEVEL_NAME
