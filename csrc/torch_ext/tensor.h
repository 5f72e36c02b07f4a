// The global tensor as torch sees it: a TensorImpl without memory that carries its spec and the shards of this process.
//
// Its Python class is set when it is made. It also carries a dispatch key above autocast and autograd that no other
// tensor has: by it one bit tells our tensors from all others, and `linear`, `matmul`, `einsum` and `embedding` are
// taken before torch decomposes them.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <forward_list>
#include <memory>
#include <optional>
#include <vector>

#include "spec.h"

namespace gt {

constexpr auto kGlobal = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

using Shards = c10::SmallVector<at::Tensor, 1>;  // in the order of the spec's ranks; empty on ranks without any
using HeldShards = std::forward_list<Shards>;    // as long as they are used

struct ViewCall;
struct Completed;

// What a boxed view knows (boxed_view.h): of which call it is which result, and as of which write its shards are.
struct BoxedView {
  std::shared_ptr<ViewCall> call;
  size_t nth = 0;
  int64_t writes_when_made = -1;
};

// Shards that a boxing under way will give, to all tensors of its value: whoever needs them first waits.
class ArrivingShards {
 public:
  explicit ArrivingShards(PyObject* of);             // an object whose read() gives a dict rank -> tensor
  ~ArrivingShards();
  const Shards& read(const Spec* spec);
  PyObject* object() const { return of_; }

 private:
  PyObject* of_;
  std::optional<Shards> shards_;
};

struct GlobalImpl final : c10::TensorImpl {
  SpecRef spec;                        // none in a spec's `like`, which the spec holds
  BoxedView view;                      // of other tensors without a call
  std::shared_ptr<ArrivingShards> arriving;  // until they are needed; the interpreter's lock guards it
  std::atomic<bool> is_arriving{false};
  std::atomic<bool> viewed{false};     // a view was made of it
  uint64_t lineage = 0;                // of its value (lineage.h); 0: nothing is known of it
  std::atomic<bool> is_completed{false};
  std::unique_ptr<Completed> completed;  // of a pending one, with nothing pending (completed.h)

  explicit GlobalImpl(const Spec* spec);             // a new spec's `like`
  GlobalImpl(const Spec* spec, Shards&& shards);
  ~GlobalImpl() override;
  void take_spec(const Spec* other);
  void forget_completed();
  // The parts that this process drives, for any thread. Those of a boxed view are made now, unless they were since the
  // last write, and kept by `held`: another thread may write elsewhere, and make them anew while these are used.
  const Shards& shards(HeldShards& held) {
    if (C10_UNLIKELY(view.call != nullptr)) return held.emplace_front(read_view());
    return kept();
  }
  Shards& kept() {                     // without making them
    if (C10_UNLIKELY(is_arriving.load(std::memory_order_acquire))) await_shards();
    return shards_;
  }
  at::Tensor alias() const;            // another tensor of the same memory, that no autograd knows
  void take_value(const GlobalImpl& other);
  void set_arriving(std::shared_ptr<ArrivingShards> one);
  using Pointer = c10::intrusive_ptr<c10::TensorImpl>;
  Pointer shallow_copy_and_detach(const c10::VariableVersion& version, bool allow) const override;
  Pointer shallow_copy_and_detach(c10::VariableVersion&& version, bool allow) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& from) override;
  void release_resources() override;
  const char* tensorimpl_type_name() const override { return "GlobalImpl"; }
  const c10::Storage& storage() const override;

 private:
  Shards read_view();
  Pointer copied_by_mode() const;      // none where no mode is active
  void await_shards();
  void lie_as(const Spec* other);      // sizes, strides and lazy bits

  Shards shards_;
};

inline bool is_global(const c10::TensorImpl* impl) { return impl->key_set().has(kGlobal); }
inline GlobalImpl* global(const at::Tensor& t) { return static_cast<GlobalImpl*>(t.unsafeGetTensorImpl()); }

// Does forward AD follow this tensor?
inline bool has_tangent(const at::Tensor& t) { return t.defined() && t._fw_grad(0).defined(); }
// Does a transform of torch.func (grad, vmap, jvp) run on this thread?
inline bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

Shards shards_from(const Spec* spec, PyObject* dict);  // a dict rank -> tensor; empty where there is none
at::Tensor wrap(const Spec* spec, Shards&& shards);  // with its Python class; takes the interpreter's lock itself

void bind_tensor(pybind11::module_& m);
void bind_gradient_hook(pybind11::module_& m);
void bind_boxed_views(pybind11::module_& m);
void bind_turned_views(pybind11::module_& m);

}  // namespace gt
