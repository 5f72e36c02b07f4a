// One block of random numbers: what philox.py does with a tensor per operation, said of four elements.
//
//     philox(block, stream, key)      4 words of 32 bits, a hash of the three
//     law(words) -> 4 values          uniform, normal, ...: a struct of the parameters with a call operator
//
// Element i of a fill with key k is value i % 4 of block i / 4. A law whose values need more than 32 bits each reads
// the words of streams 0, 1, ... : words[stream][element].
//
// Bit for bit what the Python twin gives, on every instruction set and device, since each operation here is one that
// IEEE 754 defines to the last bit, in the twin's order. So nothing may be fused: compile with -ffp-contract=off (nvcc:
// --fmad=false), never with -ffast-math or flushed denormals (nvcc: no --ftz=true, --prec-div=true as is the default).
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define GT_BOTH __host__ __device__
#define GT_INLINE GT_BOTH __forceinline__
#define GT_UNROLL _Pragma("unroll")
#else
#define GT_BOTH
#define GT_INLINE inline __attribute__((always_inline))
#define GT_UNROLL _Pragma("GCC unroll 16")  // loops around these become vectors only if these are none
#endif

namespace gt::random {

// ------------------------------------------------------------------ words
constexpr uint32_t MULTIPLIER0 = 0xD2511F53u, MULTIPLIER2 = 0xCD9E8D57u;  // of counter words 0 and 2
constexpr uint32_t KEY_STEP0 = 0x9E3779B9u, KEY_STEP1 = 0xBB67AE85u;

// Philox4x32-10 of the counter (block low, block high, stream, 0).
GT_INLINE void philox(uint64_t block, uint32_t stream, uint64_t key, uint32_t (&words)[4]) {
  uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = stream, c3 = 0;
  uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
  GT_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = (uint64_t)c0 * MULTIPLIER0, product2 = (uint64_t)c2 * MULTIPLIER2;
    c0 = (uint32_t)(product2 >> 32) ^ c1 ^ key0;
    c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
    c1 = (uint32_t)product2;
    c3 = (uint32_t)product0;
    key0 += KEY_STEP0;
    key1 += KEY_STEP1;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// ------------------------------------------------------------------ arithmetic, exact to the bit
template <class To, class From>
GT_INLINE To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits, read as another type");
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}

// What the two formats do differently. `random` bits go into a logarithm or an angle; the rest as in philox.py.
template <class Float>
struct format;

template <>
struct format<float> {
  using whole = int32_t;
  using natural = uint32_t;
  static constexpr int significand = 24, random = 32, streams = 1;
  static constexpr int log_powers = 4, sqrt_steps = 3, circle_terms = 5;
  static constexpr uint32_t sqrt_half = 0x3F3504F3u, sqrt_magic = 0x5F375A86u;
};

template <>
struct format<double> {
  using whole = int64_t;
  using natural = uint64_t;
  static constexpr int significand = 53, random = 53, streams = 2;
  static constexpr int log_powers = 10, sqrt_steps = 4, circle_terms = 9;
  static constexpr uint64_t sqrt_half = 0x3FE6A09E667F3BCDull, sqrt_magic = 0x5FE6EB50C7B537A9ull;
};

GT_BOTH constexpr double factorial(int n) { return n < 2 ? 1.0 : n * factorial(n - 1); }
GT_BOTH constexpr double power_of_two(int n) {
  return n < 0 ? 0.5 * power_of_two(n + 1) : n ? 2 * power_of_two(n - 1) : 1.0;
}

// Horner's rule, the highest power first: sums of c(k) z**(k - first) for k = first ... last.
template <class Terms, int k, int last, class Float>
GT_INLINE Float polynomial(Float z) {
  constexpr Float coefficient = (Float)Terms::c(k);
  if constexpr (k == last) return coefficient;
  else return polynomial<Terms, k + 1, last>(z) * z + coefficient;
}
struct atanh_terms { GT_BOTH static constexpr double c(int k) { return 2.0 / (2 * k + 1); } };
struct cos_terms { GT_BOTH static constexpr double c(int k) { return (k % 2 ? -1.0 : 1.0) / factorial(2 * k); } };
struct sin_terms { GT_BOTH static constexpr double c(int k) { return (k % 2 ? -1.0 : 1.0) / factorial(2 * k + 1); } };

// |whole| <= 2**51 as a double: there is no vector instruction for it before AVX-512, but adding it to the last bits of
// 1.5 * 2**52 is one. An int32 in float32 is rounded, to even, by the instruction that every machine has.
GT_INLINE double to_float(int64_t whole) {
  return bits_of<double>((uint64_t)whole + 0x4338000000000000ull) - 6755399441055744.0;
}
GT_INLINE float to_float(int32_t whole) { return (float)whole; }

// log of a normal number > 0. See philox.py for the why of each step, here and below.
template <class Float>
GT_INLINE Float log(Float x) {
  using F = format<Float>;
  using whole = typename F::whole;
  using natural = typename F::natural;
  const natural bits = bits_of<natural>(x);
  constexpr natural bias = (natural)1 << (8 * sizeof(Float) - F::significand - 1);  // keeps what is shifted positive
  constexpr int shift = F::significand - 1;
  const whole exponent = (whole)((bits - F::sqrt_half + (bias << shift)) >> shift) - (whole)bias;
  const Float f = bits_of<Float>(bits - ((natural)exponent << shift)) - 1;
  const Float s = f / (f + 2), half_square = f * f * (Float)0.5;
  const Float z = s * s;
  const Float tail = polynomial<atanh_terms, 1, F::log_powers>(z) * z;
  return (f - (half_square - s * (tail + half_square))) + to_float(exponent) * (Float)0.6931471805599453;
}

// Square root of a number that is 0 or normal.
template <class Float>
GT_INLINE Float sqrt(Float x) {
  using F = format<Float>;
  using natural = typename F::natural;
  constexpr natural sign = (natural)1 << (8 * sizeof(Float) - 1);
  const natural bits = bits_of<natural>(x);
  Float inverse = bits_of<Float>(F::sqrt_magic - (bits >> 1 | (bits & sign)));  // an arithmetic shift: x may be -0
  const Float half = x * (Float)-0.5;
  GT_UNROLL
  for (int step = 0; step < F::sqrt_steps; ++step) inverse = inverse * (half * inverse * inverse + (Float)1.5);
  return inverse * x;
}

template <class Float>
struct point {
  Float x, y;
};

// A point on the unit circle from `random` bits: one for the sign of x, one to swap x and y, the rest an angle.
template <class Float>
GT_INLINE point<Float> cos_sin(typename format<Float>::natural turn) {
  using F = format<Float>;
  using whole = typename F::whole;
  using natural = typename F::natural;
  constexpr natural one = 1, rest = one << (F::random - 2);
  const whole odd = (whole)((turn & (rest - 1)) * 2 + 1) - (whole)rest;  // between -rest and rest
  const Float angle = to_float(odd) * (Float)(3.141592653589793 / 4 / (double)rest);
  const Float z = angle * angle;
  const Float flat = polynomial<cos_terms, 0, F::circle_terms>(z);
  const Float sin = polynomial<sin_terms, 0, F::circle_terms>(z) * angle;
  const natural sign = (turn >> (F::random - 2) & 1) << (8 * sizeof(Float) - 1);
  const Float cos = bits_of<Float>(bits_of<natural>(flat) ^ sign);  // times -1 or 1
  const natural swap = (natural)0 - (turn >> (F::random - 1));  // all bits, or none
  const natural changed = (bits_of<natural>(cos) ^ bits_of<natural>(sin)) & swap;
  return {bits_of<Float>(bits_of<natural>(cos) ^ changed), bits_of<Float>(bits_of<natural>(sin) ^ changed)};
}

// The first `random` bits of an element's words.
template <class Float, class Words>
GT_INLINE typename format<Float>::natural top(const Words& words, int element) {
  if constexpr (sizeof(Float) == 4) return words[0][element];
  else return (uint64_t)words[0][element] << 21 | words[1][element] >> 11;
}

// (n + 1) / 2**random, in (0, 1], for these bits n, rounded once: the parts are exact, and n + 1 may need a bit more.
template <class Float, class Words>
GT_INLINE Float positive(const Words& words, int element) {
  constexpr Float scale = (Float)power_of_two(-format<Float>::random);
  if constexpr (sizeof(Float) == 4) {
    const uint32_t n = words[0][element];
    return ((float)(int32_t)(n >> 16) * 65536.0f + (float)(int32_t)((n & 0xFFFF) + 1)) * scale;
  } else {
    const double last = (double)((int32_t)(words[1][element] >> 11) + 1);
    return (to_float((int64_t)words[0][element]) * 2097152.0 + last) * scale;
  }
}

// ------------------------------------------------------------------ laws: the words of a block -> its four values
// Parameters come as philox.py has checked them; those of floats are rounded to Float when the struct is made.
struct words_law {
  typedef int64_t value;
  static constexpr int streams = 1;
  GT_INLINE void operator()(const uint32_t (&words)[1][4], value (&values)[4]) const {
    GT_UNROLL
    for (int i = 0; i < 4; ++i) values[i] = words[0][i];
  }
};

template <class Float>
struct uniform_law {
  typedef Float value;
  static constexpr int streams = format<Float>::streams;
  int bits;  // of the significand of the dtype that the values end in
  Float scale, range, start, below;
  uniform_law(int bits, double range, double start, double below)
      : bits(bits), scale((Float)power_of_two(-bits)), range((Float)range), start((Float)start), below((Float)below) {}

