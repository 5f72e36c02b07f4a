// Fills a slice of a global tensor, chunk by chunk: which blocks are wanted, their values, where these belong.
//
//     the slice as runs, contiguous in the global tensor      (row 1: elements 9-13)   (row 2: 16-20)   ...
//     blocks that cover them, up to CHUNK at a time           2 3                      4 5              ...
//     their values, made many at once                         8 9 10 11 12 13 14 15    16 17 18 ...
//     of these, the pieces that the runs are                  9-13, 16-20, ...         copied to the slice
//
// A chunk and its values stay in the first-level cache. The loops over blocks exist once per instruction set; which one
// runs is decided when the library is loaded, by what the processor can do.
#include "philox.h"

#include "../common/dtype.h"
#include "fill.h"

#ifndef GT_X86     // a test may say 0, to have what other processors have
#if defined(__x86_64__) && defined(__GNUC__)
#define GT_X86 1
#else
#define GT_X86 0
#endif
#endif
#if GT_X86
#include <immintrin.h>
#endif

#ifndef GT_WORD    // a test may put rare words (all bits 0, all 1) in place of those of the hash
#define GT_WORD(word) (word)
#endif

#pragma GCC diagnostic ignored "-Wpsabi"             // vectors are passed between inlined functions only
#pragma GCC diagnostic ignored "-Wuninitialized"     // of the "undefined" vectors in the intrinsics' own headers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace gt::random {
namespace {

constexpr int LANES = 16, CHUNK = 256;    // blocks made side by side, and at a time

#define GT_LEVEL 0
#define GT_LEVEL_NAME plain
#define GT_BYTES 16
#define GT_HERE
#include "philox_body.h"
#undef GT_LEVEL
#undef GT_LEVEL_NAME
#undef GT_BYTES
#undef GT_HERE

#if GT_X86
#define GT_LEVEL 1
#define GT_LEVEL_NAME avx2
#define GT_BYTES 32
#define GT_HERE __attribute__((target("avx2")))
#include "philox_body.h"
#undef GT_LEVEL
#undef GT_LEVEL_NAME
#undef GT_BYTES
#undef GT_HERE

#define GT_LEVEL 2
#define GT_LEVEL_NAME avx512
#define GT_BYTES 64
#define GT_HERE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2")))
#include "philox_body.h"

#define GT_EACH_LEVEL(function) {plain::function, avx2::function, avx512::function}
#else
#define GT_EACH_LEVEL(function) {plain::function}
#endif

typedef void (*Make)(const void* law, uint64_t key, uint32_t stream, const uint64_t* blocks, int count, void* values);
typedef void (*Cast)(const void* values, int count, void* stored);
template <class Law> const Make make_of[] = GT_EACH_LEVEL(make<Law>);
template <class Rule> const Cast cast_of[] = GT_EACH_LEVEL(cast<Rule>);

int supported() {
#if GT_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return 2;
  if (__builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}
int level = supported();

// ------------------------------------------------------------------ what is stored
template <class From, class To>
struct convert {
  typedef From from;
  typedef To to;
  GT_INLINE static To of(From x) { return (To)x; }
};
template <class From>
struct convert_to_float16 : convert<From, uint16_t> {
  GT_INLINE static uint16_t of(From x) { return to_float16((float)x); }
};
template <class From>
struct convert_to_bfloat16 : convert<From, uint16_t> {
  GT_INLINE static uint16_t of(From x) { return to_bfloat16((float)x); }
};
struct convert_to_bool : convert<int64_t, uint8_t> {
  GT_INLINE static uint8_t of(int64_t x) { return x != 0; }
};
template <class To, uint64_t one>  // the bits that say 1 in the dtype, where the mask is set
struct one_where : convert<uint32_t, To> {
  GT_INLINE static To of(uint32_t mask) { return (To)((uint64_t)(int64_t)(int32_t)mask & one); }
};

struct storing {
  int itemsize;       // 0: this dtype cannot be stored
  const Cast* cast;   // per level; NULL: as it was made
};

storing of_floats(int dtype) {
  if (dtype == GT_F16) return {2, cast_of<convert_to_float16<float>>};
  if (dtype == GT_BF16) return {2, cast_of<convert_to_bfloat16<float>>};
  return {dtype == GT_F64 ? 8 : dtype == GT_F32 ? 4 : 0, nullptr};
}

storing of_integers(int dtype) {
  switch (dtype) {
    case GT_F16: return {2, cast_of<convert_to_float16<int64_t>>};
    case GT_BF16: return {2, cast_of<convert_to_bfloat16<int64_t>>};
    case GT_F32: return {4, cast_of<convert<int64_t, float>>};
    case GT_F64: return {8, cast_of<convert<int64_t, double>>};
    case GT_BOOL: return {1, cast_of<convert_to_bool>};
    case GT_I8: case GT_U8: return {1, cast_of<convert<int64_t, uint8_t>>};
    case GT_I16: return {2, cast_of<convert<int64_t, uint16_t>>};
    case GT_I32: return {4, cast_of<convert<int64_t, uint32_t>>};
    case GT_I64: return {8, nullptr};
  }
  return {0, nullptr};
}

storing of_masks(int dtype) {
  switch (dtype) {
    case GT_BOOL: case GT_I8: case GT_U8: return {1, cast_of<one_where<uint8_t, 1>>};
    case GT_I16: return {2, cast_of<one_where<uint16_t, 1>>};
    case GT_F16: return {2, cast_of<one_where<uint16_t, 0x3C00>>};
    case GT_BF16: return {2, cast_of<one_where<uint16_t, 0x3F80>>};
    case GT_I32: return {4, cast_of<one_where<uint32_t, 1>>};
    case GT_F32: return {4, cast_of<one_where<uint32_t, 0x3F800000>>};
    case GT_I64: return {8, cast_of<one_where<uint64_t, 1>>};
    case GT_F64: return {8, cast_of<one_where<uint64_t, 0x3FF0000000000000>>};
    case GT_C64: return {8, cast_of<one_where<uint64_t, 0x3F800000>>};  // little-endian: the real part comes first
  }
  return {0, nullptr};
}

// ------------------------------------------------------------------ chunks
class Filler {
 public:
  Filler(void* to, storing how, const Make* make, const void* law, uint64_t key, uint32_t stream)
      : to_(static_cast<char*>(to)), how_(how), make_(make[level]), law_(law), key_(key), stream_(stream) {}

  // Elements [start, start + length) of the global tensor go to the slice next.
  void run(int64_t start, int64_t length) {
    while (length) {
      const uint64_t block = (uint64_t)start >> 2;
      const int word = (int)(start & 3);
      int first = count_ && blocks_[count_ - 1] == block ? count_ - 1 : count_;  // short runs may share a block
      if (first == CHUNK || pieces_ == CHUNK) flush(), first = 0;
      const int64_t room = 4 * (CHUNK - first) - word, taken = length < room ? length : room;
      const int end = first + (int)((word + taken + 3) / 4);
      for (int at = first; at < end; ++at) blocks_[at] = block + (at - first);
      count_ = end;
      piece_[pieces_++] = {4 * first + word, (int)taken};
      start += taken, length -= taken;
    }
  }

  void flush() {
    const int padded = (count_ + LANES - 1) / LANES * LANES;
    for (int at = count_; at < padded; ++at) blocks_[at] = 0;
    make_(law_, key_, stream_, blocks_, padded, values_);
    const char* from = values_;
    if (how_.cast) how_.cast[level](values_, 4 * padded, stored_), from = stored_;
    for (int at = 0; at < pieces_; ++at) {
      const int64_t bytes = (int64_t)piece_[at].length * how_.itemsize;
      memcpy(to_, from + (int64_t)piece_[at].from * how_.itemsize, bytes);
      to_ += bytes;
    }
    count_ = pieces_ = 0;
  }

 private:
  struct piece {
    int from, length;
  };
  char* to_;
  const storing how_;
  const Make make_;
  const void* const law_;
  const uint64_t key_;
  const uint32_t stream_;
  int count_ = 0, pieces_ = 0;
  uint64_t blocks_[CHUNK];
  piece piece_[CHUNK];
  alignas(64) char values_[4 * CHUNK * 8], stored_[4 * CHUNK * 8];
};

// A slice is made of runs: trailing whole dims and the dim before them merge into one.
template <class Law>
int fill(void* to, storing how, uint64_t key, int ndim, const int64_t* slice, const Law& law, uint32_t stream = 0) {
  constexpr int MOST = 64;  // torch's own limit of dims
  if (!how.itemsize || ndim > MOST) return -1;
  int64_t length = 1, base = 0, stride = 1, size[MOST], step[MOST], at[MOST] = {};
  int outer = 0;
  bool whole = true;
  for (int dim = ndim - 1; dim >= 0; --dim) {
    const int64_t n = slice[dim], start = slice[ndim + 2 * dim], extent = slice[ndim + 2 * dim + 1] - start;
    if (whole) length *= extent;
    else if (extent != 1) size[outer] = extent, step[outer++] = stride;
    if (!extent) return 0;
    base += start * stride;
    stride *= n;
    whole = whole && extent == n;
  }
  Filler filler(to, how, make_of<Law>, &law, key, stream);
  int dim;
  do {
    filler.run(base, length);
    for (dim = 0; dim < outer; ++dim) {  // the next run, as a counter counts
      base += step[dim];
      if (++at[dim] < size[dim]) break;
      base -= step[dim] * size[dim], at[dim] = 0;
    }
  } while (dim < outer);
  filler.flush();
  return 0;
}

}  // namespace
}  // namespace gt::random

