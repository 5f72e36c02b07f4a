// The collectives but all-reduce: each says its moves, and which tensors of which rank they read and write.
//
// Where tensors come in lists every piece is a move of its own, read and written in place: nothing is packed.
// What the ranks must agree on holds every size that all of them know. In an all-to-all they do not: there the sizes
// travel along and are compared.
#include <ATen/ATen.h>

#include "process_group/backend.h"

namespace gt::collective {
namespace {

using c10d::OpType;

#define REQUIRE(condition, ...) TORCH_CHECK_VALUE(condition, "globaltensor, ", __VA_ARGS__)

const at::Tensor& only(const char* name, const Tensors& tensors) {
  REQUIRE(tensors.size() == 1, name, ": takes one tensor per rank, not ", tensors.size());
  return tensors[0];
}

Tensors& only(const char* name, std::vector<Tensors>& lists) {
  REQUIRE(lists.size() == 1, name, ": takes one list of tensors per rank, not ", lists.size());
  return lists[0];
}

void check(const char* name, const at::Tensor& t, c10::ScalarType dtype) {
  REQUIRE(t.device().is_cpu() && t.layout() == at::kStrided, name, ": takes CPU tensors");
  REQUIRE(t.scalar_type() == dtype, name, ": takes tensors of one dtype, not ", dtype, " and ", t.scalar_type());
}

void check_list(const char* name, const Tensors& tensors, size_t count, c10::ScalarType dtype) {
  REQUIRE(tensors.size() == count, name, ": takes ", count, " tensors, one for each rank, not ", tensors.size());
  for (const at::Tensor& t : tensors) check(name, t, dtype);
}

void check_root(const char* name, int64_t root, int ranks) {
  REQUIRE(root >= 0 && root < ranks, name, ": there is no rank ", root, " among ", ranks);
}

void check_pairs(const char* name, const Tensors& outputs, const Tensors& inputs) {
  REQUIRE(!inputs.empty() && outputs.size() == inputs.size(), name, ": takes as many outputs as inputs, at least one");
  for (const Tensors* list : {&inputs, &outputs})
    for (const at::Tensor& t : *list) check(name, t, inputs[0].scalar_type());
}

int64_t total(const Tensors& tensors) {
  int64_t n = 0;
  for (const at::Tensor& t : tensors) n += t.numel();
  return n;
}

// What gloo is asked for, which knows neither averages nor factors, and what is left to do then.
template <class Options>
Options for_gloo(Options opts, const Reduction& reduction) {
  if (reduction.scaled) opts.reduceOp = c10d::ReduceOp::SUM;
  return opts;
}

Work from_gloo(Work work, const Reduction& reduction, const Tensors& outputs) {
  if (reduction.scaled) work->wait();
  for (const at::Tensor& t : outputs) reduction.after(t);
  return work;
}

}  // namespace

// ---- from one, to one

Work Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  if (!shared()) return gloo().broadcast(tensors, opts);
  const at::Tensor& tensor = only("broadcast", tensors);
  const int root = static_cast<int>(opts.rootRank);
  check("broadcast", tensor, tensor.scalar_type());
  check_root("broadcast", root, size_);
  Job job(context_, OpType::BROADCAST, {"broadcast", tensor.numel(), tensor.scalar_type(), opts.timeout}, tensors);
  job.agree(root);
  const bool from = rank_ == root;
  const ShardRows run = rows(from ? job.read(tensor) : job.write(tensor));
  job.move({Pattern::Broadcast, root, 0, GT_SUM, tensor.numel()}, from ? run : ShardRows(), from ? ShardRows() : run);
  job.run();
  return job.done();
}

