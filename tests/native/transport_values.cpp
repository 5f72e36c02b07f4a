// Boxings of many kinds on many ranks, every element compared with what it must be.
//
//     transport_values threads|processes RANKS SEED CALLS
//
// Each call moves one to four tensors at once, on a random subset of the ranks in a random order, with shards inside
// and outside the arena, packed and strided, empty, small and large. Every rank overwrites its shards as soon as the
// call returns, which shows any read that comes too late, and keeps no result longer than its check.
#include "transport_world.h"

namespace {

using Rng = std::mt19937_64;
using Ranks = std::vector<int>;

int64_t below(Rng& rng, int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); }

std::vector<int64_t> offsets(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> at = {0};
  for (int64_t n : sizes) at.push_back(at.back() + n);
  return at;
}

// The layouts of one dim of n rows over the ranks of a group: everything everywhere, or cut into pieces, some empty.
std::vector<int64_t> cut(Rng& rng, int64_t n, size_t pieces) {
  std::vector<int64_t> ends = {0, n};
  for (size_t i = 1; i < pieces; ++i) {
    int64_t even = n * static_cast<int64_t>(i) / static_cast<int64_t>(pieces);
    ends.push_back(below(rng, 4) ? even : below(rng, n + 1));
  }
  std::sort(ends.begin(), ends.end());
  std::vector<int64_t> sizes;
  for (size_t i = 1; i < ends.size(); ++i) sizes.push_back(ends[i] - ends[i - 1]);
  return sizes;
}

struct Maker {
  Rng& rng;
  int ranks;
  Ranks group;
  int64_t n, m;

  Step blank() const {
    Step s;
    s.source.resize(size_t(ranks));
    s.target.resize(size_t(ranks));
    return s;
  }
  std::array<int64_t, 2>& of(std::vector<std::array<int64_t, 2>>& v, int r) { return v[size_t(r)]; }

  Step all_gather() {
    Step s = blank();
    auto rows = cut(rng, n, group.size());
    auto at = offsets(rows);
    for (int d : group) {
      of(s.target, d) = {n, m};
      for (size_t i = 0; i < group.size(); ++i) {
        of(s.source, group[i]) = {rows[i], m};
        s.parts.push_back({d, {rows[i], m}, {{group[i], {0, 0}}}, {{d, {at[i], 0}}}});
      }
    }
    return s;
  }
  std::vector<ShardSlice> everyone(int64_t row) {
    std::vector<ShardSlice> all;
    for (int r : group) all.push_back({r, {row, 0}});
    return all;
  }
  Step all_reduce(bool two_shot) {
    Step s = blank();
    auto rows = two_shot ? cut(rng, n, group.size()) : std::vector<int64_t>(group.size(), n);
    auto at = offsets(rows);
    for (size_t i = 0; i < group.size(); ++i) {
      of(s.source, group[i]) = of(s.target, group[i]) = {n, m};
      int64_t row = two_shot ? at[i] : 0;
      std::vector<ShardSlice> mine = {{group[i], {0, 0}}};
      s.parts.push_back({group[i], {rows[i], m}, everyone(row), two_shot ? everyone(row) : mine});
    }
    return s;
  }
  Step reduce_scatter() {
    Step s = blank();
    auto rows = cut(rng, n, group.size());
    auto at = offsets(rows);
    for (size_t i = 0; i < group.size(); ++i) {
      of(s.source, group[i]) = {n, m};
      of(s.target, group[i]) = {rows[i], m};
      s.parts.push_back({group[i], {rows[i], m}, everyone(at[i]), {{group[i], {0, 0}}}});
    }
    return s;
  }
  Step all_to_all() {
    Step s = blank();
    auto rows = cut(rng, n, group.size()), columns = cut(rng, m, group.size());
    auto row = offsets(rows), column = offsets(columns);
    for (size_t d = 0; d < group.size(); ++d) {
      of(s.source, group[d]) = {rows[d], m};
      of(s.target, group[d]) = {n, columns[d]};
      for (size_t i = 0; i < group.size(); ++i)
        s.parts.push_back({group[d], {rows[i], columns[d]}, {{group[i], {0, column[d]}}}, {{group[d], {row[i], 0}}}});
    }
    return s;
  }
  Step send() {  // to the next of the group, but for the last: a pipeline
    Step s = blank();
    for (size_t i = 0; i + 1 < group.size(); ++i) {
      of(s.source, group[i]) = of(s.target, group[i + 1]) = {n, m};
      s.parts.push_back({group[i + 1], {n, m}, {{group[i], {0, 0}}}, {{group[i + 1], {0, 0}}}});
    }
    return s;
  }
  Step anything() {  // rows of every result, made by anyone out of anything
    Step s = blank();
    for (int r : group) {
      of(s.source, r) = {n, m};
      of(s.target, r) = {n, m};
    }
    for (int d : group) {
      auto rows = cut(rng, n, 3);
      auto at = offsets(rows);
      for (size_t i = 0; i < 3; ++i) {
        if (!below(rng, 5)) continue;
        Part part = {group[size_t(below(rng, int64_t(group.size())))], {rows[i], m}, {}, {{d, {at[i], 0}}}};
        for (int64_t k = below(rng, 4); k > 0; --k)
          part.from.push_back({group[size_t(below(rng, int64_t(group.size())))], {below(rng, n - rows[i] + 1), 0}});
        s.parts.push_back(part);
      }
    }
    return s;
  }
  Step make(int64_t kind) {
    switch (kind) {
      case 0: return all_gather();
      case 1: return all_reduce(false);
      case 2: return all_reduce(true);
      case 3: return reduce_scatter();
      case 4: return all_to_all();
      case 5: return send();
      default: return anything();
    }
  }
};