  GT_INLINE void operator()(const uint32_t (&words)[streams][4], value (&values)[4]) const {
    GT_UNROLL
    for (int i = 0; i < 4; ++i) {
      Float x;
      if constexpr (sizeof(Float) == 4) x = (Float)(int32_t)(words[0][i] >> (32 - bits)) * scale;
      else x = (to_float((int64_t)words[0][i]) * 2097152.0 + (double)(int32_t)(words[1][i] >> 11)) * scale;
      x = x * range + start;
      values[i] = x < below ? x : below;
    }
  }
};

template <class Float>
struct normal_law {
  typedef Float value;
  static constexpr int streams = format<Float>::streams;
  Float mean, std;
  normal_law(double mean, double std) : mean((Float)mean), std((Float)std) {}

  GT_INLINE void operator()(const uint32_t (&words)[streams][4], value (&values)[4]) const {
    GT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const Float radius = sqrt(log(positive<Float>(words, i)) * -2);
      const point<Float> at = cos_sin<Float>(top<Float>(words, i + 2));
      values[i] = at.x * radius * std + mean;
      values[i + 2] = at.y * radius * std + mean;
    }
  }
};

template <class Float>
struct exponential_law {
  typedef Float value;
  static constexpr int streams = format<Float>::streams;
  Float scale, smallest;  // 1 / rate, and the smallest number > 0 of the dtype that the values end in
  exponential_law(double scale, double smallest) : scale((Float)scale), smallest((Float)smallest) {}

