// The torch.distributed backend "globaltensor": collectives of CPU tensors by one pass over the memory of the ranks.
//
// A collective is a few moves (see programs.h), run by all ranks at once. It is done when the call returns:
// its Work is born completed. What shared memory is no use for goes to an inner gloo: send and recv (which match by
// tag, in any order), products and bitwise reductions, sparse tensors. So does everything where the ranks cannot share
// memory: `getBackendName` and `transport` say so.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "process_group/job.h"

namespace gt::collective {

// A sum in the end: what to multiply with before, and what to divide by after.
struct Reduction {
  int op;                         // of gt_op; -1: not one of ours
  at::Tensor factor;              // where defined
  int64_t divisor = 1;
  bool scaled = false;            // either of these

  Reduction(const c10d::ReduceOp& op, int ranks, const char* name);
  bool ours(c10::ScalarType dtype) const;
  at::Tensor before(const at::Tensor& tensor) const;
  void before_(const at::Tensor& tensor) const;
  void after(const at::Tensor& tensor) const;
};

class Backend final : public c10d::Backend {
 public:
  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Time timeout,
          c10::intrusive_ptr<c10d::Backend> gloo);
  ~Backend() override { shutdown(); }

  const std::string getBackendName() const override;
  std::string transport() const;  // one line about how bytes move
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(Time timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return context_.group ? context_.calls : gloo().getSequenceNumberForGroup();
  }
  void abort() override;
  void shutdown() override;

  Work allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  Work allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  Work allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;
  Work reduce(Tensors&, const c10d::ReduceOptions&) override;
  Work broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  Work allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  Work allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  Work _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  Work allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  Work reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  Work _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  Work reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  Work alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                     const c10d::AllToAllOptions&) override;
  Work alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  Work gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  Work scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  Work barrier(const c10d::BarrierOptions&) override;

  Work send(Tensors&, int to, int tag) override;
  Work recv(Tensors&, int from, int tag) override;
  Work recvAnysource(Tensors&, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool wait_all_ranks) override;

 private:
  bool shared() const;  // whether to move by shared memory; raises after shutdown
  c10d::Backend& gloo() const;
  bool all_ranks(bool mine);  // is it true on all of them?
  void run_pieces(Job& job, const std::vector<CollectiveMove>& moves);
  void exchange(Job& job, const std::vector<ShardRows>& sent, const std::vector<ShardRows>& received);
  Work all_reduce(Tensors& tensors, const c10d::AllreduceOptions& opts);
  Work all_reduce_by_gloo(Tensors& tensors, const c10d::AllreduceOptions& opts, const Reduction& reduction);
  void all_reduce(Job& job, const Tensors& tensors, int op);
  void all_reduce_pieces(Job& job, at::ArrayRef<at::Tensor> runs, int op);

  JobContext context_;            // without a group everything goes to gloo
  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<Options> options_;
  std::string why_;               // the ranks do not share memory
  bool closed_ = false;
};

}  // namespace gt::collective
