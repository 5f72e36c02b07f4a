// Tensors in the arena, where peers read and write them.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include "arena_memory.h"

namespace gt {

// Uninitialized and contiguous. Built from its parts: at::empty with another allocator takes several times as long.
inline at::Tensor arena_empty(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  void* data = bytes ? gt_alloc(bytes) : nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, data || !bytes, "globaltensor: no shared memory left for ", bytes, " bytes");
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(data, data, &gt_free, c10::Device(c10::kCPU)), nullptr, false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

inline at::Tensor arena_empty_like(const at::Tensor& t) { return arena_empty(t.sizes(), t.scalar_type()); }

}  // namespace gt