  GT_INLINE void operator()(const uint32_t (&words)[streams][4], value (&values)[4]) const {
    constexpr Float least = (Float)power_of_two(-1 - format<Float>::significand);  // half the step from 1 to below it
    GT_UNROLL
    for (int i = 0; i < 4; ++i) {
      Float x = -log(positive<Float>(words, i));
      x = (x > least ? x : least) * scale;
      values[i] = x > smallest ? x : smallest;
    }
  }
};

// low + floor(span * r), r of 64 bits, or of 96 where span > 2**32; modulo 2**64, of which the dtype keeps its bits.
template <int digits>
struct integers_law {
  typedef uint64_t value;
  static constexpr int streams = digits;
  uint64_t span_high, span_low, low;  // span in two parts of 32 bits; the high one may be 2**32

  GT_INLINE void operator()(const uint32_t (&words)[streams][4], value (&values)[4]) const {
    GT_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint64_t carry = 0;
      GT_UNROLL
      for (int digit = digits - 1; digit >= 0; --digit) {
        const uint64_t part = (uint64_t)words[digit][i] * (uint32_t)span_low + (uint32_t)carry;
        if constexpr (digits == 2) carry = (part >> 32) + (words[digit][i] & -span_high);  // span_high is 0 or 1
        else carry = (carry >> 32) + (part >> 32) + words[digit][i] * span_high;
      }
      values[i] = carry + low;
    }
  }
};

// 1 where word < threshold <= 2**32, as all bits set or none.
struct bernoulli_law {
  typedef uint32_t value;
  static constexpr int streams = 1;
  uint32_t last, some;  // threshold - 1, and whether threshold > 0
  explicit bernoulli_law(uint64_t threshold) : last((uint32_t)(threshold - 1)), some(threshold ? ~0u : 0) {}

  GT_INLINE void operator()(const uint32_t (&words)[1][4], value (&values)[4]) const {
    GT_UNROLL
    for (int i = 0; i < 4; ++i) values[i] = (words[0][i] <= last ? ~0u : 0) & some;
  }
};

// ------------------------------------------------------------------ 16-bit floats, rounded to nearest, ties to even
GT_INLINE uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

GT_INLINE uint16_t to_float16(float x) {
  const uint32_t sign = bits_of<uint32_t>(x) >> 16 & 0x8000, size = bits_of<uint32_t>(x) & 0x7FFFFFFF;
  const uint32_t subnormal = bits_of<uint32_t>(bits_of<float>(size) + 0.5f) - 0x3F000000;  // the sum rounds as wanted
  const uint32_t normal = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;             // exponent 127 -> 15
  const uint32_t finite = size < 0x38800000 ? subnormal : normal;
  return (uint16_t)(sign | (size > 0x7F800000 ? 0x7E00 : size >= 0x47800000 ? 0x7C00 : finite));
}

}  // namespace gt::random