Work Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Reduction reduction(opts.reduceOp, size_, "reduce");
  const at::Tensor& tensor = only("reduce", tensors);
  const int root = static_cast<int>(opts.rootRank);
  const bool to = rank_ == root;
  if (!shared() || !reduction.ours(tensor.scalar_type())) {
    if (to) reduction.before_(tensor);
    Tensors run{to ? tensor : reduction.before(tensor)};
    return from_gloo(gloo().reduce(run, for_gloo(opts, reduction)), reduction, to ? run : Tensors());
  }
  check("reduce", tensor, tensor.scalar_type());
  check_root("reduce", root, size_);
  Job job(context_, OpType::REDUCE, {"reduce", tensor.numel(), tensor.scalar_type(), opts.timeout}, tensors);
  for (int64_t value : {int64_t{root}, int64_t{reduction.op}, reduction.divisor}) job.agree(value);
  if (to) reduction.before_(tensor);
  at::Tensor run = to ? job.write(tensor, true) : job.keep(job.read(reduction.before(tensor)));
  job.move({Pattern::Reduce, root, 0, reduction.op, tensor.numel()}, rows(run), to ? rows(run) : ShardRows());
  job.run();
  Work work = job.done();
  if (to) reduction.after(tensor);
  return work;
}

Work Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  if (!shared()) return gloo().gather(outputs, inputs, opts);
  const at::Tensor& input = only("gather", inputs);
  const int root = static_cast<int>(opts.rootRank);
  check_root("gather", root, size_);
  const bool to = rank_ == root;
  REQUIRE(to || outputs.empty(), "gather: only the root has outputs");
  Tensors results = to ? only("gather", outputs) : Tensors();
  check("gather", input, input.scalar_type());
  Job job(context_, OpType::GATHER, {"gather", input.numel(), input.scalar_type(), opts.timeout}, results);
  job.agree(root);
  if (to) check_list("gather", results, size_, input.scalar_type());
  at::Tensor run = job.read(input);
  for (int r = 0; r < size_ && to; r++)
    if (r != rank_) run = job.read_apart(run, results[r]);
  for (int r = 0; r < size_; r++) {
    REQUIRE(!to || results[r].numel() == input.numel(), "gather: outputs are as large as the input");
    job.move({Pattern::Send, r, root, GT_SUM, input.numel()}, r == rank_ ? rows(run) : ShardRows(),
             to ? rows(job.write(results[r])) : ShardRows());
  }
  job.run();
  return job.done();
}

Work Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  if (!shared()) return gloo().scatter(outputs, inputs, opts);
  const at::Tensor& output = only("scatter", outputs);
  const int root = static_cast<int>(opts.rootRank);
  check_root("scatter", root, size_);
  const bool from = rank_ == root;
  REQUIRE(from || inputs.empty(), "scatter: only the root has inputs");
  check("scatter", output, output.scalar_type());
  const Tensors sent = from ? only("scatter", inputs) : Tensors();
  if (from) check_list("scatter", sent, size_, output.scalar_type());
  Job job(context_, OpType::SCATTER, {"scatter", output.numel(), output.scalar_type(), opts.timeout}, outputs);
  job.agree(root);
  const ShardRows run = rows(job.write(output));
  for (int r = 0; r < size_; r++) {
    REQUIRE(!from || sent[r].numel() == output.numel(), "scatter: inputs are as large as the output");
    const ShardRows source = from ? rows(job.read_apart(sent[r], output)) : ShardRows();
    job.move({Pattern::Send, root, r, GT_SUM, output.numel()}, source, r == rank_ ? run : ShardRows());
  }
  job.run();
  return job.done();
}

// ---- all-gather

Work Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  if (!shared()) return gloo()._allgather_base(output, input, opts);
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

Work Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  if (!shared()) return gloo().allgather_into_tensor_coalesced(outputs, inputs, opts);
  check_pairs("allgather", outputs, inputs);
  Job job(context_, OpType::_ALLGATHER_BASE, {"allgather", total(inputs), inputs[0].scalar_type(), opts.timeout},
          outputs);
  std::vector<CollectiveMove> moves;
  for (size_t i = 0; i < inputs.size(); i++) {
    const int64_t n = inputs[i].numel();
    REQUIRE(outputs[i].numel() == n * size_, "allgather: ", n * size_, " elements do not fit ", outputs[i].numel());
    job.agree(n);
    const at::Tensor output = job.write(outputs[i]);
    const ShardRows to = rows(output, size_), from = rows(job.read_apart(inputs[i], output, rank_ * n));
    const bool in_place = n && from.data == row(output, rank_ * n, n).data;
    moves.push_back({{Pattern::Gather, 0, in_place, GT_SUM, n}, from, to});
  }
  run_pieces(job, moves);
  return job.done();
}

