// What a block does with one tile of a job: reads its sources, reduces and casts, stores into its targets.
//
//     flat     4 x 256 units in the order of the targets; the place of a unit follows from its number
//     turned   a square whose rows are contiguous in the targets and whose columns are in the source
//
// A unit is a word that is only moved, or the values that are reduced at a time: those of 16 bytes of a source, or one.
#pragma once
#include <type_traits>

#include "jobs.h"

namespace gt_tiles {

// ---- dtypes: what a value is reduced in, and how it gets there and back
GT_DEVICE float widen(float x) { return x; }
GT_DEVICE double widen(double x) { return x; }
GT_DEVICE float widen(gt_half x) { return gt_widen(x); }
GT_DEVICE float widen(gt_bfloat x) { return gt_widen(x); }
template <class T> GT_DEVICE T widen(T x) { return x; }

template <class D, class A> struct Narrow { static GT_DEVICE D of(A x) { return (D)x; } };
template <class A> struct Narrow<gt_half, A> {
  static GT_DEVICE gt_half of(A x) { return gt_to_half((float)x); }  // of a double by way of float, as torch does it
};
template <class A> struct Narrow<gt_bfloat, A> {
  static GT_DEVICE gt_bfloat of(A x) { return gt_to_bfloat((float)x); }
};

GT_DEVICE float sum(float a, float b) { return a + b; }
GT_DEVICE double sum(double a, double b) { return a + b; }
template <class T> GT_DEVICE T sum(T a, T b) { return (T)((uint64_t)a + (uint64_t)b); }  // wraps around

// The largest or smallest, of which a NaN wins every comparison; or the sum.
template <bool extreme, class A> GT_DEVICE A combine(A a, A b, bool least) {
  if constexpr (extreme) return (least ? a < b : a > b) || a != a ? a : b;
  else return sum(a, b);
}

// combine(nothing, x) is x, to the bit: hence -0.
template <bool extreme, class A> GT_DEVICE A nothing(bool least) {
  constexpr A top = A(~(1ull << (8 * sizeof(A) - 1)));
  if constexpr (!extreme) return std::is_integral_v<A> ? A(0) : -A(0);
  else if constexpr (!std::is_integral_v<A>) return least ? (A)INFINITY : -(A)INFINITY;
  else if constexpr (std::is_unsigned_v<A>) return least ? A(-1) : A(0);
  else return least ? top : A(-top - 1);
}

template <class D, class A, int N> GT_DEVICE void put_as(char* at, const A (&values)[N]) {
  constexpr int bytes = N * (int)sizeof(D), width = bytes < 16 ? bytes : 16;
  alignas(16) D packed[N];
#pragma unroll
  for (int k = 0; k < N; k++) packed[k] = Narrow<D, A>::of(values[k]);
#pragma unroll
  for (int k = 0; k < bytes; k += width) {
    gt_word<width> word;
    memcpy(&word, (const char*)packed + k, width);
    gt_write<width>(at + k, word);
  }
}

// Stores into a target of dtype `to`: floats into any float, integers into their own.
template <class A, int N> GT_DEVICE void put_float(int to, char* at, const A (&values)[N]) {
  if (to == GT_F32) put_as<float>(at, values);
  else if (to == GT_BF16) put_as<gt_bfloat>(at, values);
  else if (to == GT_F16) put_as<gt_half>(at, values);
  else put_as<double>(at, values);
}
template <class T, class A, int N> GT_DEVICE void put(int to, char* at, const A (&values)[N]) {
  if constexpr (std::is_integral_v<T>) put_as<T>(at, values);
  else put_float(to, at, values);
}

// ---- flat tiles
// Where U units of this thread are, GT_THREADS apart.
template <int U> GT_DEVICE void offsets(const gt_job& job, const int64_t* strides, uint32_t unit, int64_t (&at)[U]) {
  const uint32_t* dims = job.dims();
  uint32_t left[U];
#pragma unroll
  for (int u = 0; u < U; u++) left[u] = unit + u * GT_THREADS, at[u] = 0;
#pragma unroll 1
  for (int d = job.ndim - 1; d > 0; d--) {
    const uint32_t size = dims[2 * d], magic = dims[2 * d + 1];
    const int shift = job.shift[d];
    const int64_t stride = strides[d];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const uint32_t rest = gt_divide(left[u], magic, shift);
      at[u] += (int64_t)(left[u] - rest * size) * stride;
      left[u] = rest;
    }
  }
  const int64_t stride = strides[0];
#pragma unroll
  for (int u = 0; u < U; u++) at[u] += (int64_t)left[u] * stride;
}

