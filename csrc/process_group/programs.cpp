// The table of collectives: one function per pattern, each a few lines.
#include "process_group/programs.h"

namespace gt::collective {
namespace {

constexpr size_t kMost = 4096;  // programs kept: splits that change with every call would pile up without end

struct Writer {
  int me, ranks;
  int64_t columns;
  Program& out;
  std::vector<uint8_t> ties;

  Writer(int me, int ranks, int64_t columns, Program& out)
      : me(me), ranks(ranks), columns(columns), out(out), ties(ranks) {}

  gt_region& region(int sources, int targets) {
    gt_region r{};
    r.ndim = 2;
    r.sources = sources;
    r.targets = targets;
    r.parts = 1;
    r.first = static_cast<int32_t>(out.corners.size());
    r.size[0] = 1;
    r.size[1] = columns;
    out.regions.push_back(r);
    return out.regions.back();
  }
  void corner(int shard, int64_t row = 0) {
    gt_corner c{};
    c.shard = shard;
    c.start[0] = row;
    out.corners.push_back(c);
  }
  void copy(int from, int64_t to_row = 0, int64_t from_row = 0) {
    region(1, 1);
    corner(from, from_row);
    corner(me, to_row);
  }
  void sum(int64_t row = 0) {  // of all shards, in the order of the ranks: every rank gets the same bits
    region(ranks, 1);
    for (int r = 0; r < ranks; r++) corner(r, row);
    corner(me);
  }
  void tie(int rank, int bits) {
    if (rank != me) ties[rank] |= static_cast<uint8_t>(bits);
  }
  void tie_all(int bits) {
    for (int r = 0; r < ranks; r++) tie(r, bits);
  }
};

void reduce_parts(Writer& w) {
  gt_region& r = w.region(w.ranks, w.ranks);
  r.part = w.me;
  r.parts = w.ranks;
  for (int side = 0; side < 2; side++)
    for (int rank = 0; rank < w.ranks; rank++) w.corner(rank);
  w.tie_all(GT_I_READ | GT_IT_READS | GT_I_WRITE | GT_IT_WRITES);
}

void gather(Writer& w, bool own_is_there) {
  for (int k = own_is_there ? 1 : 0; k < w.ranks; k++) {  // each rank begins with another one
    int from = (w.me + k) % w.ranks;
    w.copy(from, from);
  }
  w.tie_all(GT_I_READ | GT_IT_READS);
}

void read_by_one(Writer& w, int reader) {
  if (w.me == reader) {
    w.sum();
    w.tie_all(GT_I_READ);
  } else {
    w.tie(reader, GT_IT_READS);
  }
}

void broadcast(Writer& w, int from, bool to_itself) {
  if (w.me != from || to_itself) w.copy(from);
  if (w.me == from) w.tie_all(GT_IT_READS);
  w.tie(from, GT_I_READ);
}

void send(Writer& w, int from, int to) {
  if (w.me == to) {
    w.copy(from);
    w.tie(from, GT_I_READ);
  } else if (w.me == from) {
    w.tie(to, GT_IT_READS);
  }
}

void exchange(Writer& w) {
  for (int k = 0; k < w.ranks; k++) {
    int from = (w.me + k) % w.ranks;
    w.copy(from, from, w.me);
  }
  w.tie_all(GT_I_READ | GT_IT_READS);
}

// Sizes differ from rank to rank: the others may have something to do where this one has nothing.
void shift(Writer& w, int by) {
  int from = (w.me + w.ranks - by) % w.ranks, to = (w.me + by) % w.ranks;
  if (w.columns) w.copy(from);
  w.tie(from, GT_I_READ);
  w.tie(to, GT_IT_READS);
}

void write(Writer& w, const ProgramKey& key) {
  switch (key.pattern) {
    case Pattern::ReduceAll: w.sum(); return w.tie_all(GT_I_READ | GT_IT_READS);
    case Pattern::ReduceRows: w.sum(w.me); return w.tie_all(GT_I_READ | GT_IT_READS);
    case Pattern::ReduceParts: return reduce_parts(w);
    case Pattern::Reduce: return read_by_one(w, key.a);
    case Pattern::Gather: return gather(w, key.b);
    case Pattern::Broadcast: return broadcast(w, key.a, key.b);
    case Pattern::Send: return send(w, key.a, key.b);
    case Pattern::Exchange: return exchange(w);
    case Pattern::Shift: return shift(w, key.a);
  }
}

}  // namespace

const gt_program* Programs::get(const ProgramKey& key) {
  std::unique_ptr<Program>& program = written_[key];
  if (!program) {
    program = std::make_unique<Program>();
    Program& p = *program;
    Writer w(rank_, ranks_, key.columns, p);
    if (key.columns || key.pattern == Pattern::Shift) write(w, key);  // where nothing moves there are no partners
    for (int r = 0; r < ranks_; r++) {
      if (!w.ties[r]) continue;
      p.partner.push_back(r);
      p.tie.push_back(w.ties[r]);
    }
    p.plain = {p.regions.data(), static_cast<int64_t>(p.regions.size()), p.corners.data(), key.op,
               static_cast<int32_t>(p.partner.size()), p.partner.data(), p.tie.data()};
  }
  return &program->plain;
}

void Programs::trim() {
  if (written_.size() > kMost) written_.clear();
}

size_t Programs::ProgramKeyHash::operator()(const ProgramKey& key) const {
  uint64_t h = static_cast<uint64_t>(key.pattern) << 56 ^ static_cast<uint64_t>(key.op) << 48 ^
               static_cast<uint64_t>(key.a) << 24 ^ static_cast<uint64_t>(key.b);
  h = (h ^ static_cast<uint64_t>(key.columns) * 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
  return h ^ h >> 32;
}

}  // namespace gt::collective
