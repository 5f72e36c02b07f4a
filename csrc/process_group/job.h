// One collective under way: its moves, the tensors that stand in for others, and the number all ranks must agree on.
//
//     Job job(backend, OpType::BROADCAST, {"broadcast", n, dtype, opts.timeout}, tensors);
//     job.agree(root);
//     at::Tensor run = job.write(tensor, /*filled=*/true);
//     job.move({Way::Broadcast, root, 0, GT_SUM, n}, rank == root ? rows(run) : Rows(), ...);
//     job.run();
//     return job.done();
#pragma once
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

#include "process_group/backend.h"

namespace gt::collective {

int code_of(c10::ScalarType dtype);              // as gt_dtype; one that can only be copied where there is none
bool can_reduce(c10::ScalarType dtype, int op);  // natively
at::Tensor in_arena(const at::Tensor& like);     // an empty contiguous one

// A shard: rows of `columns` elements, whose first ones are `pitch` elements apart. None where this rank has none.
struct Rows {
  char* data = nullptr;
  int64_t rows = 0, columns = 0, pitch = 0;
};
struct Move {
  Key key;
  Rows source, target;
};
Rows rows(const at::Tensor& run, int64_t rows = 1);
Rows row(const at::Tensor& run, int64_t begin, int64_t columns);  // elements of a tensor in one run of memory

class Job {
 public:
  Job(Backend& backend, c10d::OpType type, const Call& call, Tensors results);
  Job(const Job&) = delete;
  ~Job();

  // Also a part of what the ranks must agree on.
  void agree(int64_t value) { agreement_ = (agreement_ ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ull; }
  // The same values in one run of memory, `apart` from a tensor that will be written.
  at::Tensor read(const at::Tensor& tensor);
  at::Tensor read_apart(const at::Tensor& tensor, const at::Tensor& written, int64_t same_from = -1);
  // One run of memory, whose values the tensor has in the end; those the tensor has now where `filled`.
  at::Tensor write(const at::Tensor& tensor, bool filled = false);

  void move(const Key& key, const Rows& source, const Rows& target) { move(key, source, target, dtype_); }
  void move(const Key& key, const Rows& source, const Rows& target, int dtype);
  void run();                                    // the moves so far, in one meeting
  void barrier();
  void finish();                                 // values go back to tensors that others stood in for
  Work done();                                   // finish, as a Work

  const Call& call() const { return call_; }
  at::Tensor keep(const at::Tensor& tensor) { return kept_.emplace_back(tensor); }  // until the moves have run

 private:
  Backend& backend_;
  const Group::Turn turn_;
  const c10d::OpType type_;
  Call call_;
  Tensors results_;
  const int dtype_;
  uint64_t agreement_;
  c10::SmallVector<gt_move, 2> moves_;
  c10::SmallVector<at::Tensor, 2> kept_;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 1> back_;
};

}  // namespace gt::collective