// The loads of all units are on their way before the first of them is stored.
template <int width> GT_DEVICE void copy(const gt_job& job, uint32_t first) {
  constexpr int U = GT_UNITS, times = gt_times(GT_COPY + (width > 1) + (width > 2) + (width > 4) + (width > 8));
  const uint32_t units = job.units;
  gt_word<width> words[times][U] = {};
  int64_t at[U];
  if (job.sources) {
    const char* source = job.places()[0];
#pragma unroll
    for (int k = 0; k < times; k++) {
      const uint32_t unit = first + k * GT_TILE;
      offsets(job, job.source_strides(0), unit, at);
#pragma unroll
      for (int u = 0; u < U; u++)
        if (unit + u * GT_THREADS < units) words[k][u] = gt_read<width>(source + at[u]);
    }
  }
  const int targets = job.targets;
#pragma unroll 1
  for (int t = 0; t < targets; t++) {
    char* target = job.places()[job.sources + t];
#pragma unroll
    for (int k = 0; k < times; k++) {
      const uint32_t unit = first + k * GT_TILE;
      if (t == 0 || times > 1 || job.each & 2) offsets(job, job.target_strides(t), unit, at);
#pragma unroll
      for (int u = 0; u < U; u++)
        if (unit + u * GT_THREADS < units && !(gt_planted(GT_BAD_COPY) && unit + u * GT_THREADS == 5)) {
          gt_write<width>(target + at[u], words[k][u]);
          if (gt_planted(GT_BAD_END) && unit + u * GT_THREADS == units - 1) gt_write<width>(target + at[u] + width, {});
        }
    }
  }
}

template <class T> constexpr int lanes = gt_lanes(sizeof(T), !std::is_integral_v<T>);

// Where a test plants it: the last source is forgotten.
template <class T> GT_DEVICE int bad_last() {
  return gt_planted(std::is_integral_v<T> ? GT_BAD_INTEGERS : GT_BAD_FLOATS) ? 1 : 0;
}

// A unit is V values. The loads of several sources, of U units each, are on their way at the same time.
template <class T, int V, bool extreme> GT_DEVICE void reduce(const gt_job& job, uint32_t first) {
  using A = decltype(widen(T()));
  constexpr int width = V * (int)sizeof(T), U = V <= 4 ? 2 : 1;
  [[maybe_unused]] constexpr int together = 4 / U;
  const uint32_t units = job.units;
  const int sources = job.sources, targets = job.targets, to = job.to;
  const bool least = job.least;
#pragma unroll 1
  for (int group = 0; group < GT_UNITS; group += U) {
    const uint32_t unit = first + group * GT_THREADS;
    if (unit >= units) return;
    A total[U][V];
    int64_t at[U] = {};
    for (auto& values : total)
      for (A& value : values) value = nothing<extreme, A>(least);
#pragma unroll together
    for (int s = 0; s < sources - bad_last<T>(); s++) {
      if (s == 0 || job.each & 1) offsets(job, job.source_strides(s), unit, at);
      const char* source = job.places()[s];
      gt_word<width> words[U] = {};
#pragma unroll
      for (int u = 0; u < U; u++)
        if (unit + u * GT_THREADS < units) words[u] = gt_read<width>(source + at[u]);
#pragma unroll
      for (int u = 0; u < U; u++) {
        T values[V];
        memcpy(values, &words[u], width);
#pragma unroll
        for (int v = 0; v < V; v++) total[u][v] = combine<extreme>(total[u][v], widen(values[v]), least);
      }
    }
#pragma unroll 1
    for (int t = 0; t < targets; t++) {
      if (t == 0 || job.each & 2) offsets(job, job.target_strides(t), unit, at);
      char* target = job.places()[sources + t];
#pragma unroll
      for (int u = 0; u < U; u++)
        if (unit + u * GT_THREADS < units) put<T>(to, target + at[u], total[u]);
    }
  }
}

