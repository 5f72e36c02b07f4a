// The lineage of a global tensor: a hash of all that made its value, the same on all ranks that run the same program.
//
// An op mixes its name, the numbers and texts of its arguments, some elements of plain operands, the grad mode, and the
// lineages of its global operands; what it returns or writes to gets the result. A boxing keeps the value, and so the
// lineage. The agreement of a boxing has the lineage of the op that it is for, or of the tensors that are moved: ranks
// whose programs went apart before, in whatever moved nothing, notice it here. Twin: runtime/lineage.py.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include "recipe.h"

namespace gt {

inline void mix(uint64_t& hash, uint64_t word) {
  hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
  hash ^= hash >> 32;
}

inline bool lineages_kept = false;                   // where several processes run one program, outside of pipelines
inline bool places_noted = false;                    // the line of each call, for errors: under GLOBALTENSOR_CHECK
inline thread_local uint64_t call_lineage = 0;       // of the op that the program called; 0 outside of ops

// What was done lately, by which errors tell what ranks did differently. The lowest bits of a lineage count the results
// of one call; an event has them 0.
struct LineageEvent {
  static constexpr int kMost = 3;
  uint64_t lineage;
  const c10::FunctionSchema* op;                     // null: a tensor that no op made
  uint64_t operands[kMost];
  double numbers[kMost];
  bool gradients;                                    // the grad mode
};
constexpr uint64_t kResultBits = 0xFF;

// A call of an op while its arguments are looked at, and until its results have their lineage.
class CallLineage {
 public:
  bool saw_completed = false;                        // an operand is completed: another call is to be looked at
  bool reads = true;                                 // the op reads the operand that is looked at now
  CallLineage() {
    if (lineages_kept && !call_lineage) begin();
  }
  explicit CallLineage(std::nullptr_t) {}            // of no call
  CallLineage(const CallLineage&) = delete;
  ~CallLineage() {
    if (C10_UNLIKELY(entered_)) call_lineage = 0;
  }

  explicit operator bool() const { return hash_ != 0; }
  void word(uint64_t w) { mix(hash_, w); }
  void operand(uint64_t lineage) {
    mix(hash_, lineage);
    if (operands_ < LineageEvent::kMost) event_->operands[operands_++] = lineage;
  }
  void number(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    mix(hash_, value == value ? bits : 1);           // a NaN is a NaN, whatever its bits
    tell(value);
  }
  void tell(double value) {                          // in errors
    if (numbers_ < LineageEvent::kMost) event_->numbers[numbers_++] = value;
  }
  void plain(const at::Tensor& t);

  // All arguments were looked at.
  void enter(const c10::OperatorHandle& op, const c10::IValue* args, const OpLineage& name);
  void leave(const Stack& stack, size_t first);                       // the results are on the stack

 private:
  void begin();
  void note_written(const c10::OperatorHandle& op, const c10::IValue* args);

  LineageEvent* event_ = nullptr;
  uint64_t hash_ = 0;
  int operands_ = 0, numbers_ = 0, keeps_ = -1;
  bool entered_ = false;
  c10::SmallVector<at::Tensor, 2> written_;
};

// Inside, this is the op that the program called.
class LineageScope {
 public:
  explicit LineageScope(uint64_t lineage) : before_(call_lineage) { call_lineage = lineage; }
  ~LineageScope() { call_lineage = before_; }

 private:
  uint64_t before_;
};

void forget_schema(const c10::FunctionSchema* schema);  // of an op that torch drops
void note_boxed(const std::vector<ShardMove>& moves);  // of a boxing that failed, for errors

void bind_lineage(pybind11::module_& m);

}  // namespace gt
