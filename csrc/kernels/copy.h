// Copying a grid of elements between two places of any strides.
#pragma once
#include <stdint.h>

namespace gt::boxing {

struct Side {
  int64_t row, column;  // steps, in bytes
};

// rows x columns elements of `item` bytes: to[r][c] = from[r][c]. `stream` stores long rows past the caches.
void copy_grid(char* to, Side to_step, const char* from, Side from_step, int64_t rows, int64_t columns, int item,
               bool stream);
void zero_grid(char* to, Side step, int64_t rows, int64_t columns, int item);
void copy_run(char* to, const char* from, int64_t bytes, bool stream);

}  // namespace gt::boxing
