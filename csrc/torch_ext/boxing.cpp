#include "boxing.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <chrono>

#include "site.h"
#include "waiting.h"

namespace py = pybind11;

namespace gt {
namespace {

gt_transport* transport = nullptr;                 // null: this process drives all ranks
std::atomic<bool> watched{false};
PyObject* on_failure = nullptr;                    // (disagreed, what, rank to blame, text): raises

int dtype_code(c10::ScalarType dtype) {
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
    default: return GT_RAW16;
  }
}

at::Tensor empty_shard(const Step& step, size_t nth) {
  const auto& sizes = step.sizes[nth];
  if (transport) return shared_empty(sizes, step.result->dtype);  // also quicker than malloc
  return at::detail::empty_cpu(sizes, step.result->dtype, false, std::nullopt);
}

void fill_shard(gt_shard& shard, const at::Tensor& t) {
  shard.data = memory_of(t);
  std::copy(t.strides().begin(), t.strides().end(), shard.stride);
}

// One process, all ranks: a pass over its own memory.
void run_alone(const Step& step, const Spec* before, const Shards& held, const Shards& made) {
  thread_local std::vector<gt_shard> sources, targets;
  size_t size = 1;
  for (int64_t rank : before->ranks) size = std::max<size_t>(size, rank + 1);
  for (int64_t rank : step.result->ranks) size = std::max<size_t>(size, rank + 1);
  if (sources.size() < size) sources.resize(size), targets.resize(size);
  for (size_t i = 0; i < held.size(); i++) fill_shard(sources[before->ranks[i]], held[i]);
  for (size_t i = 0; i < made.size(); i++) fill_shard(targets[step.result->ranks[i]], made[i]);
  const int failed = gt_reduce(step.regions.data(), step.regions.size(), step.corners.data(), step.op, sources.data(),
                               dtype_code(before->dtype), targets.data(), dtype_code(step.result->dtype));
  TORCH_CHECK_TYPE(!failed, "partial values of dtype ", before->dtype, " cannot be reduced");
}

// One rank of a host.
struct Meeting {
  c10::SmallVector<gt_program, 4> programs;
  c10::SmallVector<gt_move, 4> moves;

