// Making global tensors, and what Python sees of them: `spec`, `shards` and `origin`.
#include "tensor.h"

#include "boxed_view.h"
#include "completed.h"
#include "recipe.h"

#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <mutex>

namespace py = pybind11;

namespace gt {
namespace {

PyTypeObject* python_class = nullptr;  // GlobalTensor

// While torch.compile traces, a global tensor is a wrapper made in Python, whose sizes may be symbols. It has the class
// but not our key: what it is made of stands in its __dict__, and its properties are those of Python.
PyObject* python_shards = nullptr;     // the properties that ours stand before
PyObject* python_origin = nullptr;
PyObject* wrap_traced = nullptr;       // (spec, shards) -> such a wrapper

bool is_traced(PyObject* self) { return !is_global(THPVariable_Unpack(self).unsafeGetTensorImpl()); }

PyObject* traced_item(PyObject* self, const char* name) {
  auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(self, nullptr));
  PyObject* item = dict ? PyDict_GetItemString(dict.ptr(), name) : nullptr;
  if (!item) PyErr_Format(PyExc_AttributeError, "a global tensor without %s", name);
  Py_XINCREF(item);
  return item;
}

int set_traced_item(PyObject* self, const char* name, PyObject* value) {
  auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(self, nullptr));
  return dict ? PyDict_SetItemString(dict.ptr(), name, value) : -1;
}

PyObject* traced_property(PyObject* self, PyObject* property) {
  return PyObject_CallMethod(property, "__get__", "O", self);
}

c10::DispatchKeySet keys_of(c10::DeviceType device) {
  return c10::DispatchKeySet({c10::computeDispatchKey(c10::kFloat, c10::kStrided, c10::Device(device)), kGlobal});
}

int8_t device_here = 0;                              // of this process, which has no part of some tensors

c10::Device device_of(const Spec* spec, const Shards& shards) {
  if (!shards.empty()) return shards[0].device();
  const bool only_one = spec->device == c10::kCPU || spec->device == c10::kMeta;
  return only_one ? c10::Device(spec->device) : c10::Device(spec->device, device_here);
}

// Memory of the right size that is not there, as torch's own wrappers have it. Who would read it or write to it in C++
// gets this error; torch.jit.save would go on with a null pointer.
constexpr const char* kNoMemory =
    "torch.jit.save, DLPack or other code in C++ that reads the memory of a global tensor: it has no memory of "
    "its own; try a module of plain tensors (x.full_tensor()), gt.save, or the shards: x.shards[rank]";

c10::Storage no_memory(const Spec* spec, const Shards& shards) {
  const size_t bytes = spec->like->numel() * c10::elementSize(spec->dtype);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device_of(spec, shards)), nullptr,
                       false);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  return storage;
}

// The Python object exists from the start, as torch would make one of class torch.Tensor when first asked.
void attach(const at::Tensor& t) {
  PyObject* object = THPVariable_Wrap(t);
  PyTypeObject* before = Py_TYPE(object);
  Py_INCREF(python_class);
  Py_SET_TYPE(object, python_class);
  Py_DECREF(before);
  Py_DECREF(object);
}

PyObject* get_spec(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  if (C10_UNLIKELY(is_traced(self))) return traced_item(self, "spec");
  PyObject* spec = global(THPVariable_Unpack(self))->spec->object();
  Py_INCREF(spec);
  return spec;
  END_HANDLE_TH_ERRORS
}

