#include "boxing.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <chrono>

#include "../common/arena_tensor.h"
#include "../common/dtype_code.h"
#include "../common/tensor_memory.h"
#include "call_site.h"
#include "host.h"
#include "lineage.h"

namespace py = pybind11;

namespace gt {
namespace {

std::atomic<bool> watched{false};

at::Tensor empty_shard(const BoxingStep& step, size_t nth) {
  const auto& sizes = step.sizes[nth];
  at::Tensor shard = host_transport()                // also quicker than malloc
                         ? arena_empty(sizes, step.result->dtype)
                         : at::detail::empty_cpu(sizes, step.result->dtype, false, std::nullopt);
  if (!step.strides.empty()) shard.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, step.strides[nth]);
  return shard;
}

// Does a shard lie in memory as the new one of that place would?
bool lies_as_new(const at::Tensor& shard, const BoxingStep& step, size_t nth) {
  return step.strides.empty() ? shard.is_contiguous() : shard.strides().equals(step.strides[nth]);
}

// Are the old shards the new ones, as along axes of one rank?
bool is_unmoved(const ShardMove& move, const BoxingStep& step, const Shards& shards) {
  if (!move.may_share || !step.unmoved) return false;
  for (size_t nth = 0; nth < shards.size(); nth++)
    if (!lies_as_new(shards[nth], step, nth)) return false;
  return true;
}

void fill_shard(gt_shard& shard, const at::Tensor& t) {
  shard.data = memory_of(t);
  std::copy(t.strides().begin(), t.strides().end(), shard.stride);
}

// One process, all ranks: a pass over its own memory.
void move_within_process(const BoxingStep& step, const Spec* before, const Shards& old_shards,
                         const Shards& new_shards) {
  thread_local std::vector<gt_shard> sources, targets;
  size_t size = 1;
  for (int64_t rank : before->ranks) size = std::max<size_t>(size, rank + 1);
  for (int64_t rank : step.result->ranks) size = std::max<size_t>(size, rank + 1);
  if (sources.size() < size) sources.resize(size), targets.resize(size);
  for (size_t i = 0; i < old_shards.size(); i++) fill_shard(sources[before->ranks[i]], old_shards[i]);
  for (size_t i = 0; i < new_shards.size(); i++) fill_shard(targets[step.result->ranks[i]], new_shards[i]);
  const int failed = gt_reduce(step.regions.data(), step.regions.size(), step.corners.data(), step.op, sources.data(),
                               dtype_code(before->dtype), targets.data(), dtype_code(step.result->dtype));
  TORCH_CHECK_TYPE(!failed, "partial values of dtype ", before->dtype, " cannot be reduced");
}

// What is moved from where to where, for errors.
std::string text_of_moves(const std::vector<ShardMove>& moves) {
  py::gil_scoped_acquire lock;
  const Boxing& first = *moves[0].boxing;
  const py::object source = py::reinterpret_borrow<py::object>(first.source->object());
  const py::object result = py::reinterpret_borrow<py::object>(first.result()->object());
  const std::string more = moves.size() > 1 ? ", and " + std::to_string(moves.size() - 1) + " more" : "";
  return " of " + std::string(py::str(source)) + " -> " + std::string(py::str(result.attr("layout"))) + more;
}

// What one rank of a host does at once: a step of every boxing that has one left.
struct HostMoves {
  c10::SmallVector<gt_program, 4> programs;
  c10::SmallVector<gt_move, 4> moves;