  void add(const Step& step, const Spec* before, const Shards& held, const Shards& made) {
    programs.push_back({step.regions.data(), int64_t(step.regions.size()), step.corners.data(), step.op,
                        int32_t(step.partners.size()), step.partners.data(), step.ties.data()});
    gt_move move;
    move.ndim = before->sizes.size();
    move.source = move.target = nullptr;
    if (!held.empty() && held[0].numel()) {
      move.source = memory_of(held[0]);
      std::copy(held[0].sizes().begin(), held[0].sizes().end(), move.source_size);
      std::copy(held[0].strides().begin(), held[0].strides().end(), move.source_stride);
    }
    if (!made.empty() && made[0].numel()) {
      move.target = memory_of(made[0]);
      std::copy(made[0].strides().begin(), made[0].strides().end(), move.target_stride);
    }
    move.source_dtype = dtype_code(before->dtype);
    move.target_dtype = dtype_code(step.result->dtype);
    moves.push_back(move);
  }
  int run(uint64_t agreement, const std::string& what) {
    for (size_t i = 0; i < moves.size(); i++) moves[i].program = &programs[i];
    Waiting waiting(what, agreement, programs);
    return gt_box(transport, moves.data(), moves.size(), agreement, call_site(), waiting.hooks());
  }
};

std::string bytes_of(const py::dict& given, const char* name) { return given[name].cast<std::string>(); }

template <class T>
std::vector<T> structs(const std::string& packed) {
  TORCH_CHECK(packed.size() % sizeof(T) == 0, "a program of ", packed.size(), " bytes does not fit its structs");
  std::vector<T> found(packed.size() / sizeof(T));
  memcpy(found.data(), packed.data(), packed.size());
  return found;
}

Step step_from(const py::dict& given) {
  Step step;
  step.regions = structs<gt_region>(bytes_of(given, "regions"));
  step.corners = structs<gt_corner>(bytes_of(given, "corners"));
  step.op = given["op"].cast<int>();
  step.partners = given["partners"].cast<std::vector<int32_t>>();
  step.ties = given["ties"].cast<std::vector<uint8_t>>();
  step.result = spec_of(py::object(given["result"]).ptr());
  step.sizes = given["sizes"].cast<std::vector<std::vector<int64_t>>>();
  return step;
}

std::shared_ptr<Boxing> make_boxing(const py::object& source, const py::list& steps, const std::string& agreed) {
  auto boxing = std::make_shared<Boxing>();
  boxing->source = spec_of(source.ptr());
  for (auto step : steps) boxing->steps.push_back(step_from(step.cast<py::dict>()));
  boxing->agreement = hash_text(agreed);
  return boxing;
}

py::dict dict_of(const Spec* spec, const Shards& shards) {
  py::dict found;
  for (size_t i = 0; i < shards.size(); i++) found[py::int_(spec->ranks[i])] = shards[i];
  return found;
}

// [(boxing, {rank: shard}), ...]
struct Items {
  std::vector<Move> moves;
  std::vector<Shards> held;
};

Items items_from(const py::list& items) {
  Items found;
  auto& [moves, held] = found;
  held.resize(items.size());
  for (size_t i = 0; i < items.size(); i++) {
    auto item = items[i].cast<py::tuple>();
    auto* boxing = item[0].cast<const Boxing*>();
    auto shards = item[1].cast<py::dict>();
    for (int64_t rank : boxing->source->ranks) {
      PyObject* shard = PyDict_GetItem(shards.ptr(), py::int_(rank).ptr());
      if (!shard && shards.empty()) break;
      TORCH_CHECK_VALUE(shard && THPVariable_Check(shard), "no shard for rank ", rank);
      held[i].push_back(THPVariable_Unpack(shard));
    }
    moves.push_back({boxing, &held[i]});
  }
  return found;
}

py::list python_box(const py::list& items, const std::string& what) {
  Items given = items_from(items);
  auto made = box(given.moves, what);
  py::list found;
  for (size_t i = 0; i < made.size(); i++) found.append(dict_of(given.moves[i].boxing->result(), made[i]));
  return found;
}

// Each tensor itself comes to lie as its boxing says.
void box_in_place(const std::vector<std::pair<std::shared_ptr<Boxing>, at::Tensor>>& items, const std::string& what) {
  std::vector<Move> moves;
  for (const auto& [boxing, t] : items) moves.push_back({boxing.get(), &global(t)->shards});
  auto made = box(moves, what);
  for (size_t i = 0; i < made.size(); i++) {
    GlobalImpl* impl = global(items[i].second);
    impl->spec = moves[i].boxing->result();
    impl->shards = std::move(made[i]);
    impl->set_sizes_and_strides(impl->spec->sizes, impl->spec->strides);
  }
}

// Seconds that so many boxings take, for benchmarks. `fresh`: the sources are written before each, and the time that
// writing alone takes is left out.
double python_repeat(const py::list& items, const std::string& what, int64_t times, bool fresh) {
  Items given = items_from(items);
  auto now = [] { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); };
  auto write = [&] {
    for (const Shards& shards : given.held)
      for (const at::Tensor& t : shards) memset(t.data_ptr(), 0, t.nbytes());
  };
  double began = now();
  for (int64_t i = 0; fresh && i < times; i++) write();
  const double writing = now() - began;
  began = now();
  for (int64_t i = 0; i < times; i++) {
    if (fresh) write();
    box(given.moves, what);
  }
  return now() - began - writing;
}

}  // namespace

gt_transport* host() { return transport; }

void check(int status, const std::string& what) {
  if (status == GT_OK) return;
  py::gil_scoped_acquire lock;
  if (PyErr_Occurred()) throw python_error();        // Ctrl-C, or what the watch found
  char text[1024] = "";
  const int rank = transport ? gt_blame(transport, text, sizeof text) : -1;
  const char* how = status == GT_DISAGREED || status == GT_DEADLOCKED ? "disagreed" : status == GT_STOPPED ? "stopped" : "lost";
  PyObject* result = PyObject_CallFunction(on_failure, "ssis", how, what.c_str(), rank, text);
  Py_XDECREF(result);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, text);
  throw python_error();
}

