// Letters between ranks of a host, of tensors: left by `post`, which waits for nobody, and copied by `take`.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <array>
#include <deque>
#include <map>

#include "boxing.h"
#include "waiting.h"

namespace py = pybind11;

namespace gt {
namespace {

// What was left and may not have been taken yet, by rank: the memory must be left alone until then.
struct Left {
  uint64_t number;
  std::vector<at::Tensor> pieces;
};
std::map<int, std::deque<Left>>& left() {
  static auto* all = new std::map<int, std::deque<Left>>;
  return *all;
}

void let_go(int rank) {
  auto& row = left()[rank];
  const uint64_t taken = row.empty() ? 0 : gt_taken(host(), rank);
  while (!row.empty() && row.front().number <= taken) row.pop_front();
}

// The same bytes in one run in the arena.
at::Tensor reachable(const at::Tensor& t) {
  if (t.is_contiguous() && gt_in_arena(t.const_data_ptr())) return t;
  at::Tensor copy = shared_empty(t.sizes(), t.scalar_type());
  copy.copy_(t);
  return copy;
}

std::vector<gt_run> runs_of(const std::vector<at::Tensor>& pieces) {
  std::vector<gt_run> runs;
  for (const at::Tensor& t : pieces) runs.push_back({const_cast<void*>(t.const_data_ptr()), t.nbytes()});
  return runs;
}

// Whom it waits for, for the watch for deadlocks: `peers` are all that take part in what this is for.
struct Party {
  std::vector<int32_t> peers;
  std::array<gt_program, 1> program;
  Waiting waiting;
  Party(std::vector<int32_t> given, const std::string& what)
      : peers(std::move(given)), program{gt_program{nullptr, 0, nullptr, 0, int32_t(peers.size()), peers.data(), nullptr}},
        waiting(what, hash_text(what), program) {}
};

void post(int rank, const std::vector<at::Tensor>& given, uint64_t subject, const std::string& what,
          std::vector<int32_t> peers) {
  std::vector<at::Tensor> pieces;
  for (const at::Tensor& t : given)
    if (t.numel()) pieces.push_back(t);
  if (pieces.size() > GT_RUNS) {
    for (at::Tensor& t : pieces) t = t.contiguous().flatten().view(at::kByte);
    pieces = {at::cat(pieces)};
  }
  for (at::Tensor& t : pieces) t = reachable(t);
  const auto runs = runs_of(pieces);
  Party party(std::move(peers), what);
  check(gt_post(host(), rank, runs.data(), runs.size(), subject, party.waiting.hooks()), what);
  let_go(rank);
  left()[rank].push_back({gt_posted(host(), rank), std::move(pieces)});
}

// The next letter of a rank as bytes: `bytes` of them, or as many as come where that is negative.
at::Tensor take(int rank, int64_t bytes, uint64_t subject, const std::string& what, std::vector<int32_t> peers) {
  Party party(std::move(peers), what);
  uint64_t size = bytes;
  if (bytes < 0) check(gt_peek(host(), rank, &size, party.waiting.hooks()), what);
  at::Tensor made = at::empty({int64_t(size)}, at::kByte);
  const gt_run run{made.data_ptr(), size};
  check(gt_take(host(), rank, &run, 1, subject, party.waiting.hooks()), what);
  return made;
}

// All letters left for a rank are taken, and their memory is free again.
void all_taken(int rank, const std::string& what, std::vector<int32_t> peers) {
  Party party(std::move(peers), what);
  check(gt_all_taken(host(), rank, party.waiting.hooks()), what);
  let_go(rank);
}

}  // namespace

void bind_letters(py::module_& m) {
  m.def("send", &post, "Leave tensors for a rank of this host, which must not change until it has taken them.");
  m.def("recv", &take, "The bytes of the next letter of a rank of this host.");
  m.def("wait_acked", &all_taken, "Wait until a rank of this host has taken what was left for it.");
}

}  // namespace gt
