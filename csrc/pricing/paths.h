// One dim split along several axes, one after the other: its parts, by arithmetic (layouts/paths.py).
//
// `sizes` say into how many parts each of `depth` axes splits, outermost first; `digits` which part is meant on each,
// and kAny every one.
#pragma once
#include <stdint.h>

#include <algorithm>

namespace gt::pricing {

constexpr int64_t kAny = -1;

struct Range {
  int64_t start, stop;
};

inline Range split_range(int64_t n, int64_t parts, int64_t index) {
  const int64_t size = n / parts, more = n % parts, start = index * size + std::min(index, more);
  return {start, start + size + (index < more)};
}

inline Range part_at(int64_t n, int depth, const int64_t* sizes, const int64_t* digits) {
  Range part{0, n};
  for (int i = 0; i < depth; i++) {
    const Range own = split_range(part.stop - part.start, sizes[i], digits[i]);
    part = {part.start + own.start, part.start + own.stop};
  }
  return part;
}

// In which of its parts element `at` of n is.
inline int64_t index_at(int64_t n, int64_t parts, int64_t at) {
  const int64_t size = n / parts, more = n % parts;
  return at < more * (size + 1) ? at / (size + 1) : (at - more) / size;
}

// How many elements of the range `within` are in the parts of [0:n) with these digits.
inline int64_t overlap(int64_t n, int depth, const int64_t* sizes, const int64_t* digits, Range within) {
  const int64_t low = std::max<int64_t>(within.start, 0), high = std::min(within.stop, n);
  if (low >= high) return 0;
  if (std::all_of(digits, digits + depth, [](int64_t digit) { return digit == kAny; })) return high - low;
  const auto inner = [&](int64_t n, Range within) { return overlap(n, depth - 1, sizes + 1, digits + 1, within); };
  const int64_t parts = sizes[0];
  if (digits[0] != kAny) {
    const Range own = split_range(n, parts, digits[0]);
    return inner(own.stop - own.start, {low - own.start, high - own.start});
  }
  const int64_t first = index_at(n, parts, low), last = index_at(n, parts, high - 1);
  const Range one = split_range(n, parts, first), other = split_range(n, parts, last);
  int64_t total = inner(one.stop - one.start, {low - one.start, high - one.start});
  if (last > first) total += inner(other.stop - other.start, {0, high - other.start});
  // whole parts between the two, of the larger size and of the other
  const int64_t size = n / parts, more = n % parts;
  const int64_t large = std::max<int64_t>(std::min(last, more) - first - 1, 0);
  const int64_t small = std::max<int64_t>(last - first - 1, 0) - large;
  if (large) total += large * inner(size + 1, {0, size + 1});
  if (small) total += small * inner(size, {0, size});
  return total;
}

}  // namespace gt::pricing
