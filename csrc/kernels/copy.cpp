// Copying a grid of elements between two places of any strides, by one of three ways:
//
//     rows          both sides run along the row: memcpy of each, and for short rows two overlapping loads and stores
//     transposed    one side runs along the row, the other along the column: small squares turned in registers, in
//                   blocks as wide as a cache line, so that every line is read and written whole
//     scattered     neither: one element at a time
#include "copy.h"

#include <string.h>

#include <algorithm>

#include "loops.h"

#if GT_X86
#include <emmintrin.h>
#endif

namespace gt::boxing {

static constexpr int64_t LINE = 64;                  // bytes of a cache line
static constexpr int64_t STREAMED = 2048;            // shorter runs are not worth streaming

typedef uint8_t v16 __attribute__((vector_size(16)));
template <int N> struct many { v16 part[N / 16]; };

template <class X> static inline X load(const char* at) {
  X x;
  memcpy(&x, at, sizeof x);
  return x;
}

void copy_run(char* to, const char* from, int64_t bytes, bool stream) {
  if (stream && bytes >= STREAMED) loops.stream_copy(to, from, bytes);
  else memcpy(to, from, bytes);
}

// ---- rows
// Rows of sizeof(X) to 2 sizeof(X) bytes: the first and the last sizeof(X) of them, which may overlap.
template <class X>
static void short_rows(char* to, int64_t to_row, const char* from, int64_t from_row, int64_t rows, int64_t bytes) {
  const int64_t last = bytes - static_cast<int64_t>(sizeof(X));
  for (int64_t r = 0; r < rows; r++, to += to_row, from += from_row) {
    X a = load<X>(from), b = load<X>(from + last);
    memcpy(to, &a, sizeof a);
    memcpy(to + last, &b, sizeof b);
  }
}

static void copy_rows(char* to, int64_t to_row, const char* from, int64_t from_row, int64_t rows, int64_t bytes,
                      bool stream) {
  if (rows == 1 || (to_row == bytes && from_row == bytes)) return copy_run(to, from, rows * bytes, stream);
  if (bytes >= 128)
    for (int64_t r = 0; r < rows; r++) copy_run(to + r * to_row, from + r * from_row, bytes, stream);
  else if (bytes >= 64) short_rows<many<64>>(to, to_row, from, from_row, rows, bytes);
  else if (bytes >= 32) short_rows<many<32>>(to, to_row, from, from_row, rows, bytes);
  else if (bytes >= 16) short_rows<v16>(to, to_row, from, from_row, rows, bytes);
  else if (bytes >= 8) short_rows<uint64_t>(to, to_row, from, from_row, rows, bytes);
  else if (bytes >= 4) short_rows<uint32_t>(to, to_row, from, from_row, rows, bytes);
  else if (bytes >= 2) short_rows<uint16_t>(to, to_row, from, from_row, rows, bytes);
  else short_rows<uint8_t>(to, to_row, from, from_row, rows, bytes);
}

// ---- scattered
template <class T>
static void scattered(char* to, Side ts, const char* from, Side fs, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++, to += ts.row, from += fs.row) {
    char* t = to;
    const char* f = from;
    for (int64_t c = 0; c < columns; c++, t += ts.column, f += fs.column) memcpy(t, f, sizeof(T));
  }
}

// ---- transposed
template <class T> struct square {                   // of N x N elements, a vector a row
  static constexpr int N = 16 / sizeof(T);
  typedef T row __attribute__((vector_size(16)));
};
template <> struct square<v16> {
  static constexpr int N = 1;
  typedef v16 row;
};

// a0 b0 a1 b1 ..., of the first halves of a and b, or of the second ones
template <class T, bool SECOND>
static inline typename square<T>::row interleave(typename square<T>::row a, typename square<T>::row b) {
  typedef typename square<T>::row row;
#if GT_X86
  const __m128i x = (__m128i)a, y = (__m128i)b;
  if constexpr (sizeof(T) == 1) return (row)(SECOND ? _mm_unpackhi_epi8(x, y) : _mm_unpacklo_epi8(x, y));
  if constexpr (sizeof(T) == 2) return (row)(SECOND ? _mm_unpackhi_epi16(x, y) : _mm_unpacklo_epi16(x, y));
  if constexpr (sizeof(T) == 4) return (row)(SECOND ? _mm_unpackhi_epi32(x, y) : _mm_unpacklo_epi32(x, y));
  if constexpr (sizeof(T) == 8) return (row)(SECOND ? _mm_unpackhi_epi64(x, y) : _mm_unpacklo_epi64(x, y));
#endif
  constexpr int HALF = square<T>::N / 2;
  row out = a;
  for (int i = 0; i < HALF; i++) out[2 * i] = a[i + SECOND * HALF], out[2 * i + 1] = b[i + SECOND * HALF];
  return out;
}

