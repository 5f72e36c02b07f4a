// The dtypes and reductions that kernels know, by number. Their Python twin is `_CODES` of runtime/philox.py.
#pragma once

enum gt_dtype {
  GT_F32, GT_F64, GT_F16, GT_BF16, GT_I8, GT_I16, GT_I32, GT_I64, GT_U8, GT_BOOL, GT_C64, GT_C128,
  GT_RAW1, GT_RAW2, GT_RAW4, GT_RAW8, GT_RAW16,  // of that many bytes: can be copied, not reduced or cast
  GT_DTYPES
};
enum gt_op { GT_SUM, GT_MAX, GT_MIN };

// What a library of kernels that is built with hidden symbols shows.
#if defined(_WIN32)
#define GT_EXPORT
#else
#define GT_EXPORT __attribute__((visibility("default")))
#endif
