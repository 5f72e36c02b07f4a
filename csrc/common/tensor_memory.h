// The memory of a plain tensor, for code that goes round torch's own checks.
#pragma once
#include <ATen/core/Tensor.h>

namespace gt {

// A plain tensor without memory that we can read: meta, a wrapper of another tensor, a storage that was freed.
inline bool without_memory(const c10::TensorImpl* impl) {
  const auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return (!storage || !const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks()) && impl->numel();
}

// The memory of a plain tensor on the CPU, null where it has no elements. Raises where there is none, whoever asks.
inline char* memory_of(const at::Tensor& t) {
  if (!t.numel()) return nullptr;
  TORCH_CHECK(t.is_cpu() && !without_memory(t.unsafeGetTensorImpl()), "a tensor on ", t.device(), " of ", t.sizes(),
              " has no memory that the CPU can read");
  return static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
}

}  // namespace gt