// ---- turned tiles
struct alignas(16) Square { char bytes[32 * 33 * 16]; };  // the largest: 64 x 65 x 4, 32 x 33 x 16

template <int width> struct StoreWord {      // moved as it is
  using type = gt_word<width>;
  static GT_DEVICE void store(int, char* at, type x) { gt_write<width>(at, x); }
};
template <class T> struct StoreCast {
  using type = gt_word<sizeof(T)>;
  static GT_DEVICE void store(int to, char* at, type x) {
    T value;
    memcpy(&value, &x, sizeof(T));
    const decltype(widen(T())) one[1] = {widen(value)};
    put_float(to, at, one);
  }
};

// The last dim of the job, x, is contiguous in the targets; the one before, y, in the source. The square holds a row
// per x, of a length that puts neighbours in x on different banks. A thread reads one y of every few x, and stores one
// x of every few y.
template <class Store> GT_DEVICE void turn(const gt_job& job, uint32_t tile, Square& square) {
  using W = typename Store::type;
  constexpr int size = sizeof(W), side = gt_turn_side(size), row = side + (size < 4 ? 4 / size : 1);
  constexpr int rows = GT_THREADS / side;
  [[maybe_unused]] constexpr int together = size <= 2 ? 16 : size <= 4 ? 8 : 4;  // loads on their way
  static_assert(side * row * size <= (int)sizeof(Square) && side % rows == 0, "the square holds a tile");
  W* held = (W*)square.bytes;
  const uint32_t* dims = job.dims();
  const int x = job.ndim - 1, y = x - 1;
  const uint32_t x0 = tile % job.across * side, y0 = tile / job.across % job.down * side;
  const uint32_t xs = dims[2 * x] - x0, ys = dims[2 * y] - y0;  // how many are left from here
  const uint32_t quick = threadIdx.x % side, slow = threadIdx.x / side;
  auto begin = [&](const int64_t* strides) {
    uint32_t outer = tile / job.across / job.down;
    int64_t at = x0 * strides[x] + y0 * strides[y];
    for (int d = y - 1; d >= 0; d--) {
      at += outer % dims[2 * d] * strides[d];
      outer /= dims[2 * d];
    }
    return at;
  };
  if (!gt_planted(GT_NO_TURN_SYNC)) gt_sync();  // the tile before has been read
  if (quick < ys) {
    const int64_t step = job.source_strides(0)[x];
    const char* from = job.places()[0] + begin(job.source_strides(0)) + quick * size + slow * step;
#pragma unroll together
    for (uint32_t i = slow; i < side; i += rows, from += rows * step)
      if (i < xs) held[i * row + quick] = gt_read<size>(from);
  }
  gt_sync();
  if (quick >= xs) return;
  const int to = job.to, targets = job.targets;
#pragma unroll 1
  for (int t = 0; t < targets; t++) {
    const int64_t* strides = job.target_strides(t);
    const int64_t step = strides[y];
    char* target = job.places()[1 + t] + begin(strides) + quick * strides[x] + slow * step;
#pragma unroll 4
    for (uint32_t i = slow; i < side; i += rows, target += rows * step)
      if (i < ys) Store::store(to, target, held[quick * row + (gt_planted(GT_BAD_TURN) ? 0 : i)]);
  }
}

}  // namespace gt_tiles