uint64_t hash_text(const std::string& text) {
  uint64_t h = 0xCBF29CE484222325u;                 // FNV-1a: the same number in every process
  for (unsigned char c : text) h = (h ^ c) * 0x100000001B3u;
  return h;
}

at::Tensor shared_empty(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  void* data = bytes ? gt_alloc(bytes) : nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, data || !bytes, "no shared memory left for ", bytes, " bytes");
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, data, &gt_free, c10::Device(c10::kCPU)),
                       nullptr, false);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                             c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return made;
}

bool boxing_watched() { return watched.load(std::memory_order_relaxed); }

std::vector<Shards> box(const std::vector<Move>& moves, const std::string& what) {
  std::vector<Shards> now, held;
  size_t steps = 0;
  for (const Move& move : moves) {
    held.push_back(*move.shards);
    steps = std::max(steps, move.boxing->steps.size());
  }
  uint64_t agreement = hash_text(what);
  for (const Move& move : moves) agreement = agreement * 0x9E3779B97F4A7C15u + move.boxing->agreement;
  for (size_t k = 0; k < steps; k++) {
    Meeting meeting;
    now = held;
    for (size_t i = 0; i < moves.size(); i++) {
      if (moves[i].boxing->steps.size() <= k) continue;
      const Step& step = moves[i].boxing->steps[k];
      now[i].clear();
      for (size_t nth = 0; nth < step.result->ranks.size(); nth++) now[i].push_back(empty_shard(step, nth));
      const Spec* before = k ? moves[i].boxing->steps[k - 1].result : moves[i].boxing->source;
      if (transport)
        meeting.add(step, before, held[i], now[i]);
      else
        run_alone(step, before, held[i], now[i]);
    }
    if (transport) check(meeting.run(agreement + k, what), what);
    held = std::move(now);
  }
  return held;
}

std::shared_ptr<const Boxing> boxing_from(py::object given) { return given.cast<std::shared_ptr<Boxing>>(); }

void bind_boxing(py::module_& m) {
  py::class_<Boxing, std::shared_ptr<Boxing>>(m, "Boxing", "A boxing of tensors of one spec, ready to run.")
      .def(py::init(&make_boxing));
  m.def("move_shards", &python_box, "The shards of every item in its new layout, moved together.");
  m.def("redistribute_in_place", &box_in_place, "Move tensors to their new layouts in place, together.");
  m.def("time_moves", &python_repeat, "Seconds that so many boxings take.");
  m.def("set_boxings_watched", [](bool on) { watched = on; }, "Boxings go through Python while someone watches them.");
  m.def("arena_empty", [](std::vector<int64_t> sizes, c10::ScalarType dtype) { return shared_empty(sizes, dtype); });
  m.def("in_arena", [](const at::Tensor& t) { return bool(gt_in_arena(t.data_ptr())); });
  m.def("open_transport", [](int rank, int ranks, double timeout) {
    char error[512] = "";
    transport = gt_open(rank, ranks, timeout, error, sizeof error);
    TORCH_CHECK(transport, error);
    return std::string(gt_address(transport));
  }, "Open this rank's side of the shared memory of a host; gives the address that the other ranks need.");
  m.def("connect_transport", [](const std::vector<std::string>& addresses) {
    std::vector<const char*> names;
    for (const auto& address : addresses) names.push_back(address.c_str());
    check(gt_connect(transport, names.data()), "meeting over shared memory");
  });
  m.def("leave_transport", [](const std::string& how) { if (transport) gt_leave(transport, how.c_str()); });
  m.def("close_transport", [] { if (transport) gt_close(transport); transport = nullptr; });
  m.def("report", [](const std::string& text) { gt_tell(transport, text.c_str()); });
  m.def("collect_reports", [](int ranks, double seconds) {
    constexpr size_t kEach = 1024;
    std::vector<char> texts(ranks * kEach);
    {
      py::gil_scoped_release free;
      gt_told(transport, seconds, texts.data(), kEach);
    }
    std::vector<std::string> found;
    for (int r = 0; r < ranks; r++) found.emplace_back(texts.data() + r * kEach);
    return found;
  });
  m.def("on_failure", [](py::object hook) { on_failure = hook.release().ptr(); });
  m.def("on_waiting", [](py::object enter, py::object leave, py::object found) { Waiting::hook(enter, leave, found); });
}

}  // namespace gt
