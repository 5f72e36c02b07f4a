// A boxing: offer my shards, post an entry to every partner, wait for theirs, one pass over all memory, say done.
//
// One round where shards are small: what was staged needs no second one, since a copy is only overwritten once
// its readers are done, some calls later. Where shards are read in place, or partners write into this rank's result,
// it also waits for them to be done. A rank that is only read from waits for nobody.
#include <string.h>

#include "arena.h"
#include "moves_call.h"

namespace gt {
namespace {

size_t at(int32_t rank) { return static_cast<size_t>(rank); }

// The partners of all moves together.
void collect_partners(MovesCall& c) {
  gt_transport& t = c.t;
  if (c.count == 1) {
    c.partner = c.moves[0].program->partner;
    c.tie = c.moves[0].program->tie;
    c.partners = c.moves[0].program->partners;
  } else {
    uint8_t* all = t.ties.data() + t.ranks;  // by rank; the first half is by partner
    memset(all, 0, at(t.ranks));
    for (int32_t m = 0; m < c.count; ++m) {
      const gt_program& p = *c.moves[m].program;
      for (int32_t i = 0; i < p.partners; ++i) all[p.partner[i]] |= p.tie[i];
    }
    for (int32_t r = 0; r < t.ranks; ++r)
      if (all[r]) {
        t.partners[at(c.partners)] = r;
        t.ties[at(c.partners++)] = all[r];
      }
    c.partner = t.partners.data();
    c.tie = t.ties.data();
  }
  for (int32_t i = 0; i < c.partners; ++i) c.ties |= c.tie[i];
}

// Waits until no partner still needs the entry that the next one overwrites. It hardly ever does, except of one that
// only ever receives.
int make_room(MovesCall& c) {
  size_t wanted = 0;
  for (int32_t i = 0; i < c.partners; ++i) {
    Peer& p = c.t.peers[at(c.partner[i])];
    if (p.seq + 1 <= p.done_seen + kRing) continue;
    p.done_seen = p.in->done.load(std::memory_order_acquire);
    if (p.seq + 1 > p.done_seen + kRing) c.t.wanted[wanted++] = {&p.in->done, p.seq + 1 - kRing, c.partner[i], kDone};
  }
  return wanted ? wait_all(c.t, wanted, 0, c.hooks) : GT_OK;
}

void post_entries(MovesCall& c) {
  int awaited = 0;
  for (int32_t i = 0; i < c.partners; ++i) awaited += (c.tie[i] & (GT_I_READ | GT_I_WRITE)) != 0;
  if (awaited == 1) c.flags |= kOnlyYou;
  for (int32_t i = 0; i < c.partners; ++i) {
    Peer& p = c.t.peers[at(c.partner[i])];
    uint64_t seq = ++p.seq;
    Entry& e = p.out->ring[seq % kRing];
    e.agreement.store(c.agreement, std::memory_order_relaxed);
    e.site = c.site;
    e.done = seq - 1;
    e.source = c.source;
    e.moves = c.count;
    e.flags = static_cast<uint8_t>(c.flags | (c.waits_for(c.tie[i]) ? kIWait : 0));
    if (c.count == 1) {
      if (c.flags & kPacked)
        for (int d = 0; d < GT_DIMS; ++d) e.packed[d] = static_cast<uint16_t>(c.only.source_stride[d]);
      else
        memcpy(e.source_stride, c.only.source_stride, sizeof(e.source_stride));
      if (c.flags & kInline) memcpy(e.inline_data, c.inline_data, kInlineBytes);
      if (c.tie[i] & GT_IT_WRITES) {
        e.target = c.only.target;
        memcpy(e.target_stride, c.only.target_stride, sizeof(e.target_stride));
      }
    }
    if (c.staged) c.staged->until[at(c.partner[i])] = seq;
    e.seq.store(seq, std::memory_order_release);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int32_t i = 0; i < c.partners; ++i) wake(c.t, c.partner[i]);
}

const Entry& entry_of(const Peer& p) { return p.in->ring[p.seq % kRing]; }

int await_entries(MovesCall& c) {
  size_t wanted = 0;
  for (int32_t i = 0; i < c.partners; ++i)
    if (c.tie[i] & (GT_I_READ | GT_I_WRITE)) {
      const Peer& p = c.t.peers[at(c.partner[i])];
      c.t.wanted[wanted++] = {&entry_of(p).seq, p.seq, c.partner[i], kEntry};
    }
  if (int status = wait_all(c.t, wanted, static_cast<double>(c.bytes) / 4, c.hooks)) return status;
  for (size_t i = 0; i < wanted; ++i) {
    int32_t rank = c.t.wanted[i].rank;
    Peer& p = c.t.peers[at(rank)];
    const Entry& e = entry_of(p);
    if (p.checked + 1 < p.seq)
      if (int status = compare_unread(c.t, rank)) return status;
    bool same_site = e.site == c.site || !e.site || !c.site;
    bool same = e.agreement.load(std::memory_order_relaxed) == c.agreement;
    if (!same || e.moves != c.count || !same_site)
      return disagreed(c.t, rank, e, p.out->ring[p.seq % kRing]);
    if (e.done > p.done_seen) p.done_seen = e.done;
    p.checked = p.seq;
    c.t.waits[at(rank)] = e.flags & kIWait;
  }
  return GT_OK;
}

int reduce(MovesCall& c) {
  gt_transport& t = c.t;
  for (int32_t m = 0; m < c.count; ++m) {
    const gt_move& move = c.moves[m];
    const gt_program& program = *move.program;
    if (!program.count) continue;
    gt_shard& source = t.sources[at(t.rank)];
    source.data = static_cast<char*>(const_cast<void*>(move.source));
    memcpy(source.stride, move.source_stride, sizeof(source.stride));
    gt_shard& target = t.targets[at(t.rank)];
    target.data = static_cast<char*>(move.target);
    memcpy(target.stride, move.target_stride, sizeof(target.stride));
    for (int32_t i = 0; i < program.partners; ++i) {
      const Peer& p = t.peers[at(program.partner[i])];
      if (program.tie[i] & GT_I_READ) t.sources[at(program.partner[i])] = offered_source(p, entry_of(p), m);
      if (program.tie[i] & GT_I_WRITE) t.targets[at(program.partner[i])] = offered_target(p, entry_of(p), m);
    }
    if (gt_reduce(program.regions, program.count, program.corners, program.op, t.sources.data(), move.source_dtype,
                  t.targets.data(), move.target_dtype))
      return fail(t, GT_FAILED, t.rank, "tensors of dtype %d cannot be reduced, or stored as %d", move.source_dtype,
                  move.target_dtype);
  }
  return GT_OK;
}

// Says that this rank is done with the partners' entries, and wakes those that may sleep on that.
void mark_done(MovesCall& c) {
  bool heard = false;
  for (int32_t i = 0; i < c.partners; ++i) {
    Peer& p = c.t.peers[at(c.partner[i])];
    p.out->done.store(p.seq, std::memory_order_release);
    bool read = c.tie[i] & (GT_I_READ | GT_I_WRITE);
    c.t.waits[at(c.partner[i])] = read && (c.t.waits[at(c.partner[i])] || c.tie[i] == GT_I_READ);
    heard = heard || c.t.waits[at(c.partner[i])];
  }
  if (!heard) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int32_t i = 0; i < c.partners; ++i)
    if (c.t.waits[at(c.partner[i])]) wake(c.t, c.partner[i]);
}

int await_readers(MovesCall& c, double busy_ns) {
  size_t wanted = 0;
  for (int32_t i = 0; i < c.partners; ++i)
    if (c.waits_for(c.tie[i])) {
      const Peer& p = c.t.peers[at(c.partner[i])];
      c.t.wanted[wanted++] = {&p.in->done, p.seq, c.partner[i], kDone};
    }
  return wanted ? wait_all(c.t, wanted, busy_ns, c.hooks) : GT_OK;
}

int run(MovesCall& c) {
  if (int status = make_room(c)) return status;
  if (int status = offer(c)) return status;
  post_entries(c);
  if (int status = await_entries(c)) return status;
  bool waits = c.in_place || (c.ties & GT_IT_WRITES);
  double began = waits ? now() : 0;
  if (int status = reduce(c)) return status;
  mark_done(c);
  if (!waits) return GT_OK;
  return await_readers(c, (now() - began) * 1e9);
}

int run_checked(gt_transport* t, const gt_move* moves, int32_t count, uint64_t agreement, uint64_t site,
                const gt_hooks* hooks, bool all) {
  std::unique_lock<std::mutex> lock;
  if (int status = begin(*t, lock, hooks)) return status;
  MovesCall c{*t, moves, count, agreement, site, hooks};
  if (!all) collect_partners(c);
  if (all) {  // a barrier: everyone, as if each read from each, of nothing
    for (int32_t r = 0; r < t->ranks; ++r)
      if (r != t->rank) t->partners[at(c.partners++)] = r;
    memset(t->ties.data(), c.ties = GT_I_READ | GT_IT_READS, at(t->ranks));
    c.partner = t->partners.data();
    c.tie = t->ties.data();
  }
  int status = c.partners ? run(c) : reduce(c);
  // Where another rank gave up while this one read its memory, what was read may have changed meanwhile.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (status == GT_OK) status = usable(*t);
  if (status == GT_OK) return GT_OK;
  for (int32_t m = 0; m < count; ++m)
    if (c.ties & GT_IT_WRITES) arena_hold(moves[m].target);
  return status;
}

}  // namespace
}  // namespace gt

using namespace gt;

extern "C" {

int gt_run_moves(gt_transport* t, const gt_move* moves, int32_t count, uint64_t agreement, uint64_t site,
           const gt_hooks* hooks) {
  return run_checked(t, moves, count, agreement, site, hooks, false);
}

int gt_barrier(gt_transport* t, uint64_t agreement, const gt_hooks* hooks) {
  return run_checked(t, nullptr, 0, agreement, 0, hooks, true);
}

}  // extern "C"