  void add(const BoxingStep& step, const Spec* before, const Shards& old_shards, const Shards& new_shards) {
    programs.push_back({step.regions.data(), int64_t(step.regions.size()), step.corners.data(), step.op,
                        int32_t(step.partners.size()), step.partners.data(), step.ties.data()});
    gt_move move;
    move.ndim = before->sizes.size();
    move.source = move.target = nullptr;
    if (!old_shards.empty() && old_shards[0].numel()) {
      const at::Tensor& source = old_shards[0];
      move.source = memory_of(source);
      std::copy(source.sizes().begin(), source.sizes().end(), move.source_size);
      std::copy(source.strides().begin(), source.strides().end(), move.source_stride);
    }
    if (!new_shards.empty() && new_shards[0].numel()) {
      const at::Tensor& target = new_shards[0];
      move.target = memory_of(target);
      std::copy(target.strides().begin(), target.strides().end(), move.target_stride);
    }
    move.source_dtype = dtype_code(before->dtype);
    move.target_dtype = dtype_code(step.result->dtype);
    moves.push_back(move);
  }
  void run(uint64_t agreement, const Purpose& what, const std::vector<ShardMove>& of) {
    for (size_t i = 0; i < moves.size(); i++) moves[i].program = &programs[i];
    WatchedWait wait(what.text, agreement, programs);
    const uint64_t site = call_site(what.is_explicit ? CallSite::outside : CallSite::innermost);
    const int status = gt_run_moves(host_transport(), moves.data(), moves.size(), agreement, site, wait.hooks());
    if (status == GT_OK) return wait.rethrow();
    note_boxed(of);
    raise_if_failed(status, "the boxing for " + what.text + text_of_moves(of), &wait);
  }
};

// ---- boxings and shards from Python

template <class T>
std::vector<T> structs_from(const py::dict& fields, const char* name) {
  const auto packed = fields[name].cast<std::string>();
  TORCH_CHECK(packed.size() % sizeof(T) == 0, "a program of ", packed.size(), " bytes does not fit its structs");
  std::vector<T> structs(packed.size() / sizeof(T));
  if (!packed.empty()) memcpy(structs.data(), packed.data(), packed.size());
  return structs;
}

BoxingStep step_from(const py::dict& fields) {
  BoxingStep step;
  step.regions = structs_from<gt_region>(fields, "regions");
  step.corners = structs_from<gt_corner>(fields, "corners");
  step.op = fields["op"].cast<int>();
  step.partners = fields["partners"].cast<std::vector<int32_t>>();
  step.ties = fields["ties"].cast<std::vector<uint8_t>>();
  step.result = spec_of(py::object(fields["result"]).ptr());
  step.sizes = fields["sizes"].cast<std::vector<std::vector<int64_t>>>();
  step.strides = fields["strides"].cast<std::vector<std::vector<int64_t>>>();
  step.reusable = fields["reusable"].cast<bool>();
  step.unmoved = fields["unmoved"].cast<bool>();
  return step;
}

std::shared_ptr<Boxing> make_boxing(const py::object& source, const py::list& steps, const std::string& agreed,
                                    bool completes) {
  auto boxing = std::make_shared<Boxing>();
  boxing->source = spec_of(source.ptr());
  for (auto step : steps) boxing->steps.push_back(step_from(step.cast<py::dict>()));
  boxing->agreement = hash_text(agreed);
  boxing->completes = completes;
  return boxing;
}

py::dict dict_of(const Spec* spec, const Shards& shards) {
  py::dict by_rank;
  for (size_t i = 0; i < shards.size(); i++) by_rank[py::int_(spec->ranks[i])] = shards[i];
  return by_rank;
}

// [(boxing, {rank: shard}), ...]
struct MoveItems {
  std::vector<ShardMove> moves;
  std::vector<Shards> shards;

  explicit MoveItems(const py::list& items) : shards(items.size()) {
    for (size_t i = 0; i < items.size(); i++) {
      auto item = items[i].cast<py::tuple>();
      auto* boxing = item[0].cast<const Boxing*>();
      auto by_rank = item[1].cast<py::dict>();
      for (int64_t rank : boxing->source->ranks) {
        PyObject* shard = PyDict_GetItem(by_rank.ptr(), py::int_(rank).ptr());
        if (!shard && by_rank.empty()) break;
        TORCH_CHECK_VALUE(shard && THPVariable_Check(shard), "no shard for rank ", rank);
        shards[i].push_back(THPVariable_Unpack(shard));
      }
      moves.push_back({boxing, &shards[i]});
    }
  }
};

py::list python_move_shards(const py::list& items, const std::string& what, const std::vector<uint64_t>& lineages) {
  MoveItems parsed(items);
  TORCH_CHECK_VALUE(lineages.size() == parsed.moves.size(), "a lineage for each move");
  for (size_t i = 0; i < lineages.size(); i++) parsed.moves[i].lineage = lineages[i];
  auto moved = move_shards_unseen(parsed.moves, Purpose(what));
  py::list results;
  for (size_t i = 0; i < moved.size(); i++) results.append(dict_of(parsed.moves[i].boxing->result(), moved[i]));
  return results;
}

// Does nobody else see the memory of these shards, and do they lie as the new ones would?
bool may_write_over(GlobalImpl* impl, const Boxing& boxing) {
  if (impl->view.call || boxing.steps.size() != 1 || !boxing.steps[0].reusable) return false;
  const BoxingStep& step = boxing.steps[0];
  for (size_t nth = 0; nth < impl->kept().size(); nth++) {
    const at::Tensor& t = impl->kept()[nth];
    if (t.use_count() != 1 || t.storage().use_count() != 1 || t.is_conj() || t.is_neg()) return false;
    if (host_transport() && t.numel() && !gt_in_arena(t.const_data_ptr())) return false;  // partners write there
    if (!lies_as_new(t, step, nth)) return false;
  }
  return true;
}

// A gradient is mostly its own only holder: then it is reduced where it lies, and takes no more memory.
void redistribute_in_place(const std::vector<std::pair<std::shared_ptr<Boxing>, at::Tensor>>& items,
                           const std::string& what) {
  std::vector<ShardMove> moves;
  HeldShards held;
  for (const auto& [boxing, t] : items) {
    TORCH_CHECK(global(t)->spec == boxing->source, "a boxing for another spec");
    const bool in_place = may_write_over(global(t), *boxing);
    moves.push_back({boxing.get(), &global(t)->shards(held), global(t)->lineage, in_place});
  }
  auto moved = move_shards(moves, Purpose(what));
  for (size_t i = 0; i < moved.size(); i++) {
    GlobalImpl* impl = global(items[i].second);
    impl->take_spec(moves[i].boxing->result());
    impl->view = {};
    impl->kept() = std::move(moved[i]);
  }
}

// `fresh`: the sources are written before each, and the time that writing alone takes is left out.
double time_moves(const py::list& items, const std::string& what, int64_t times, bool fresh) {
  MoveItems parsed(items);
  const Purpose purpose(what);
  auto now = [] { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); };
  auto write = [&] {
    for (const Shards& shards : parsed.shards)
      for (const at::Tensor& t : shards) memset(memory_of(t), 0, t.nbytes());
  };
  double began = now();
  for (int64_t i = 0; fresh && i < times; i++) write();
  const double writing = now() - began;
  began = now();
  for (int64_t i = 0; i < times; i++) {
    if (fresh) write();
    move_shards_unseen(parsed.moves, purpose);
  }
  return now() - began - writing;
}

}  // namespace

