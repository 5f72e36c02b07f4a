// A job's life: tensors become runs of memory, runs become moves, moves are boxed, and values go back.
#include "process_group/job.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include "common/arena_tensor.h"
#include "common/dtype_code.h"
#include "common/tensor_memory.h"

namespace gt::collective {
namespace {

// Nothing is left to wait for.
class CompletedWork final : public c10d::Work {
 public:
  CompletedWork(c10d::OpType type, Tensors results, uint64_t number)
      : c10d::Work(-1, type), results_(std::move(results)), number_(number) {
    completed_ = true;
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(Time) override { return true; }
  void synchronize() override {}
  void abort() override {}
  Tensors result() override { return results_; }
  uint64_t getSequencenumber() const override { return number_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future_->markCompleted(c10::IValue(results_));
    }
    return future_;
  }

 private:
  const Tensors results_;
  const uint64_t number_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

bool plain(const at::Tensor& t) { return t.is_contiguous() && !t.is_conj() && !t.is_neg(); }

}  // namespace

bool can_reduce(c10::ScalarType dtype, int op) {
  int code = dtype_code(dtype);
  return code < GT_RAW1 && (op == GT_SUM || (code != GT_C64 && code != GT_C128));
}

ShardRows rows(const at::Tensor& run, int64_t rows) {
  if (!run.numel()) return {};
  return {memory_of(run), rows, run.numel() / rows, run.numel() / rows};
}

ShardRows row(const at::Tensor& run, int64_t begin, int64_t columns) {
  if (!columns) return {};
  return {memory_of(run) + begin * static_cast<int64_t>(run.element_size()), 1, columns, columns};
}

Job::Job(JobContext& context, c10d::OpType type, const CollectiveCall& call, Tensors results)
    : context_(context), lock_(context.group.get()), type_(type), call_(call), results_(std::move(results)),
      dtype_(dtype_code(call.dtype)), agreement_(++context.calls) {
  agree(static_cast<int64_t>(type));
  agree(call.numel);
  agree(static_cast<int64_t>(call.dtype));
  if (call_.timeout.count() <= 0) call_.timeout = context.timeout;
}

Job::~Job() {
  if (lock_.outermost()) context_.programs.trim();
}

at::Tensor Job::read(const at::Tensor& tensor) {
  if (C10_LIKELY(plain(tensor))) return tensor;
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor copy = arena_empty_like(tensor);  // where the others read it in place
  copy.copy_(tensor);
  kept_.push_back(copy);
  return copy;
}

// `same_from`: the tensor may be the elements of `written` from this one on, which this rank alone writes, and with the
// values that they have.
at::Tensor Job::read_apart(const at::Tensor& tensor, const at::Tensor& written, int64_t same_from) {
  at::Tensor run = read(tensor);
  const char *begin = memory_of(run), *other = memory_of(written);
  bool apart = begin + run.nbytes() <= other || other + written.nbytes() <= begin;
  if (apart || (same_from >= 0 && begin == other + same_from * static_cast<int64_t>(run.element_size()))) return run;
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor copy = arena_empty_like(run);
  copy.copy_(run);
  kept_.push_back(copy);
  return copy;
}

at::Tensor Job::write(const at::Tensor& tensor, bool filled) {
  if (C10_LIKELY(plain(tensor))) return tensor;
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor run = arena_empty_like(tensor);
  if (filled) run.copy_(tensor);
  back_.emplace_back(tensor, run);
  return run;
}

void Job::move(const ProgramKey& key, const ShardRows& source, const ShardRows& target, int dtype) {
  gt_move& m = moves_.emplace_back();
  m = {};
  m.program = context_.programs.get(key);
  m.ndim = 2;
  m.source_dtype = m.target_dtype = dtype;
  m.source = source.data;
  m.source_size[0] = source.rows;
  m.source_size[1] = source.columns;
  m.source_stride[0] = source.pitch;
  m.target = target.data;
  m.target_stride[0] = target.pitch;
  m.source_stride[1] = m.target_stride[1] = 1;
}

void Job::run() {
  RECORD_FUNCTION(std::string("globaltensor:") + call_.name, std::vector<c10::IValue>());
  context_.group->run_moves(call_, moves_.data(), static_cast<int32_t>(moves_.size()), agreement_);
  moves_.clear();
  kept_.clear();
  agree(0);  // another run of the same job is another boxing
}

void Job::barrier() { context_.group->barrier(call_, agreement_); }

void Job::finish() {
  if (C10_LIKELY(back_.empty())) return;
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& [tensor, run] : back_) tensor.copy_(run);
  back_.clear();
}

Work Job::done() {
  finish();
  return c10::make_intrusive<CompletedWork>(type_, std::move(results_), context_.calls);
}

}  // namespace gt::collective
