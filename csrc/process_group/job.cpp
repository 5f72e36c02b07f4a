// A job's life: tensors become runs of memory, runs become moves, moves are boxed, and values go back.
#include "process_group/job.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

namespace gt::collective {
namespace {

// Nothing is left to wait for.
class Done final : public c10d::Work {
 public:
  Done(c10d::OpType type, Tensors results, uint64_t number)
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

char* data_of(const at::Tensor& t) {
  TORCH_CHECK(!t.numel() || t.storage().data(), "a tensor of ", t.sizes(), " without memory: its storage was freed, or it wraps others");
  return static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
}

}  // namespace

int code_of(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return GT_F32;
    case at::kDouble: return GT_F64;
    case at::kHalf: return GT_F16;
    case at::kBFloat16: return GT_BF16;
    case at::kChar: return GT_I8;
    case at::kShort: return GT_I16;
    case at::kInt: return GT_I32;
    case at::kLong: return GT_I64;
    case at::kByte: return GT_U8;
    case at::kBool: return GT_BOOL;
    case at::kComplexFloat: return GT_C64;
    case at::kComplexDouble: return GT_C128;
    default: break;
  }
  switch (c10::elementSize(dtype)) {
    case 1: return GT_RAW1;
    case 2: return GT_RAW2;
    case 4: return GT_RAW4;
    case 8: return GT_RAW8;
    case 16: return GT_RAW16;
    default: TORCH_CHECK_TYPE(false, "globaltensor: cannot move tensors of ", dtype);
  }
}

bool can_reduce(c10::ScalarType dtype, int op) {
  int code = code_of(dtype);
  return code < GT_RAW1 && (op == GT_SUM || (code != GT_C64 && code != GT_C128));
}

at::Tensor in_arena(const at::Tensor& like) {
  void* data = gt_alloc(std::max<size_t>(like.nbytes(), 1));
  TORCH_CHECK_WITH(OutOfMemoryError, data, "globaltensor: no shared memory left for ", like.nbytes(), " bytes");
  return at::from_blob(data, like.sizes(), [](void* p) { gt_free(p); }, like.options().requires_grad(false));
}

Rows rows(const at::Tensor& run, int64_t rows) {
  if (!run.numel()) return {};
  return {data_of(run), rows, run.numel() / rows, run.numel() / rows};
}

Rows row(const at::Tensor& run, int64_t begin, int64_t columns) {
  if (!columns) return {};
  return {data_of(run) + begin * static_cast<int64_t>(run.element_size()), 1, columns, columns};
}

Job::Job(Backend& backend, c10d::OpType type, const Call& call, Tensors results)
    : backend_(backend), turn_(backend.group_.get()), type_(type), call_(call), results_(std::move(results)),
      dtype_(code_of(call.dtype)), agreement_(++backend.calls_) {
  agree(static_cast<int64_t>(type));
  agree(call.numel);
  agree(static_cast<int64_t>(call.dtype));
  if (call_.timeout.count() <= 0) call_.timeout = backend.timeout_;
}

Job::~Job() {
  if (turn_.first()) backend_.programs_.trim();
}

at::Tensor Job::read(const at::Tensor& tensor) {
  if (C10_LIKELY(plain(tensor))) return tensor;
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor copy = in_arena(tensor);  // where the others read it in place
  copy.copy_(tensor);
  kept_.push_back(copy);
  return copy;
}

// `same_from`: the tensor may be the elements of `written` from this one on, which this rank alone writes, and with the
// values that they have.
at::Tensor Job::read_apart(const at::Tensor& tensor, const at::Tensor& written, int64_t same_from) {
  at::Tensor run = read(tensor);
  const char *begin = data_of(run), *other = data_of(written);
  bool apart = begin + run.nbytes() <= other || other + written.nbytes() <= begin;
  if (apart || (same_from >= 0 && begin == other + same_from * static_cast<int64_t>(run.element_size()))) return run;
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor copy = in_arena(run);
  copy.copy_(run);
  kept_.push_back(copy);
  return copy;
}

at::Tensor Job::write(const at::Tensor& tensor, bool filled) {
  if (C10_LIKELY(plain(tensor))) return tensor;
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor run = in_arena(tensor);
  if (filled) run.copy_(tensor);
  back_.emplace_back(tensor, run);
  return run;
}

void Job::move(const Key& key, const Rows& source, const Rows& target, int dtype) {
  gt_move& m = moves_.emplace_back();
  m = {};
  m.program = backend_.programs_.get(key);
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
  backend_.group_->box(call_, moves_.data(), static_cast<int32_t>(moves_.size()), agreement_);
  moves_.clear();
  kept_.clear();
  agree(0);  // another run of the same job is another boxing
}

void Job::barrier() { backend_.group_->barrier(call_, agreement_); }

void Job::finish() {
  if (C10_LIKELY(back_.empty())) return;
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& [tensor, run] : back_) tensor.copy_(run);
  back_.clear();
}

Work Job::done() {
  finish();
  return c10::make_intrusive<Done>(type_, std::move(results_), backend_.calls_);
}

}  // namespace gt::collective
