// Boxed views: making them, reading them, and counting the writes that make what was read out of date.
#include "boxed_view.h"

#include "lineage.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace py = pybind11;

namespace gt {

struct MemoryWrites {
  const c10::StorageImpl* storage;
  std::atomic<int64_t> count{0};
  explicit MemoryWrites(const c10::StorageImpl* storage) : storage(storage) {}
  ~MemoryWrites();

  void add_one() {
    count++;
    if (C10_LIKELY(!is_awaited.load(std::memory_order_acquire))) return;
    const py::gil_scoped_acquire lock;
    if (const py::object call = await_next(py::none()); !call.is_none()) call();
  }
  // Calls this at the next write, once; gives what was to be called till now. With the interpreter's lock.
  py::object await_next(py::object call) {
    is_awaited = !call.is_none();
    return std::exchange(on_next_write, std::move(call));
  }

 private:
  std::atomic<bool> is_awaited{false};
  py::object on_next_write = py::none();
};

namespace {

struct WatchedMemory {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<MemoryWrites>> by_storage;
  std::atomic<size_t> size{0};                     // a write looks no further where there is none
};

WatchedMemory& watched_memory() {
  static auto* all = new WatchedMemory();
  return *all;
}

py::handle do_call;                                // (op, arguments) -> the shards of every result

std::shared_ptr<ViewCall> view_call(const c10::OperatorHandle& op, Stack arguments,
                                    std::shared_ptr<const Recipe> recipe) {
  at::Tensor base = global(arguments[0].toTensor())->alias();
  auto memory = watched_writes(global(base));
  arguments[0] = std::move(base);
  return std::make_shared<ViewCall>(op, std::move(arguments), std::move(recipe), std::move(memory), call_lineage);
}

at::Tensor result_of(const std::shared_ptr<ViewCall>& call, size_t nth, const Spec* spec) {
  at::Tensor view = wrap(spec, Shards(global(call->arguments[0].toTensor())->kept()));  // for the device
  global(view)->view = {call, nth, -1};
  return view;
}

py::tuple arguments_of(const ViewCall& call) {
  py::tuple values(call.arguments.size());
  for (size_t i = 0; i < call.arguments.size(); i++) values[i] = torch::jit::toPyObject(call.arguments[i]);
  return values;
}

void make_in_python(ViewCall& call, const Spec* spec) {
  py::gil_scoped_acquire lock;
  py::object results = do_call(torch::detail::getTorchApiFunction(call.op), arguments_of(call));
  call.results.clear();
  for (py::handle shards : results) call.results.push_back(shards_from(spec, shards.ptr()));
}

at::Tensor slice_of(const at::Tensor& shard, const Recipe::Slice& slice) {
  int64_t first = shard.storage_offset();
  for (size_t d = 0; d < slice.start.size(); d++) first += slice.start[d] * shard.stride(d);
  std::vector<int64_t> strides;
  for (size_t k = 0; k < slice.dims.size(); k++)
    strides.push_back(slice.dims[k] < 0 ? 1 : slice.steps[k] * shard.stride(slice.dims[k]));
  return shard.as_strided(slice.size, strides, first);
}

// Where a view runs straight along its base, slices of the shards are boxed, and not the base.
std::vector<Shards> boxed_slices(const Recipe& recipe, const at::Tensor& base) {
  HeldShards held;
  const Shards& shards = global(base)->shards(held);
  Shards slices;
  for (size_t nth = 0; nth < recipe.slices.size(); nth++) slices.push_back(slice_of(shards[nth], recipe.slices[nth]));
  return move_shards({{recipe.slices_boxing.get(), &slices}}, recipe.purpose);
}

// Does every part stay where it is, in a `view` at these sizes? Twin: `parts_stay` in algorithms/aliasing.py.
bool parts_stay(const Spec& of, std::vector<int64_t> sizes) {
  const auto product = [](const std::vector<int64_t>& some, size_t end) {
    return std::accumulate(some.begin(), some.begin() + end, int64_t(1), std::multiplies<>());
  };
  const int64_t count = product(of.sizes, of.sizes.size());
  if (const auto open = std::find(sizes.begin(), sizes.end(), -1); open != sizes.end() && count)
    *open = count / -product(sizes, sizes.size());
  for (size_t d = 0; d < of.sizes.size(); d++) {
    if (of.parts[d] == 1) continue;
    const int64_t before = product(of.sizes, d);
    size_t at = 0;
    while (at < sizes.size() && (product(sizes, at) < before || sizes[at] == 1)) at++;
    if (!count || at == sizes.size() || product(sizes, at) != before) return false;
    const int64_t all = of.sizes[d], outer = std::min(all, sizes[at]), inner = std::max(all, sizes[at]);
    if (all != sizes[at] && (inner % outer || outer % of.parts[d])) return false;
  }
  return true;
}

bool is_view_op(const c10::OperatorHandle& op) {
  return op.schema().name() == "aten::view" && op.schema().overload_name().empty();
}

// The native way, below all that global tensors went through.
std::vector<Shards> make_natively(ViewCall& call) {
  c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  Stack arguments = call.arguments;
  const bool sliced = call.recipe->slices_boxing != nullptr;
  auto results = sliced ? boxed_slices(*call.recipe, arguments[0].toTensor())
                        : local_results(call.op, *call.recipe, arguments);
  const auto& specs = call.recipe->outputs[0].specs;
  for (size_t i = 0; i < results.size(); i++)
    for (at::Tensor& shard : results[i]) shard = in_order_of(*specs[i], shard);
  return results;
}

// Does the call. `spec` is that of one of its results, all of which are on the same ranks.
void make_results(ViewCall& call, const Spec* spec, int64_t now) {
  LineageScope as_called(call.lineage);
  if (call.recipe && !(call.recipe->has_boxings && boxing_watched())) {
    call.results = make_natively(call);
  } else {
    make_in_python(call, spec);
  }
  call.taken.assign(call.results.size(), false);
  call.writes_when_made = now;
}

py::list python_boxed_views(const py::list& specs, const std::string& name, const std::string& overload,
                            const py::tuple& values) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  Stack arguments;
  for (size_t i = 0; i < values.size(); i++)
    arguments.push_back(torch::jit::toIValue(values[i], op.schema().arguments()[i].real_type()));
  std::optional<c10::InferenceMode> mode;
  mode_of_view(arguments[0].toTensor(), mode);
  auto call = view_call(op, std::move(arguments), nullptr);
  py::list views;
  for (size_t i = 0; i < specs.size(); i++) views.append(result_of(call, i, spec_of(specs[i].ptr())));
  return views;
}

// t is what the view is: its spec, its memory or its origin.
void become(const at::Tensor& t, const at::Tensor& view) {
  auto *to = global(t), *from = global(view);
  to->take_spec(from->spec);
  to->take_value(*from);
}

}  // namespace

