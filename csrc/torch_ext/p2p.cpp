// Point-to-point messages of tensors between ranks of a host: `send` returns at once, `recv` copies out of the sender's
// memory.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <deque>
#include <map>

#include "../common/arena_tensor.h"
#include "../common/tensor_memory.h"
#include "host.h"

namespace py = pybind11;

namespace gt {
namespace {

// What was sent and may not have been received yet, by rank: the memory must not be freed until then.
struct UnackedMessage {
  uint64_t number;
  std::vector<at::Tensor> pieces;
};
std::deque<UnackedMessage>& unacked(int rank) {
  static auto* by_rank = new std::map<int, std::deque<UnackedMessage>>;
  return (*by_rank)[rank];
}

void release_acked(int rank) {
  auto& messages = unacked(rank);
  const uint64_t acked = messages.empty() ? 0 : gt_acked(host_transport(), rank);
  while (!messages.empty() && messages.front().number <= acked) messages.pop_front();
}

// The same bytes in one run in the arena, where the receiver can read them.
at::Tensor in_arena(const at::Tensor& t) {
  if (t.is_contiguous() && gt_in_arena(t.const_data_ptr())) return t;
  at::Tensor copy = arena_empty_like(t);
  copy.copy_(t);
  return copy;
}

// A call of the transport by which this rank waits. The watch for deadlocks is told of all `peers` that take part in
// what the message is for, not only of the other end.
template <class Call>
void wait_for(const std::vector<int32_t>& peers, const std::string& what, Call call) {
  WatchedWait wait(what, hash_text(what), peers);
  raise_if_failed(call(wait.hooks()), what, &wait);
}

void send(int rank, const std::vector<at::Tensor>& tensors, uint64_t tag, const std::string& what,
          const std::vector<int32_t>& peers) {
  std::vector<at::Tensor> pieces;
  for (const at::Tensor& t : tensors)
    if (t.numel()) pieces.push_back(t);
  if (pieces.size() > GT_RUNS) {
    for (at::Tensor& t : pieces) t = t.contiguous().as_strided({t.numel()}, {1}).view(at::kByte);  // any stride
    pieces = {at::cat(pieces)};
  }
  std::vector<gt_run> runs;
  for (at::Tensor& t : pieces) {
    t = in_arena(t);
    runs.push_back({memory_of(t), t.nbytes()});
  }
  wait_for(peers, what, [&](const gt_hooks* hooks) {
    return gt_send(host_transport(), rank, runs.data(), runs.size(), tag, hooks);
  });
  release_acked(rank);
  unacked(rank).push_back({gt_sent(host_transport(), rank), std::move(pieces)});
}

// `bytes` of them, or as many as come where that is negative.
at::Tensor recv(int rank, int64_t bytes, uint64_t tag, const std::string& what, const std::vector<int32_t>& peers) {
  uint64_t size = bytes;
  if (bytes < 0)
    wait_for(peers, what, [&](const gt_hooks* hooks) { return gt_probe(host_transport(), rank, &size, hooks); });
  at::Tensor message = at::empty({int64_t(size)}, at::kByte);
  const gt_run run{message.data_ptr(), size};
  wait_for(peers, what, [&](const gt_hooks* hooks) {
    return gt_recv(host_transport(), rank, &run, 1, tag, hooks);
  });
  return message;
}

void wait_acked(int rank, const std::string& what, const std::vector<int32_t>& peers) {
  wait_for(peers, what, [&](const gt_hooks* hooks) { return gt_wait_acked(host_transport(), rank, hooks); });
  release_acked(rank);
}

}  // namespace

void bind_p2p(py::module_& m) {
  m.def("send", &send, "Send tensors to a rank of this host; they must not change until it has received them.");
  m.def("recv", &recv, "The bytes of the next message from a rank of this host.");
  m.def("wait_acked", &wait_acked, "Wait until a rank of this host has received all that was sent to it.");
}

}  // namespace gt