// A shard in memory of some kind.
struct Shard {
  int64_t *memory = nullptr, *data = nullptr;
  int64_t size[2] = {}, stride[2] = {};
  bool arena = false;

  Shard(std::array<int64_t, 2> shape, bool in_arena, int64_t layout) : size{shape[0], shape[1]}, arena(in_arena) {
    int64_t pad = layout == 1 ? 3 : 0;
    bool transposed = layout == 2;
    stride[transposed ? 1 : 0] = size[transposed ? 0 : 1] + pad;
    stride[transposed ? 0 : 1] = 1;
    if (!size[0] || !size[1]) return;
    size_t bytes = static_cast<size_t>((size[0] + 1) * (size[1] + pad + 1) * 8);
    memory = static_cast<int64_t*>(in_arena ? gt_alloc(bytes) : malloc(bytes));
    CHECK(memory, "memory");
    data = memory + pad;
  }
  Shard(Shard&& other) noexcept : memory(other.memory), data(other.data), arena(other.arena) {
    std::copy(other.size, other.size + 2, size);
    std::copy(other.stride, other.stride + 2, stride);
    other.memory = nullptr;
  }
  ~Shard() { arena ? gt_free(memory) : free(memory); }
  int64_t& at(int64_t i, int64_t j) { return data[i * stride[0] + j * stride[1]]; }
  template <class F>
  void each(F f) {
    for (int64_t i = 0; i < size[0]; ++i)
      for (int64_t j = 0; j < size[1]; ++j) f(i, j, at(i, j));
  }
};

int64_t value(int64_t tag, int rank, int64_t i, int64_t j) {
  return (tag * 1000003 + rank * 10007 + i * 131 + j) % 1000 + 1;
}

struct Move {
  Step step;
  Program program;
  Shard source, target;
  int64_t tag;