MemoryWrites::~MemoryWrites() {
  if (Py_IsInitialized()) {
    const py::gil_scoped_acquire lock;
    on_next_write = py::object();
  } else {
    on_next_write.release();                         // the program has ended
  }
  if (!storage) return;
  auto& all = watched_memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto at = all.by_storage.find(storage);
  if (at != all.by_storage.end() && at->second.expired()) all.by_storage.erase(at);
  all.size = all.by_storage.size();
}

std::shared_ptr<MemoryWrites> watched_writes(GlobalImpl* base) {
  if (base->view.call) return base->view.call->memory;
  if (base->kept().empty()) return std::make_shared<MemoryWrites>(nullptr);  // this process holds nothing of it
  const auto* storage = base->kept()[0].storage().unsafeGetStorageImpl();
  auto& all = watched_memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& known = all.by_storage[storage];
  auto memory = known.lock();
  if (!memory) known = memory = std::make_shared<MemoryWrites>(storage);
  all.size = all.by_storage.size();
  return memory;
}

static std::shared_ptr<MemoryWrites> known_writes(const c10::StorageImpl* storage) {
  auto& all = watched_memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto at = all.by_storage.find(storage);
  return at == all.by_storage.end() ? nullptr : at->second.lock();
}

int64_t writes_to(const MemoryWrites& memory) { return memory.count; }

Shards GlobalImpl::read_view() {
  ViewCall& call = *view.call;
  const ViewLock lock(call);
  const int64_t now = call.memory->count;
  if (view.writes_when_made == now) return shards_;
  if (call.writes_when_made != now || call.taken[view.nth]) make_results(call, spec, now);
  shards_ = std::move(call.results[view.nth]);
  call.taken[view.nth] = true;
  view.writes_when_made = now;
  return shards_;
}

ValueLock::ValueLock(const GlobalImpl& of) {
  if (of.view.call) view_.emplace(*of.view.call);
  if (C10_UNLIKELY(of.is_arriving.load(std::memory_order_acquire))) interpreter_.emplace();
}

