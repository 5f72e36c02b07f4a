// The global tensor as torch sees it: a TensorImpl without memory that carries its spec and the shards of this process.
//
// Its Python class is set when it is made. It also carries a dispatch key above autocast and autograd that no other
// tensor has: by it our tensors are told from all others with one bit, and `linear`, `matmul`, `einsum` and `embedding` are
// taken before torch decomposes them.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace gt {

constexpr auto kGlobal = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// What a global tensor is without its data: the twin of layout.Spec, one per Python object, kept for good.
struct Spec {
  PyObject* object;                    // the Python Spec
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  c10::DeviceType device;
  std::vector<int64_t> ranks;          // the ranks of its placement that this process drives, ascending
  bool copied;                         // a view that had to be boxed: its guard must be checked
  bool rows_cut;                       // dim 0 is split
  bool pending;                        // a partial sum, max or min on some axis
};

const Spec* spec_of(PyObject* object);  // with the interpreter's lock

using Shards = c10::SmallVector<at::Tensor, 1>;  // in the order of the spec's ranks; empty on ranks without any

struct GlobalImpl final : c10::TensorImpl {
  const Spec* spec;
  Shards shards;
  int64_t guard = -1;                  // of a boxed view: the version of what it was made from

  GlobalImpl(const Spec* spec, Shards shards);
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version, bool allow) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version, bool allow) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& from) override;
  void release_resources() override;
  const char* tensorimpl_type_name() const override { return "GlobalImpl"; }
};

inline bool is_global(const c10::TensorImpl* impl) { return impl->key_set().has(kGlobal); }
inline GlobalImpl* global(const at::Tensor& t) { return static_cast<GlobalImpl*>(t.unsafeGetTensorImpl()); }

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

at::Tensor wrap(const Spec* spec, Shards shards);  // with its Python class; takes the interpreter's lock itself

void bind_tensor(pybind11::module_& m);
void bind_gradients(pybind11::module_& m);

}  // namespace gt