Work Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  if (!shared()) return gloo().allgather(outputs, inputs, opts);
  const at::Tensor& input = only("allgather", inputs);
  Tensors& results = only("allgather", outputs);
  const c10::ScalarType dtype = input.scalar_type();
  check("allgather", input, dtype);
  check_list("allgather", results, size_, dtype);
  REQUIRE(results[rank_].numel() == input.numel(), "allgather: output ", rank_, " is not as large as the input there");
  Job job(context_, OpType::ALLGATHER, {"allgather", total(results), dtype, opts.timeout}, results);
  at::Tensor run = job.read(input);
  for (int r = 0; r < size_; r++) {
    if (r != rank_) run = job.read_apart(run, results[r]);
    job.agree(results[r].numel());
  }
  for (int r = 0; r < size_; r++)
    job.move({Pattern::Broadcast, r, 1, GT_SUM, results[r].numel()}, r == rank_ ? rows(run) : ShardRows(),
             rows(job.write(results[r])));
  job.run();
  return job.done();
}

// Deprecated by torch, but still asked for: outputs[rank][i] is inputs[i] of that rank.
Work Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  if (!shared()) return gloo().allgather_coalesced(outputs, inputs, opts);
  REQUIRE(static_cast<int>(outputs.size()) == size_, "allgather_coalesced: takes a list of outputs for each rank");
  Work last;
  for (size_t i = 0; i < inputs.size(); i++) {
    std::vector<Tensors> list(1);
    for (Tensors& of_rank : outputs) list[0].push_back(of_rank.at(i));
    Tensors one{inputs[i]};
    last = allgather(list, one, opts);
  }
  return last;
}

// ---- reduce-scatter

Work Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

Work Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& opts) {
  check_pairs("reduce_scatter", outputs, inputs);
  Reduction reduction(opts.reduceOp, size_, "reduce_scatter");
  if (!shared() || !reduction.ours(inputs[0].scalar_type())) {
    Tensors runs;
    for (const at::Tensor& t : inputs) runs.push_back(reduction.before(t));
    Work work = gloo().reduce_scatter_tensor_coalesced(outputs, runs, for_gloo(opts, reduction));
    return from_gloo(work, reduction, outputs);
  }
  Job job(context_, OpType::_REDUCE_SCATTER_BASE,
          {"reduce_scatter", total(inputs), inputs[0].scalar_type(), opts.timeout}, outputs);
  for (int64_t value : {int64_t{reduction.op}, reduction.divisor}) job.agree(value);
  std::vector<CollectiveMove> moves;
  for (size_t i = 0; i < inputs.size(); i++) {
    const int64_t n = outputs[i].numel();
    REQUIRE(inputs[i].numel() == n * size_, "reduce_scatter: ", inputs[i].numel(), " elements do not make ", size_,
            " times ", n);
    job.agree(n);
    const at::Tensor output = job.write(outputs[i]);
    const at::Tensor input = job.keep(reduction.before(inputs[i]));
    const bool same = n && input.is_contiguous() && output.const_data_ptr() == row(input, rank_ * n, n).data;
    const ShardRows from = rows(same ? input : job.read_apart(input, output), size_);
    moves.push_back({{Pattern::ReduceRows, 0, 0, reduction.op, n}, from, rows(output)});
  }
  run_pieces(job, moves);
  Work work = job.done();
  for (const at::Tensor& t : outputs) reduction.after(t);
  return work;
}

Work Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& list = only("reduce_scatter", inputs);
  const c10::ScalarType dtype = output.scalar_type();
  Reduction reduction(opts.reduceOp, size_, "reduce_scatter");
  if (!shared() || !reduction.ours(dtype)) {
    std::vector<Tensors> runs(1);
    for (const at::Tensor& t : list) runs[0].push_back(reduction.before(t));
    return from_gloo(gloo().reduce_scatter(outputs, runs, for_gloo(opts, reduction)), reduction, outputs);
  }
  check("reduce_scatter", output, dtype);
  check_list("reduce_scatter", list, size_, dtype);
  REQUIRE(list[rank_].numel() == output.numel(), "reduce_scatter: input ", rank_, " is not as large as the output");
  Job job(context_, OpType::REDUCE_SCATTER, {"reduce_scatter", total(list), dtype, opts.timeout}, outputs);
  for (int64_t value : {int64_t{reduction.op}, reduction.divisor}) job.agree(value);
  const at::Tensor to = job.write(output);
  for (int r = 0; r < size_; r++) {
    job.agree(list[r].numel());
    const at::Tensor from = job.keep(reduction.before(list[r]));
    job.move({Pattern::Reduce, r, 0, reduction.op, from.numel()}, rows(job.read_apart(from, to, r == rank_ ? 0 : -1)),
             r == rank_ ? rows(to) : ShardRows());
  }
  job.run();
  Work work = job.done();
  reduction.after(output);
  return work;
}

