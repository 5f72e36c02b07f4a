// Fills a slice of a global tensor with random numbers on a GPU: a thread makes blocks of four by the laws of philox.h.
//
//     the slice as rows, contiguous in the global tensor    (row 0: elements 9-13)   (row 1: 16-20)   ...
//     a thread for each block that a row touches            2 3                      4 5
//     stores those of its four that are in the row          9 10 11 | 12 13          16 17 18 19 | 20
//
// Compiled with --fmad=false: a product and a sum contracted into one would end in other bits than on a CPU.
#include "philox.h"

#include <algorithm>

#include "../common/device.h"
#include "philox_cuda.h"

#ifndef GT_FILL_ROWS
#define GT_FILL_ROWS ((int64_t)1 << 30)
#endif

namespace gt::random {
namespace {

constexpr int DIMS = 16, EACH = 4;      // dims that do not merge; blocks of a thread

struct SliceRows {                      // the slice, as rows that are contiguous in `to`
  char* to;
  int64_t count, length;                // how many, at most GT_FILL_ROWS in a launch; elements of each
  int64_t base;                         // where the first begins
  int64_t blocks;                       // of a row, at most
  uint32_t blocks_magic;
  int32_t blocks_shift, ndim;           // dims that tell the rows apart, the innermost first
  uint32_t size[DIMS], magic[DIMS];
  int32_t shift[DIMS];
  int64_t step[DIMS];
};

template <class Law> struct Fill {
  SliceRows rows;
  Law law;
  uint64_t key;
  uint32_t stream;
  int32_t dtype;
};

// ---- from the type that a law computes in to the one that is stored
template <class From> GT_DEVICE void assign(From x, gt_half& to) { to = {to_float16((float)x)}; }
template <class From> GT_DEVICE void assign(From x, gt_bfloat& to) { to = {to_bfloat16((float)x)}; }
template <class From> GT_DEVICE void assign(From x, bool& to) { to = x != 0; }
template <class From> GT_DEVICE void assign(From x, gt_word8& to) { to = {{bits_of<uint32_t>((float)x), 0}}; }
template <class From, class To> GT_DEVICE void assign(From x, To& to) { to = (To)x; }

// Values [low, high) of a block, whose first one would be at `at`.
template <class D, class Value> GT_DEVICE void put(char* at, const Value (&values)[4], int low, int high) {
  constexpr int bytes = 4 * (int)sizeof(D), width = bytes < 16 ? bytes : 16;
  D four[4];
#pragma unroll
  for (int i = 0; i < 4; i++) assign(values[i], four[i]);
  if (high - low == 4 && (uintptr_t)at % width == 0) {
#pragma unroll
    for (int k = 0; k < bytes; k += width) {
      gt_word<width> word;
      memcpy(&word, (const char*)four + k, width);
      gt_write<width>(at + k, word);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    gt_word<sizeof(D)> word;
    memcpy(&word, &four[i], sizeof(D));
    if (i >= low && i < high) gt_write<sizeof(D)>(at + i * (int)sizeof(D), word);
  }
}

GT_DEVICE void store(int dtype, char* to, int64_t at, const float (&values)[4], int low, int high) {
  if (dtype == GT_F32) put<float>(to + 4 * at, values, low, high);
  else if (dtype == GT_F16) put<gt_half>(to + 2 * at, values, low, high);
  else put<gt_bfloat>(to + 2 * at, values, low, high);
}
GT_DEVICE void store(int, char* to, int64_t at, const double (&values)[4], int low, int high) {
  put<double>(to + 8 * at, values, low, high);
}
GT_DEVICE void store(int dtype, char* to, int64_t at, const int64_t (&values)[4], int low, int high) {
  switch (dtype) {
    case GT_F32: return put<float>(to + 4 * at, values, low, high);
    case GT_F64: return put<double>(to + 8 * at, values, low, high);
    case GT_F16: return put<gt_half>(to + 2 * at, values, low, high);
    case GT_BF16: return put<gt_bfloat>(to + 2 * at, values, low, high);
    case GT_BOOL: return put<bool>(to + at, values, low, high);
    case GT_I8: case GT_U8: return put<uint8_t>(to + at, values, low, high);
    case GT_I16: return put<int16_t>(to + 2 * at, values, low, high);
    case GT_I32: return put<int32_t>(to + 4 * at, values, low, high);
    case GT_I64: return put<int64_t>(to + 8 * at, values, low, high);
    case GT_C64: return put<gt_word8>(to + 8 * at, values, low, high);
  }
}
GT_DEVICE void store(int dtype, char* to, int64_t at, const uint64_t (&values)[4], int low, int high) {
  const int64_t whole[4] = {(int64_t)values[0], (int64_t)values[1], (int64_t)values[2], (int64_t)values[3]};
  store(dtype, to, at, whole, low, high);
}
GT_DEVICE void store(int dtype, char* to, int64_t at, const uint32_t (&masks)[4], int low, int high) {
  const int64_t one[4] = {masks[0] & 1, masks[1] & 1, masks[2] & 1, masks[3] & 1};
  store(dtype, to, at, one, low, high);
}

// ---- the kernel
// Block `k` of row `row`. SliceRows of different phase have a block more or less: then the last makes nothing.
template <class Law> GT_DEVICE void make(const Fill<Law>& fill, uint32_t row, int64_t k) {
  const SliceRows& rows = fill.rows;
  int64_t start = rows.base;
  uint32_t left = row;
  for (int d = 0; d < rows.ndim; d++) {
    const uint32_t rest = gt_divide(left, rows.magic[d], rows.shift[d]);
    start += (int64_t)(left - rest * rows.size[d]) * rows.step[d];
    left = rest;
  }
  const int64_t block = (start >> 2) + k, before = 4 * block - start;  // elements of the row before this block
  const int low = before < 0 ? (int)-before : 0;
  const int high = rows.length - before < 4 ? (int)(rows.length - before) : 4;
  if (high <= low) return;
  uint32_t words[Law::streams][4];
#pragma unroll
  for (int s = 0; s < Law::streams; s++) philox((uint64_t)block, fill.stream + (uint32_t)s, fill.key, words[s]);
  typename Law::value values[4];
  fill.law(words, values);
  store(fill.dtype, rows.to, row * rows.length + before, values, low, high);
}

template <class Law> GT_KERNEL(GT_THREADS, 4) gt_fill_kernel(GT_ARGUMENT Fill<Law> fill) {
  const SliceRows& rows = fill.rows;
  const int64_t all = rows.count * rows.blocks;
  const bool short_rows = rows.blocks < 1 << 30;
  constexpr int64_t tile = EACH * GT_THREADS;
  for (int64_t first = blockIdx.x * tile; first < all; first += gridDim.x * tile) {
    const uint32_t row0 = (uint32_t)(first / rows.blocks);
    const int64_t k0 = first - row0 * rows.blocks;
#pragma unroll 1
    for (int i = 0; i < EACH; i++) {
      const int64_t k = k0 + i * GT_THREADS + threadIdx.x;
      const uint32_t more =
          short_rows ? gt_divide((uint32_t)k, rows.blocks_magic, rows.blocks_shift) : k >= rows.blocks;
      if (row0 + more < rows.count) make(fill, row0 + more, k - more * rows.blocks);
    }
  }
}

// -------------------------------------------------------------------------------------------------- the host's side
// SliceRows of a slice: trailing whole dims and the dim before them merge into one; so do outer ones that are whole.
bool rows_of(SliceRows& rows, char* to, int ndim, const int64_t* slice) {
  rows = {};
  rows.to = to, rows.count = 1, rows.length = 1;
  int64_t stride = 1;
  bool whole = true;
  for (int dim = ndim - 1; dim >= 0; dim--) {
    const int64_t n = slice[dim], start = slice[ndim + 2 * dim], extent = slice[ndim + 2 * dim + 1] - start;
    if (whole) {
      rows.length *= extent;
    } else if (extent != 1) {
      const int inner = rows.ndim - 1;
      if (inner >= 0 && rows.step[inner] * rows.size[inner] == stride && rows.size[inner] * extent < 1 << 30) {
        rows.size[inner] *= (uint32_t)extent;
      } else {
        if (rows.ndim == DIMS || extent >= (int64_t)1 << 30) return false;
        rows.size[rows.ndim] = (uint32_t)extent, rows.step[rows.ndim++] = stride;
      }
      rows.count *= extent;
    }
    rows.base += start * stride;
    stride *= n;
    whole = whole && extent == n;
    if (!extent) return rows.count = 0, true;
  }
  bool same_phase = true;
  for (int d = 0; d < rows.ndim; d++) {
    same_phase = same_phase && rows.step[d] % 4 == 0;
    rows.magic[d] = gt_magic(rows.size[d], rows.shift[d]);
  }
  rows.blocks = ((same_phase ? rows.base % 4 : 3) + rows.length + 3) / 4;
  if (rows.blocks < 1 << 30) rows.blocks_magic = gt_magic((uint32_t)rows.blocks, rows.blocks_shift);
  return true;
}

template <class Law> int launch(int device, void* stream, const Fill<Law>& fill, int itemsize) {
  const SliceRows& rows = fill.rows;
  if (rows.count >= GT_FILL_ROWS) {     // two halves of the outermost dim
    const int outer = rows.ndim - 1;
    const uint32_t size = rows.size[outer], half = size / 2;
    if (half == 0) return -1;
    const int64_t each = rows.count / size;
    Fill<Law> low = fill, high = fill;
    low.rows.size[outer] = half, low.rows.count = each * half;
    high.rows.size[outer] = size - half, high.rows.count = each * (size - half);
    high.rows.to += each * half * rows.length * itemsize, high.rows.base += half * rows.step[outer];
    for (Fill<Law>* part : {&low, &high}) {
      if (part->rows.size[outer] == 1) part->rows.ndim--;
      else part->rows.magic[outer] = gt_magic(part->rows.size[outer], part->rows.shift[outer]);
      if (int error = launch(device, stream, *part, itemsize)) return error;
    }
    return 0;
  }
  const int64_t tiles = (rows.count * rows.blocks + EACH * GT_THREADS - 1) / (EACH * GT_THREADS);
  const int grid = (int)std::min<int64_t>(tiles, (int64_t)gt_processors(device) * GT_WAVES);
  return gt_launch(gt_fill_kernel<Law>, grid, GT_THREADS, stream, fill);
}

template <class Law>
int fill_slice(int device, void* stream, void* to, int dtype, uint64_t key, int ndim, const int64_t* slice,
               const Law& law,
             int itemsize, uint32_t words_of = 0) {
  Fill<Law> fill{{}, law, key, words_of, dtype};
  if (!itemsize || !rows_of(fill.rows, (char*)to, ndim, slice)) return -1;
  if (!fill.rows.count || !fill.rows.length) return 0;
  gt_on_device here(device);
  return here.error ? here.error : launch(device, stream, fill, itemsize);
}

int size_of_float(int dtype) { return dtype == GT_F32 ? 4 : dtype == GT_F16 || dtype == GT_BF16 ? 2 : 0; }
int size_of_integer(int dtype) {
  constexpr int sizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1};
  return dtype >= 0 && dtype <= GT_BOOL ? sizes[dtype] : 0;
}

}  // namespace
}  // namespace gt::random