// A square turned in registers.
template <class T>
static inline __attribute__((always_inline)) void turn(char* to, int64_t to_row, const char* from,
                                                       int64_t from_column) {
  constexpr int N = square<T>::N;
  typedef typename square<T>::row row;
  row a[N], b[N];
  for (int i = 0; i < N; i++) a[i] = load<row>(from + i * from_column);
  if constexpr (N > 1) {
    for (int width = 1; width < N; width *= 2) {     // each round halves how far a row is from its place
      for (int i = 0; i < N / 2; i++) {
        b[2 * i] = interleave<T, false>(a[i], a[i + N / 2]);
        b[2 * i + 1] = interleave<T, true>(a[i], a[i + N / 2]);
      }
      for (int i = 0; i < N; i++) a[i] = b[i];
    }
  }
  for (int i = 0; i < N; i++) memcpy(to + i * to_row, &a[i], sizeof(row));
}

// A block as wide as a line on both sides, by way of a buffer: so every line is read whole and written whole, and it
// does no harm that those of a large matrix fall on the same few places of a cache.
template <class T, bool STREAM>
static inline void block(char* to, int64_t to_row, const char* from, int64_t from_column) {
  constexpr int64_t N = square<T>::N, B = LINE / sizeof(T), S = sizeof(T);
  alignas(LINE) char room[B * LINE];
  for (int64_t c = 0; c < B; c += N)
    for (int64_t r = 0; r < B; r += N)
      turn<T>(room + r * LINE + c * S, LINE, from + r * S + c * from_column, from_column);
  for (int64_t r = 0; r < B; r++)
    for (int64_t i = 0; i < LINE; i += 16) {
#if GT_X86
      if constexpr (STREAM) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + r * to_row + i), load<__m128i>(room + r * LINE + i));
        continue;
      }
#endif
      memcpy(to + r * to_row + i, room + r * LINE + i, 16);
    }
}

// `to` runs along the row (a column is sizeof(T) further), `from` along the column.
template <class T>
static void transposed(char* to, int64_t to_row, const char* from, int64_t from_column, int64_t rows, int64_t columns,
                       bool stream) {
  constexpr int64_t B = LINE / sizeof(T), S = sizeof(T);
  const int64_t whole_rows = rows - rows % B;
  int64_t c = 0;
  if (stream && to_row % LINE == 0) {                // whole lines of the target can be streamed
    c = std::min<int64_t>(columns, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & (LINE - 1)) / S);
    stream = reinterpret_cast<uintptr_t>(to + c * S) % LINE == 0;
    scattered<T>(to, {to_row, S}, from, {S, from_column}, whole_rows, c);
  } else {
    stream = false;
  }
  for (; c + B <= columns; c += B)                   // along the source, whose lines are what one waits for
    for (int64_t r = 0; r < whole_rows; r += B) {
      char* t = to + r * to_row + c * S;
      const char* f = from + r * S + c * from_column;
      if (stream) block<T, true>(t, to_row, f, from_column);
      else block<T, false>(t, to_row, f, from_column);
    }
  scattered<T>(to + c * S, {to_row, S}, from + c * from_column, {S, from_column}, whole_rows, columns - c);
  scattered<T>(to + whole_rows * to_row, {to_row, S}, from + whole_rows * S, {S, from_column}, rows - whole_rows,
               columns);
}

template <class T>
static void strided(char* to, Side ts, const char* from, Side fs, int64_t rows, int64_t columns, bool stream) {
  constexpr int64_t S = sizeof(T);
  if (ts.column == S && fs.row == S && rows > 1)
    return transposed<T>(to, ts.row, from, fs.column, rows, columns, stream);
  if (ts.row == S && fs.column == S && columns > 1)
    return transposed<T>(to, ts.column, from, fs.row, columns, rows, stream);
  scattered<T>(to, ts, from, fs, rows, columns);
}

void copy_grid(char* to, Side ts, const char* from, Side fs, int64_t rows, int64_t columns, int item, bool stream) {
  if (ts.column == item && fs.column == item) return copy_rows(to, ts.row, from, fs.row, rows, columns * item, stream);
  switch (item) {
    case 1: return strided<uint8_t>(to, ts, from, fs, rows, columns, stream);
    case 2: return strided<uint16_t>(to, ts, from, fs, rows, columns, stream);
    case 4: return strided<uint32_t>(to, ts, from, fs, rows, columns, stream);
    case 8: return strided<uint64_t>(to, ts, from, fs, rows, columns, stream);
    default: return strided<v16>(to, ts, from, fs, rows, columns, stream);
  }
}

void zero_grid(char* to, Side ts, int64_t rows, int64_t columns, int item) {
  if (ts.column == item && ts.row == item * columns) columns *= rows, rows = 1;
  for (int64_t r = 0; r < rows; r++, to += ts.row) {
    if (ts.column == item) memset(to, 0, columns * item);
    else
      for (int64_t c = 0; c < columns; c++) memset(to + c * ts.column, 0, item);
  }
}

}  // namespace gt::boxing