at::Tensor GlobalImpl::alias() const {
  const ValueLock lock(*this);
  at::Tensor same = wrap(spec, Shards(shards_));
  auto* impl = global(same);
  impl->set_arriving(arriving);
  impl->view = view;
  impl->lineage = lineage;
  return same;
}

void GlobalImpl::take_value(const GlobalImpl& other) {
  const ValueLock lock(other);
  shards_ = other.shards_;
  set_arriving(other.arriving);
  view = other.view;
  lineage = other.lineage;
}

void push_boxed_views(const c10::OperatorHandle& op, std::shared_ptr<const Recipe> recipe, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  Stack arguments(std::make_move_iterator(stack->begin() + first), std::make_move_iterator(stack->end()));
  stack->resize(first);
  std::optional<c10::InferenceMode> mode;
  mode_of_view(arguments[0].toTensor(), mode);
  const auto& output = recipe->outputs[0];
  auto call = view_call(op, std::move(arguments), recipe);
  if (!output.is_list) {
    stack->emplace_back(result_of(call, 0, output.specs[0]));
    return;
  }
  c10::List<at::Tensor> views;
  for (size_t i = 0; i < output.specs.size(); i++) views.push_back(result_of(call, i, output.specs[i]));
  stack->emplace_back(std::move(views));
}

bool take_base(Stack* stack) {
  const c10::IValue *args = stack->data() + stack->size() - 2;
  auto* view = global(args[0].toTensor());
  if (!view->view.call || !is_view_op(view->view.call->op)) return false;
  const at::Tensor base = view->view.call->arguments[0].toTensor();
  if (!parts_stay(*global(base)->spec, args[1].toIntVector())) return false;
  view->viewed.store(true, std::memory_order_relaxed);
  (*stack)[stack->size() - 2] = base;
  return true;
}

std::vector<int64_t> sizes_of_rows(const at::Tensor& x) {
  const auto& call = global(x)->view.call;
  if (!call || !is_view_op(call->op)) return {};
  const Spec& base = *global(call->arguments[0].toTensor())->spec;
  std::vector<int64_t> sizes;
  int64_t rest = x.size(0);
  for (size_t d = 0; d < base.sizes.size() && rest > 1 && base.sizes[d] && rest % base.sizes[d] == 0; d++) {
    sizes.push_back(base.sizes[d]);
    rest /= base.sizes[d];
  }
  if (rest > 1) sizes.push_back(rest);
  sizes.push_back(x.size(1));
  // a view of two dims is no parting: its rows would be asked for again, for ever
  return sizes.size() > 2 && parts_stay(base, sizes) ? sizes : std::vector<int64_t>();
}

void note_write(const at::Tensor& t) {
  if (!watched_memory().size) return;
  auto* impl = global(t);
  if (impl->view.call) {
    impl->view.call->memory->add_one();
  } else if (!impl->kept().empty()) {
    if (auto memory = known_writes(impl->kept()[0].storage().unsafeGetStorageImpl())) memory->add_one();
  }
}

py::object origin_of(const BoxedView& view) {
  static PyObject* origin = nullptr;   // set below: an import may let in another thread, which would wait for a static
  if (!origin) {
    const py::object cls = py::module_::import("globaltensor.algorithms.aliasing").attr("Origin");
    origin = py::object(cls).release().ptr();
  }
  return py::handle(origin)(torch::detail::getTorchApiFunction(view.call->op), arguments_of(*view.call), view.nth);
}

void bind_boxed_views(py::module_& m) {
  m.def("boxed_views", &python_boxed_views, "The results of a view op that boxes its base, made when they are read.");
  m.def("on_view_read", [](py::object hook) { do_call = hook.release(); },
        "What does the call of a boxed view that the native dispatcher has no recipe for.");
  m.def("note_write", &note_write, "Count a write to the memory of a tensor.");
  py::class_<MemoryWrites, std::shared_ptr<MemoryWrites>>(py::handle(), "MemoryWrites")
      .def_property_readonly("count", &writes_to)
      .def("await_next", [](MemoryWrites& of, py::object call) { of.await_next(std::move(call)); },
           "Call this at the next write, once; None: nothing.");
  static const auto unheld = std::make_shared<MemoryWrites>(nullptr);  // of a process that holds nothing of a tensor
  m.def("watched_writes", [](const at::Tensor& t) {
    return global(t)->view.call || !global(t)->kept().empty() ? watched_writes(global(t)) : unheld;
  },
        "What counts the writes to the memory of a tensor, as long as it is held.");
  m.def("become", &become, "Let a tensor be what a view is.");
}

}  // namespace gt