bool boxing_watched() { return watched.load(std::memory_order_relaxed); }

Purpose::Purpose(std::string text)
    : text(std::move(text)), agreement(hash_text(this->text)), is_explicit(this->text == "to_global") {}

std::vector<Shards> move_shards_unseen(const std::vector<ShardMove>& moves, const Purpose& what) {
  std::vector<Shards> now, next;
  size_t steps = 0;
  for (const ShardMove& move : moves) {
    now.push_back(*move.shards);
    for (at::Tensor& shard : now.back())             // what reads the memory knows no such bits
      if (C10_UNLIKELY(shard.is_conj() || shard.is_neg())) shard = shard.resolve_conj().resolve_neg();
    steps = std::max(steps, move.boxing->steps.size());
  }
  uint64_t agreement = what.agreement;
  for (const ShardMove& move : moves) {
    agreement = agreement * 0x9E3779B97F4A7C15u + move.boxing->agreement;
    if (lineages_kept && !call_lineage) mix(agreement, move.lineage);
  }
  if (call_lineage) mix(agreement, call_lineage);
  for (size_t k = 0; k < steps; k++) {
    HostMoves together;
    next = now;
    for (size_t i = 0; i < moves.size(); i++) {
      if (moves[i].boxing->steps.size() <= k) continue;
      const BoxingStep& step = moves[i].boxing->steps[k];
      if (is_unmoved(moves[i], step, now[i])) continue;
      if (!moves[i].in_place) {
        next[i].clear();
        for (size_t nth = 0; nth < step.result->ranks.size(); nth++) next[i].push_back(empty_shard(step, nth));
      }
      const Spec* before = k ? moves[i].boxing->steps[k - 1].result : moves[i].boxing->source;
      if (host_transport())
        together.add(step, before, now[i], next[i]);
      else
        move_within_process(step, before, now[i], next[i]);
    }
    if (!together.moves.empty()) together.run(agreement + k, what, moves);
    now = std::move(next);
  }
  return now;
}

size_t bytes_of(const Boxing& boxing) {
  size_t bytes = sizeof(Boxing) + boxing.steps.size() * sizeof(BoxingStep);
  for (const BoxingStep& step : boxing.steps) {
    bytes += step.regions.size() * sizeof(gt_region) + step.corners.size() * sizeof(gt_corner);
    for (const auto& numbers : step.sizes) bytes += sizeof(numbers) + numbers.size() * sizeof(int64_t);
    for (const auto& numbers : step.strides) bytes += sizeof(numbers) + numbers.size() * sizeof(int64_t);
    bytes += step.partners.size() * (sizeof(int32_t) + 1);
  }
  return bytes;
}

std::shared_ptr<const Boxing> boxing_from(py::object object) { return object.cast<std::shared_ptr<Boxing>>(); }

void bind_boxing(py::module_& m) {
  py::class_<Boxing, std::shared_ptr<Boxing>>(m, "Boxing", "A boxing of tensors of one spec, ready to run.")
      .def(py::init(&make_boxing))
      .def("__sizeof__", [](const Boxing& boxing) { return bytes_of(boxing); });
  m.def("move_shards", &python_move_shards, "The shards of every item in its new layout, moved together.");
  m.def("redistribute_in_place", &redistribute_in_place, "Move tensors to their new layouts in place, together.");
  m.def("time_moves", &time_moves, "Seconds that so many boxings take, for benchmarks.");
  m.def("set_boxings_watched", [](bool on) { watched = on; }, "Boxings go through Python while someone watches them.");
  m.def("arena_empty", [](std::vector<int64_t> sizes, c10::ScalarType dtype) { return arena_empty(sizes, dtype); },
        "An uninitialized tensor in memory that the other ranks of the host read in place.");
  m.def("in_arena", [](const at::Tensor& t) { return bool(gt_in_arena(t.data_ptr())); });
}

}  // namespace gt