  Move(Step s, int rank, int ranks, Rng& mine, int64_t t)
      : step(std::move(s)),
        program(step, rank, ranks),
        source(step.source[size_t(rank)], below(mine, 2), below(mine, 3)),
        target(step.target[size_t(rank)], true, below(mine, 3)), tag(t) {
    source.each([&](int64_t i, int64_t j, int64_t& x) { x = value(tag, rank, i, j); });
    target.each([](int64_t, int64_t, int64_t& x) { x = -1; });
  }
  gt_move view() const {
    gt_move m = {};
    m.program = &program.view;
    m.ndim = 2;
    m.source = source.data;
    m.target = target.data;
    for (int d = 0; d < 2; ++d) {
      m.source_size[d] = source.size[d];
      m.source_stride[d] = source.stride[d];
      m.target_stride[d] = target.stride[d];
    }
    m.source_dtype = m.target_dtype = GT_I64;
    return m;
  }
  void check(int rank) {
    for (const Part& part : step.parts)
      for (const ShardSlice& to : part.to)
        for (int64_t i = 0; to.rank == rank && i < part.size[0]; ++i)
          for (int64_t j = 0; j < part.size[1]; ++j) {
            int64_t sum = 0;
            for (const ShardSlice& b : part.from) sum += value(tag, b.rank, b.start[0] + i, b.start[1] + j);
            int64_t& got = target.at(to.start[0] + i, to.start[1] + j);
            CHECK(got == sum, "rank %d, tag %lld, (%lld, %lld): %lld instead of %lld", rank, (long long)tag,
                  (long long)i, (long long)j, (long long)got, (long long)sum);
            got = -1;
          }
    target.each([&](int64_t i, int64_t j, int64_t& x) {
      CHECK(x == -1, "rank %d, tag %lld: (%lld, %lld) was written", rank, (long long)tag, (long long)i, (long long)j);
    });
  }
};

// Now and then one pair of ranks does many sends in a row, so that the sender runs ahead.
struct Burst {
  int64_t left = 0;
  Ranks pair;
};

Step random_step(Rng& rng, int ranks, Burst& burst) {
  Ranks group;
  for (int r = 0; r < ranks; ++r) group.push_back(r);
  std::shuffle(group.begin(), group.end(), rng);
  if (below(rng, 2)) group.resize(size_t(2 + below(rng, ranks - 1)));
  static const int64_t kRows[] = {1, 2, 5, 16, 40, 3, 200};
  static const int64_t kColumns[] = {1, 3, 7, 16, 64, 100};
  if (burst.left == 0 && !below(rng, 40)) burst = {60, {group[0], group[1]}};
  bool bursts = burst.left > 0 && burst.left--;
  Maker maker = {rng, ranks, bursts ? burst.pair : group, kRows[below(rng, 7)], kColumns[below(rng, 6)]};
  return bursts ? maker.send() : maker.make(below(rng, 8));
}

int play(gt_transport* t, int rank, int ranks, uint64_t seed, int64_t calls) {
  Rng rng(seed), mine(seed * 31 + static_cast<uint64_t>(rank));
  Burst burst;
  for (int64_t call = 0; call < calls; ++call) {
    int64_t count = below(rng, 3) ? 1 : 2 + below(rng, 3);
    std::vector<std::unique_ptr<Move>> moves;
    std::vector<gt_move> views;
    for (int64_t k = 0; k < count; ++k) {
      moves.push_back(std::make_unique<Move>(random_step(rng, ranks, burst), rank, ranks, mine, call * 10 + k));
      views.push_back(moves.back()->view());
    }
    uint64_t site = static_cast<uint64_t>(below(mine, 2)) * 5;  // some ranks do not say
    int status = gt_run_moves(t, views.data(), static_cast<int32_t>(count), static_cast<uint64_t>(call), site, nullptr);
    char text[512];
    int culprit = gt_blame(t, text, sizeof(text));
    CHECK(status == GT_OK, "call %lld: %d, rank %d: %s", (long long)call, status, culprit, text);
    for (auto& m : moves) {
      m->source.each([](int64_t, int64_t, int64_t& x) { x = -7; });
      m->check(rank);
    }
    if (!below(rng, 20)) CHECK(gt_barrier(t, 3, nullptr) == GT_OK, "barrier");
    if (!below(mine, 200)) doze(1e-3 * static_cast<double>(below(mine, 20)));  // long enough for the others to sleep
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 5, "usage: transport_values threads|processes RANKS SEED CALLS");
  Kind kind = strcmp(arguments[1], "threads") ? kProcesses : kThreads;
  int ranks = atoi(arguments[2]);
  uint64_t seed = static_cast<uint64_t>(atoll(arguments[3]));
  int64_t calls = atoll(arguments[4]);
  printf("%s of %d, seed %llu, %lld calls\n", arguments[1], ranks, (unsigned long long)seed, (long long)calls);
  fflush(stdout);
  return run_ranks(kind, ranks, [&](gt_transport* t, int rank, Board*) { return play(t, rank, ranks, seed, calls); });
}