int set_spec(PyObject* self, PyObject* value, void*) {
  HANDLE_TH_ERRORS
  if (is_traced(self)) return set_traced_item(self, "spec", value);
  auto* impl = global(THPVariable_Unpack(self));
  impl->take_spec(spec_of(value));
  if (!impl->spec->copied) impl->view = {};
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

PyObject* get_shards(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  if (C10_UNLIKELY(is_traced(self))) return traced_property(self, python_shards);
  auto* impl = global(THPVariable_Unpack(self));
  py::dict shards;
  HeldShards held;
  const Shards& own = impl->shards(held);
  for (size_t i = 0; i < own.size(); i++) shards[py::int_(impl->spec->ranks[i])] = own[i];
  return shards.release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

Shards shards_from(const Spec* spec, PyObject* dict) {
  TORCH_CHECK_TYPE(PyDict_Check(dict), "shards are a dict rank -> tensor, got ", Py_TYPE(dict)->tp_name);
  Shards shards;
  if (PyDict_Size(dict) == 0) return shards;
  for (int64_t rank : spec->ranks) {
    PyObject* shard = PyDict_GetItem(dict, py::int_(rank).ptr());
    TORCH_CHECK_VALUE(shard && THPVariable_Check(shard), "no shard for rank ", rank);
    shards.push_back(THPVariable_Unpack(shard));
  }
  return shards;
}

namespace {

int set_shards(PyObject* self, PyObject* value, void*) {
  HANDLE_TH_ERRORS
  if (is_traced(self)) return set_traced_item(self, "_shards", value) | set_traced_item(self, "completed", Py_None);
  auto* impl = global(THPVariable_Unpack(self));
  impl->view = {};
  impl->set_arriving(nullptr);
  impl->forget_completed();
  impl->kept() = shards_from(impl->spec, value);
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

PyObject* get_origin(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  if (is_traced(self)) return traced_property(self, python_origin);
  const BoxedView& view = global(THPVariable_Unpack(self))->view;
  if (!view.call) Py_RETURN_NONE;
  return origin_of(view).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* get_arriving(PyObject* self, void*) {
  if (is_traced(self)) Py_RETURN_NONE;
  const auto& arriving = global(THPVariable_Unpack(self))->arriving;
  PyObject* object = arriving ? arriving->object() : Py_None;
  Py_INCREF(object);
  return object;
}

int set_arriving(PyObject* self, PyObject* value, void*) {
  HANDLE_TH_ERRORS
  global(THPVariable_Unpack(self))->set_arriving(value == Py_None ? nullptr
                                                                  : std::make_shared<ArrivingShards>(value));
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

PyObject* get_lineage(PyObject* self, void*) {
  if (is_traced(self)) return PyLong_FromLong(0);    // nothing is known of what a graph computes
  return PyLong_FromUnsignedLongLong(global(THPVariable_Unpack(self))->lineage);
}

int set_lineage(PyObject* self, PyObject* value, void*) {
  if (is_traced(self)) return 0;
  const uint64_t lineage = PyLong_AsUnsignedLongLong(value);
  if (PyErr_Occurred()) return -1;
  global(THPVariable_Unpack(self))->lineage = lineage;
  return 0;
}

PyGetSetDef properties[] = {
    {"spec", get_spec, set_spec, "layout, shape, stride and dtype", nullptr},
    {"shards", get_shards, set_shards, "the parts this process drives, rank -> plain tensor", nullptr},
    {"arriving", get_arriving, set_arriving, "the boxing under way whose shards these will be, or None", nullptr},
    {"lineage", get_lineage, set_lineage, "a hash of all that made the value; 0 where nothing is known", nullptr},
    {"origin", get_origin, nullptr, "the call that made a boxed view; None of other tensors", nullptr},
};

// Are these shards fake, or functional? Then torch.compile traces.
bool is_of_a_trace(PyObject* shards) {
  PyObject *rank, *shard;
  Py_ssize_t at = 0;
  return PyDict_Check(shards) && PyDict_Next(shards, &at, &rank, &shard) && THPVariable_Check(shard) &&
         THPVariable_Unpack(shard).unsafeGetTensorImpl()->is_python_dispatch();
}

PyObject* python_wrap(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "wrap(spec, shards)");
  if (C10_UNLIKELY(is_of_a_trace(args[1]))) return PyObject_CallFunctionObjArgs(wrap_traced, args[0], args[1], nullptr);
  const SpecRef spec = spec_of(args[0]);
  return THPVariable_Wrap(wrap(spec, shards_from(spec, args[1])));
  END_HANDLE_TH_ERRORS
}

PyMethodDef wrap_method = {"wrap", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(python_wrap)), METH_FASTCALL,
                           "A global tensor of these shards; nothing is checked."};

}  // namespace

constexpr c10::DispatchKeySet kLazyBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

GlobalImpl::GlobalImpl(const Spec* spec)
    : c10::TensorImpl(keys_of(spec->device), c10::scalarTypeToTypeMeta(spec->dtype), c10::Device(spec->device)) {
  lie_as(spec);
}

// What follows from sizes and strides is worked out once for each spec, not for each result of a small op.
GlobalImpl::GlobalImpl(const Spec* spec, Shards&& held)
    : c10::TensorImpl(no_memory(spec, held), keys_of(spec->device), spec->like->dtype()),
      spec(spec), shards_(std::move(held)) {
  const auto& like = static_cast<const GlobalImpl&>(*spec->like);
  sizes_and_strides_ = like.sizes_and_strides_;
  numel_ = like.numel_;
  is_contiguous_ = like.is_contiguous_;
  is_channels_last_ = like.is_channels_last_;
  is_channels_last_contiguous_ = like.is_channels_last_contiguous_;
  is_channels_last_3d_ = like.is_channels_last_3d_;
  is_channels_last_3d_contiguous_ = like.is_channels_last_3d_contiguous_;
  is_non_overlapping_and_dense_ = like.is_non_overlapping_and_dense_;
  key_set_ = key_set_ | (like.key_set_ & kLazyBits);
  set_python_dispatch(true);
}

void GlobalImpl::lie_as(const Spec* other) {
  set_sizes_and_strides(other->sizes, other->strides);
  _set_conj(other->conjugated);
  _set_neg(other->negated);
}

GlobalImpl::~GlobalImpl() = default;

ArrivingShards::ArrivingShards(PyObject* of) : of_(of) { Py_INCREF(of_); }

ArrivingShards::~ArrivingShards() {
  if (!Py_IsInitialized()) return;                   // the program has ended
  py::gil_scoped_acquire lock;
  Py_DECREF(of_);
}

const Shards& ArrivingShards::read(const Spec* spec) {
  py::gil_scoped_acquire lock;                       // read() gives it back while it waits
  if (!shards_) {
    Shards arrived = shards_from(spec, py::handle(of_).attr("read")().ptr());
    if (!shards_) shards_ = std::move(arrived);
  }
  return *shards_;
}

void GlobalImpl::await_shards() {
  py::gil_scoped_acquire lock;
  const auto one = arriving;                         // which another thread may take away while this one waits
  if (!one) return;
  const Shards& arrived = one->read(spec);
  if (arriving != one) return;
  shards_ = arrived;
  set_arriving(nullptr);
}

void GlobalImpl::set_arriving(std::shared_ptr<ArrivingShards> one) {
  const bool any = one != nullptr;
  arriving = std::move(one);
  is_arriving.store(any, std::memory_order_release);
}

void GlobalImpl::take_spec(const Spec* other) {
  lie_as(other);
  spec = other;
  forget_completed();
}

// Autograd keeps the result of an op by such a copy. A mode sees it as the op `detach`, as with torch's own tensors: a
// tracer that did not would take the value it traces with for a constant.
GlobalImpl::Pointer GlobalImpl::copied_by_mode() const {
  using Modes = c10::impl::TorchDispatchModeTLS;
  const int64_t modes = Modes::stack_len();
  if (modes == 0 || c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) return {};
  return Modes::get_stack_at(modes - 1)->pyinterpreter()->detach(this);
}

GlobalImpl::Pointer GlobalImpl::shallow_copy_and_detach(const c10::VariableVersion& version, bool allow) const {
  Pointer copy = copied_by_mode();
  if (!copy) {
    copy = alias().getIntrusivePtr();
    static_cast<GlobalImpl&>(*copy).key_set_ = key_set_;   // of inference mode where this one is
  }
  if (!copy->is_inference()) copy->set_version_counter(version);
  copy->set_allow_tensor_metadata_change(allow);
  return copy;
}

GlobalImpl::Pointer GlobalImpl::shallow_copy_and_detach(c10::VariableVersion&& version, bool allow) const {
  return shallow_copy_and_detach(version, allow);
}

void GlobalImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& from) {
  TORCH_CHECK_TYPE(is_global(from.get()), "the data of a global tensor must be a global tensor");
  if (from.get() == this) return;                    // `p.data = p`, as `module.to` has it where nothing changes
  c10::TensorImpl::shallow_copy_from(from);
  const auto* other = static_cast<const GlobalImpl*>(from.get());
  spec = other->spec;
  take_value(*other);
  forget_completed();
}

void GlobalImpl::release_resources() {
  shards_.clear();
  set_arriving(nullptr);
  forget_completed();
  view = {};
  c10::TensorImpl::release_resources();
}

// torch.profiler with record_shapes asks for the address of each operand, and loses the op where that raises: while one
// runs, it is null.
const c10::Storage& GlobalImpl::storage() const {
  static std::mutex one;
  if (auto* memory = storage_.unsafeGetStorageImpl()) {
    const bool recorded = at::hasCallbacks();
    std::lock_guard<std::mutex> lock(one);
    const bool raises = memory->get_extra_meta().custom_data_ptr_error_msg_.has_value();
    if (recorded && raises) memory->clear_data_ptr_access_error_msg_();
    if (!recorded && !raises) memory->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  }
  return storage_;
}

static void claim_all_ops() {
  [[maybe_unused]] static const bool claimed = (claim_ops(), claim_views(), true);
}

at::Tensor wrap(const Spec* spec, Shards&& shards) {
  claim_all_ops();                                   // with the first one
  at::Tensor t(c10::make_intrusive<GlobalImpl>(spec, std::move(shards)));
  PyGILState_STATE state = PyGILState_Ensure();      // a call faster than pybind11's
  attach(t);
  PyGILState_Release(state);
  return t;
}

void bind_tensor(py::module_& m) {
  bind_completed(m);
  m.def("set_device_here", [](int8_t index) { device_here = index; },
        "The device that tensors name of which this process has no part.");
  m.def("claim_ops", &claim_all_ops,
        "What is done once, with the first global tensor: ahead, for forks of this process.");
  m.def("bind_class", [](py::object cls, py::object traced) {
    python_shards = py::object(cls.attr("shards")).release().ptr();
    python_origin = py::object(cls.attr("origin")).release().ptr();
    wrap_traced = traced.release().ptr();
    python_class = reinterpret_cast<PyTypeObject*>(cls.release().ptr());
    for (auto& property : properties) {
      py::object descriptor = py::reinterpret_steal<py::object>(PyDescr_NewGetSet(python_class, &property));
      auto* cls = reinterpret_cast<PyObject*>(python_class);
      TORCH_CHECK(PyObject_SetAttrString(cls, property.name, descriptor.ptr()) == 0);
    }
  });
  m.attr("wrap") = py::reinterpret_steal<py::object>(PyCFunction_New(&wrap_method, nullptr));
}

namespace {

// May `to.data = from` be done, and may a module change its parameter that way? Never between a global tensor and a
// plain one.
bool may_take_data(const at::Tensor& to, const at::Tensor& from) {
  auto* impl = to.unsafeGetTensorImpl();
  if (!is_global(impl) || !is_global(from.unsafeGetTensorImpl())) return false;
  return impl->has_compatible_shallow_copy_type(from.key_set());
}

}  // namespace
}  // namespace gt

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  m.impl("_has_compatible_shallow_copy_type", &gt::may_take_data);
}

// Ops without a kernel of ours at this key pass by it, at no cost.
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