// ---- all-to-all

// The piece for the rank k places after this one goes with move k, which brings the piece of the rank k places before.
void Backend::exchange(Job& job, const std::vector<ShardRows>& sent, const std::vector<ShardRows>& received) {
  std::vector<int64_t> counts(3 * size_);  // sent to each rank, received from each, as it says
  for (int r = 0; r < size_; r++) counts[r] = sent[r].columns;
  job.move({Pattern::Exchange, 0, 0, GT_SUM, 1}, {reinterpret_cast<char*>(counts.data()), size_, 1, 1},
           {reinterpret_cast<char*>(counts.data() + size_), size_, 1, 1}, GT_I64);
  ShardRows nothing{reinterpret_cast<char*>(counts.data()), 1, 0, 0};  // a place, in case the other expects something
  for (int k = 0; k < size_; k++) {
    const int to = (rank_ + k) % size_, from = (rank_ + size_ - k) % size_;
    const ShardRows& source = sent[to].columns ? sent[to] : nothing;
    job.move({Pattern::Shift, k, 0, GT_SUM, received[from].columns}, source, received[from]);
  }
  job.run();
  for (int r = 0; r < size_; r++)
    TORCH_CHECK_WITH(DistBackendError, counts[size_ + r] == received[r].columns, "globaltensor, ", job.call().words(),
                     ": rank ", r, " sends ", counts[size_ + r], " elements to rank ", rank_, ", which expects ",
                     received[r].columns);
}

Work Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  if (!shared()) return gloo().alltoall_base(output, input, output_splits, input_splits, opts);
  const c10::ScalarType dtype = input.scalar_type();
  check("alltoall", input, dtype);
  check("alltoall", output, dtype);
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  Job job(context_, OpType::ALLTOALL_BASE, {"alltoall", -1, dtype, opts.timeout}, {output});
  const at::Tensor to = job.write(output), from = job.read_apart(input, to);
  auto pieces = [&](const at::Tensor& run, const std::vector<int64_t>& splits) {
    std::vector<int64_t> lengths(size_), offsets(size_);
    c10d::computeLengthsAndOffsets(splits, run, &lengths, &offsets);
    std::vector<ShardRows> rows_of;
    for (int r = 0; r < size_; r++) {
      REQUIRE(lengths[r] >= 0, "alltoall: a split of ", splits[r]);
      rows_of.push_back(row(run, offsets[r], lengths[r]));
    }
    return rows_of;
  };
  exchange(job, pieces(from, input_splits), pieces(to, output_splits));
  return job.done();
}

Work Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  if (!shared()) return gloo().alltoall(outputs, inputs, opts);
  REQUIRE(!inputs.empty(), "alltoall: takes ", size_, " tensors, one for each rank");
  const c10::ScalarType dtype = inputs[0].scalar_type();
  check_list("alltoall", inputs, size_, dtype);
  check_list("alltoall", outputs, size_, dtype);
  Job job(context_, OpType::ALLTOALL, {"alltoall", -1, dtype, opts.timeout}, outputs);
  std::vector<ShardRows> sent, received;
  for (const at::Tensor& t : inputs) {
    at::Tensor run = job.read(t);
    for (const at::Tensor& written : outputs) run = job.read_apart(run, written);
    sent.push_back(rows(run));
  }
  for (const at::Tensor& t : outputs) received.push_back(rows(job.write(t)));
  exchange(job, sent, received);
  return job.done();
}

}  // namespace gt::collective
