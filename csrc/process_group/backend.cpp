// What the backend is and what it hands to gloo; and all-reduce, by far its most used collective.
#include "process_group/backend.h"

#include <ATen/ATen.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <optional>

#include "common/arena_tensor.h"
#include "process_group/bind.h"

namespace gt::collective {
namespace {

// Up to here the transport copies every shard before it is read, wherever it is: results may be written in place.
constexpr int64_t kCopied = 64 * 1024;
// What is not in the arena is copied, so much at a time that it stays in the cache.
constexpr int64_t kPiece = 512 * 1024;

}  // namespace

// ---- the backend

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Time timeout,
                 c10::intrusive_ptr<c10d::Backend> gloo)
    : c10d::Backend(rank, size), context_{nullptr, Programs(rank, size)}, gloo_(std::move(gloo)) {
  options_ = c10::make_intrusive<Options>("globaltensor", timeout);
  context_.group = Group::connect(store, rank, size, timeout, why_);
}

const std::string Backend::getBackendName() const {
  return context_.group || why_.empty() ? "globaltensor" : "globaltensor (all by gloo)";
}

std::string Backend::transport() const {
  return why_.empty() ? "shared memory; gloo for send, recv and unusual reductions" : "gloo, because " + why_;
}

bool Backend::shared() const {
  TORCH_CHECK(!closed_, "globaltensor: this process group was shut down");
  return context_.group != nullptr;
}

c10d::Backend& Backend::gloo() const {
  shared();
  return *gloo_;
}

void Backend::setTimeout(Time timeout) {
  if (timeout > options_->timeout)
    TORCH_WARN("globaltensor: a group's timeout cannot become longer than ", options_->timeout.count(), " ms");
  context_.timeout = timeout;
  gloo().setTimeout(timeout);
}

void Backend::abort() {
  if (closed_) return;
  if (context_.group) context_.group->leave("its process group was aborted");
  gloo_->abort();
  closed_ = true;
}

// Without the interpreter's lock: gloo's threads, which end here, may need it to let go of tensors.
void Backend::shutdown() {
  std::optional<pybind11::gil_scoped_release> unlocked;
  if (Py_IsInitialized() && PyGILState_Check()) unlocked.emplace();
  closed_ = true;
  context_.group.reset();
  gloo_.reset();
}

Work Backend::send(Tensors& tensors, int to, int tag) { return gloo().send(tensors, to, tag); }
Work Backend::recv(Tensors& tensors, int from, int tag) { return gloo().recv(tensors, from, tag); }
Work Backend::recvAnysource(Tensors& tensors, int tag) { return gloo().recvAnysource(tensors, tag); }
void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool all) { gloo().monitoredBarrier(opts, all); }

Work Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return gloo().allreduce_sparse(tensors, opts);
}

Work Backend::barrier(const c10d::BarrierOptions& opts) {
  if (!shared()) return gloo().barrier(opts);
  Job job(context_, c10d::OpType::BARRIER, {"barrier", -1, at::kByte, opts.timeout}, {});
  job.barrier();
  return job.done();
}

// ---- reductions

Reduction::Reduction(const c10d::ReduceOp& asked, int ranks, const char* name) : op(-1) {
  switch (asked.op_) {
    case c10d::ReduceOp::SUM: op = GT_SUM; break;
    case c10d::ReduceOp::MAX: op = GT_MAX; break;
    case c10d::ReduceOp::MIN: op = GT_MIN; break;
    case c10d::ReduceOp::AVG:
      op = GT_SUM;
      scaled = true;
      divisor = ranks;
      break;
    case c10d::ReduceOp::PREMUL_SUM: {
      auto* premul = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(asked.supplement_.get());
      TORCH_CHECK_VALUE(premul, "globaltensor, ", name, ": PREMUL_SUM without a factor");
      op = GT_SUM;
      scaled = true;
      factor = premul->tensor_factor;
      if (!factor.defined()) factor = at::scalar_tensor(premul->double_factor, at::kDouble);
      break;
    }
    default: break;
  }
}

bool Reduction::ours(c10::ScalarType dtype) const { return op >= 0 && can_reduce(dtype, op); }

at::Tensor Reduction::before(const at::Tensor& tensor) const {
  return factor.defined() ? tensor.mul(factor.to(tensor.scalar_type())) : tensor;
}

void Reduction::before_(const at::Tensor& tensor) const {
  at::AutoDispatchBelowADInplaceOrView below;
  if (factor.defined()) tensor.mul_(factor.to(tensor.scalar_type()));
}

void Reduction::after(const at::Tensor& tensor) const {
  if (divisor == 1) return;
  at::AutoDispatchBelowADInplaceOrView below;
  if (tensor.is_floating_point() || tensor.is_complex()) tensor.div_(divisor);
  else tensor.div_(divisor, "trunc");
}

// ---- all-reduce

Work Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "globaltensor, allreduce: takes one tensor per rank, not ", tensors.size());
  return all_reduce(tensors, opts);
}

Work Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return all_reduce(tensors, opts);
}

Work Backend::all_reduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "globaltensor, allreduce: takes at least one tensor");
  Reduction reduction(opts.reduceOp, size_, "allreduce");
  const c10::ScalarType dtype = tensors[0].scalar_type();
  const bool sparse = tensors[0].layout() != at::kStrided;
  if (sparse || !shared() || !reduction.ours(dtype)) return all_reduce_by_gloo(tensors, opts, reduction);
  int64_t numel = 0;
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK_VALUE(t.scalar_type() == dtype && t.device().is_cpu() && t.layout() == at::kStrided,
                      "globaltensor, allreduce: takes CPU tensors of one dtype");
    numel += t.numel();
  }
  Job job(context_, c10d::OpType::ALLREDUCE, {"allreduce", numel, dtype, opts.timeout}, tensors);
  job.agree(reduction.op);
  job.agree(reduction.divisor);
  for (const at::Tensor& t : tensors) job.agree(t.numel());
  for (const at::Tensor& t : tensors) reduction.before_(t);
  all_reduce(job, tensors, reduction.op);
  Work work = job.done();
  for (const at::Tensor& t : tensors) reduction.after(t);
  return work;
}

