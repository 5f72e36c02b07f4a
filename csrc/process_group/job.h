// One collective call: its moves, the tensors that stand in for others, and the number all ranks must agree on.
//
//     Job job(context, OpType::BROADCAST, {"broadcast", n, dtype, opts.timeout}, tensors);
//     job.agree(root);
//     at::Tensor run = job.write(tensor, /*filled=*/true);
//     job.move({Pattern::Broadcast, root, 0, GT_SUM, n}, rank == root ? rows(run) : ShardRows(), ...);
//     job.run();
//     return job.done();
#pragma once
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "process_group/group.h"
#include "process_group/programs.h"

namespace gt::collective {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;
using Time = std::chrono::milliseconds;

bool can_reduce(c10::ScalarType dtype, int op);  // natively

// A shard: rows of `columns` elements, whose first ones are `pitch` elements apart. None where this rank has none.
struct ShardRows {
  char* data = nullptr;
  int64_t rows = 0, columns = 0, pitch = 0;
};
struct CollectiveMove {
  ProgramKey key;
  ShardRows source, target;
};
ShardRows rows(const at::Tensor& run, int64_t rows = 1);
ShardRows row(const at::Tensor& run, int64_t begin, int64_t columns);  // elements of a tensor in one run of memory

// What the jobs of one process group share.
struct JobContext {
  std::unique_ptr<Group> group;                  // null: the ranks do not share memory, and there are no jobs
  Programs programs;
  Time timeout{-1};                              // of calls that name none; -1: that of the transport
  uint64_t calls = 0;
};

class Job {
 public:
  Job(JobContext& context, c10d::OpType type, const CollectiveCall& call, Tensors results);
  Job(const Job&) = delete;
  ~Job();

  // Also a part of what the ranks must agree on.
  void agree(int64_t value) { agreement_ = (agreement_ ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ull; }
  // The same values in one run of memory, `apart` from a tensor that will be written.
  at::Tensor read(const at::Tensor& tensor);
  at::Tensor read_apart(const at::Tensor& tensor, const at::Tensor& written, int64_t same_from = -1);
  // One run of memory, whose values the tensor has in the end; those the tensor has now where `filled`.
  at::Tensor write(const at::Tensor& tensor, bool filled = false);

  void move(const ProgramKey& key, const ShardRows& source, const ShardRows& target) {
    move(key, source, target, dtype_);
  }
  void move(const ProgramKey& key, const ShardRows& source, const ShardRows& target, int dtype);
  void run();                                    // the moves so far, in one round
  void barrier();
  void finish();                                 // values go back to tensors that others stood in for
  Work done();                                   // finish, as a Work

  const CollectiveCall& call() const { return call_; }
  at::Tensor keep(const at::Tensor& tensor) { return kept_.emplace_back(tensor); }  // until the moves have run

 private:
  JobContext& context_;
  const Group::CallLock lock_;
  const c10d::OpType type_;
  CollectiveCall call_;
  Tensors results_;
  const int dtype_;
  uint64_t agreement_;
  c10::SmallVector<gt_move, 2> moves_;
  c10::SmallVector<at::Tensor, 2> kept_;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 1> back_;
};

}  // namespace gt::collective