using namespace gt::random;

int gt_cuda_fill_words(int device, void* stream, void* to, int dtype, uint64_t key, int ndim, const int64_t* slice,
                       uint64_t words_of) {
  key += gt_planted(GT_BAD_WORDS);
  const int itemsize = dtype == GT_I64 ? 8 : 0;
  return fill_slice(device, stream, to, dtype, key, ndim, slice, words_law{}, itemsize, (uint32_t)words_of);
}

int gt_cuda_fill_uniform(int device, void* stream, void* to, int dtype, uint64_t key, int ndim, const int64_t* slice,
                         double low, double range, double below) {
  key += gt_planted(GT_BAD_UNIFORM);
  const int bits = dtype == GT_F64 ? 53 : dtype == GT_F32 ? 24 : dtype == GT_F16 ? 11 : 8;
  if (dtype == GT_F64)
    return fill_slice(device, stream, to, dtype, key, ndim, slice, uniform_law<double>(bits, range, low, below), 8);
  return fill_slice(device, stream, to, dtype, key, ndim, slice, uniform_law<float>(bits, range, low, below),
                  size_of_float(dtype));
}

int gt_cuda_fill_normal(int device, void* stream, void* to, int dtype, uint64_t key, int ndim, const int64_t* slice,
                        double mean, double std) {
  key += gt_planted(GT_BAD_NORMAL);
  if (dtype == GT_F64) return fill_slice(device, stream, to, dtype, key, ndim, slice, normal_law<double>(mean, std), 8);
  return fill_slice(device, stream, to, dtype, key, ndim, slice, normal_law<float>(mean, std), size_of_float(dtype));
}