Work Backend::all_reduce_by_gloo(Tensors& tensors, const c10d::AllreduceOptions& opts, const Reduction& reduction) {
  c10d::AllreduceOptions asked = opts;
  if (reduction.scaled) asked.reduceOp = c10d::ReduceOp::SUM;
  Work work;
  for (at::Tensor& t : tensors) {
    Tensors one{t};
    reduction.before_(t);
    work = gloo().allreduce(one, asked);
    if (reduction.scaled || tensors.size() > 1) work->wait();
    reduction.after(t);
  }
  return work;
}

// Small ones in one round, in which each rank reads all of the others'; larger ones in two, each rank doing its part
// of all. What is done depends only on what all ranks know, and so not on where one's own tensors are.
void Backend::all_reduce(Job& job, const Tensors& tensors, int op) {
  c10::SmallVector<at::Tensor, 1> runs;
  int64_t bytes = 0;
  bool in_arena = true;
  for (const at::Tensor& t : tensors) {
    if (!t.numel()) continue;
    runs.push_back(job.write(t, true));
    bytes += static_cast<int64_t>(t.nbytes());
    in_arena = in_arena && gt_in_arena(runs.back().const_data_ptr());
  }
  if (runs.empty()) return;
  const bool small = bytes <= kCopied;
  if (!small && (bytes <= kPiece || !all_ranks(in_arena))) return all_reduce_pieces(job, runs, op);
  for (const at::Tensor& run : runs)
    job.move({small ? Pattern::ReduceAll : Pattern::ReduceParts, 0, 0, op, run.numel()}, rows(run), rows(run));
  job.run();
}

// By pieces, which are copied to where the others can write and back. Two of them stay in the cache.
void Backend::all_reduce_pieces(Job& job, at::ArrayRef<at::Tensor> runs, int op) {
  const int64_t item = static_cast<int64_t>(runs[0].element_size()), most = kPiece / item;
  const at::Tensor room = arena_empty({most}, runs[0].scalar_type());
  c10::SmallVector<std::pair<ShardRows, ShardRows>, 4> copies;
  int64_t used = 0;
  auto run = [&] {
    job.run();
    for (auto& [own, reduced] : copies) std::memcpy(own.data, reduced.data, own.columns * item);
    copies.clear();
    used = 0;
  };
  for (const at::Tensor& t : runs) {
    const bool stays = gt_in_arena(t.const_data_ptr());
    for (int64_t begin = 0, count; begin < t.numel(); begin += count) {
      count = std::min(most - used, t.numel() - begin);
      const ShardRows own = row(t, begin, count), reduced = stays ? own : row(room, used, count);
      if (!stays) {
        std::memcpy(reduced.data, own.data, count * item);
        copies.emplace_back(own, reduced);
      }
      job.move({Pattern::ReduceParts, 0, 0, op, count}, reduced, reduced);
      if ((used += count) == most) run();
    }
  }
  if (used) run();
}

// Moves whose sources are as large on all ranks, by pieces where these are not all in the arena.
void Backend::run_pieces(Job& job, const std::vector<CollectiveMove>& moves) {
  const int64_t item = static_cast<int64_t>(c10::elementSize(job.call().dtype));
  int64_t bytes = 0;
  bool in_arena = true;
  for (const CollectiveMove& m : moves) {
    bytes += m.source.rows * m.source.columns * item;
    in_arena = in_arena && (!m.source.data || gt_in_arena(m.source.data));
  }
  const int64_t most = bytes > kPiece && !all_ranks(in_arena) ? kPiece : std::max<int64_t>(bytes, 1);
  int64_t used = 0;
  for (CollectiveMove m : moves) {
    const int64_t column = m.source.rows * item, all = m.key.columns;
    for (int64_t left = all; left > 0;) {
      const int64_t count = std::min((most - used) / column, left);
      if (count) {
        m.key.columns = m.source.columns = m.target.columns = count;
        job.move(m.key, m.source, m.target);
        m.source.data += count * item;
        m.target.data += count * item;
        left -= count;
        used += count * column;
      } else {
        job.run();
        used = 0;
      }
    }
  }
  job.run();
}

bool Backend::all_ranks(bool mine) {
  char own = mine, all = mine;
  Job job(context_, c10d::OpType::UNKNOWN, {"asking where tensors are", 1, at::kByte}, {});
  job.move({Pattern::ReduceAll, 0, 0, GT_MIN, 1}, {&own, 1, 1, 1}, {&all, 1, 1, 1});
  job.run();
  return all;
}

}  // namespace gt::collective

namespace gt {

void bind_backend(pybind11::module_& module) {
  using collective::Backend;
  using Base = c10d::Backend;
  pybind11::class_<Backend, Base, c10::intrusive_ptr<Backend>>(module, "Backend")
      .def(pybind11::init<const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds,
                          c10::intrusive_ptr<Base>>(),
           pybind11::arg("store"), pybind11::arg("rank"), pybind11::arg("size"), pybind11::arg("timeout"),
           pybind11::arg("gloo"), pybind11::call_guard<pybind11::gil_scoped_release>())
      .def_property_readonly("transport", &Backend::transport, "How bytes move, in a line.");
}

}  // namespace gt
