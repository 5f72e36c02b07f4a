// torch's dtypes as those of the kernels.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "dtype.h"

namespace gt {

// A dtype that kernels cannot reduce is one to copy, by its size.
inline int dtype_code(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat: return GT_F32;
    case c10::kDouble: return GT_F64;
    case c10::kHalf: return GT_F16;
    case c10::kBFloat16: return GT_BF16;
    case c10::kChar: return GT_I8;
    case c10::kShort: return GT_I16;
    case c10::kInt: return GT_I32;
    case c10::kLong: return GT_I64;
    case c10::kByte: return GT_U8;
    case c10::kBool: return GT_BOOL;
    case c10::kComplexFloat: return GT_C64;
    case c10::kComplexDouble: return GT_C128;
    default: break;
  }
  switch (c10::elementSize(dtype)) {
    case 1: return GT_RAW1;
    case 2: return GT_RAW2;
    case 4: return GT_RAW4;
    case 8: return GT_RAW8;
    case 16: return GT_RAW16;
    default: TORCH_CHECK_TYPE(false, "globaltensor: cannot move tensors of ", dtype);
  }
}

}  // namespace gt