int gt_cuda_fill_exponential(int device, void* stream, void* to, int dtype, uint64_t key, int ndim,
                             const int64_t* slice,
                             double scale, double smallest) {
  key += gt_planted(GT_BAD_EXPONENTIAL);
  if (dtype == GT_F64)
    return fill_slice(device, stream, to, dtype, key, ndim, slice, exponential_law<double>(scale, smallest), 8);
  return fill_slice(device, stream, to, dtype, key, ndim, slice, exponential_law<float>(scale, smallest),
                  size_of_float(dtype));
}

int gt_cuda_fill_integers(int device, void* stream, void* to, int dtype, uint64_t key, int ndim, const int64_t* slice,
                          uint64_t span_high, uint64_t span_low, uint64_t low) {
  key += gt_planted(GT_BAD_RANDOM_INTEGERS);
  const int size = size_of_integer(dtype);
  if (!span_high || (span_high == 1 && !span_low))
    return fill_slice(device, stream, to, dtype, key, ndim, slice, integers_law<2>{span_high, span_low, low}, size);
  return fill_slice(device, stream, to, dtype, key, ndim, slice, integers_law<3>{span_high, span_low, low}, size);
}

int gt_cuda_fill_bernoulli(int device, void* stream, void* to, int dtype, uint64_t key, int ndim, const int64_t* slice,
                           uint64_t threshold) {
  key += gt_planted(GT_BAD_BERNOULLI);
  const int size = dtype == GT_C64 ? 8 : size_of_integer(dtype);
  return fill_slice(device, stream, to, dtype, key, ndim, slice, bernoulli_law(threshold), size);
}

#if defined(__CUDACC__)
template <class Law> int loaded(int error) {
  cudaFuncAttributes attributes;
  return error ? error : (int)cudaFuncGetAttributes(&attributes, gt_fill_kernel<Law>);
}

int gt_cuda_load_random() {             // see gt_cuda_load
  int error = loaded<words_law>(0);
  error = loaded<uniform_law<float>>(error), error = loaded<uniform_law<double>>(error);
  error = loaded<normal_law<float>>(error), error = loaded<normal_law<double>>(error);
  error = loaded<exponential_law<float>>(error), error = loaded<exponential_law<double>>(error);
  error = loaded<integers_law<2>>(error), error = loaded<integers_law<3>>(error);
  return loaded<bernoulli_law>(error);
}
#endif