// ------------------------------------------------------------------ the interface
using namespace gt::random;

int gt_fill_words(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice, uint64_t stream) {
  return fill(to, {dtype == GT_I64 ? 8 : 0, nullptr}, key, ndim, slice, words_law{}, (uint32_t)stream);
}

int gt_fill_uniform(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice, double low, double range,
                    double below) {
  const int bits = dtype == GT_F64 ? 53 : dtype == GT_F32 ? 24 : dtype == GT_F16 ? 11 : 8;
  const storing how = of_floats(dtype);
  if (dtype == GT_F64) return fill(to, how, key, ndim, slice, uniform_law<double>(bits, range, low, below));
  return fill(to, how, key, ndim, slice, uniform_law<float>(bits, range, low, below));
}

int gt_fill_normal(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice, double mean, double std) {
  if (dtype == GT_F64) return fill(to, of_floats(dtype), key, ndim, slice, normal_law<double>(mean, std));
  return fill(to, of_floats(dtype), key, ndim, slice, normal_law<float>(mean, std));
}

int gt_fill_exponential(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice, double scale,
                        double smallest) {
  if (dtype == GT_F64) return fill(to, of_floats(dtype), key, ndim, slice, exponential_law<double>(scale, smallest));
  return fill(to, of_floats(dtype), key, ndim, slice, exponential_law<float>(scale, smallest));
}

int gt_fill_integers(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice, uint64_t span_high,
                     uint64_t span_low, uint64_t low) {
  if (!span_high || (span_high == 1 && !span_low))
    return fill(to, of_integers(dtype), key, ndim, slice, integers_law<2>{span_high, span_low, low});
  return fill(to, of_integers(dtype), key, ndim, slice, integers_law<3>{span_high, span_low, low});
}

int gt_fill_bernoulli(void* to, int dtype, uint64_t key, int ndim, const int64_t* slice, uint64_t threshold) {
  return fill(to, of_masks(dtype), key, ndim, slice, bernoulli_law(threshold));
}

int gt_fill_vectors(int wanted) { return level = wanted < supported() ? wanted : supported(); }
