// Copies of shards that partners may read after the call that made them has returned.
//
// Small ones are in one of a few slots, used in turn so that their lines stay in the caches; others in a block of the
// arena. Either is used again once every reader is done with the entry that pointed there, which nobody waits for:
// it is looked up when the next one is needed.
#include "state.h"

namespace gt {

bool staging_open(gt_transport& t) {
  char* slots = static_cast<char*>(gt_alloc(kSlots * kSlotBytes));
  if (!slots) return false;
  for (int i = 0; i < kSlots; ++i) t.slot[i] = slots + static_cast<uint64_t>(i) * kSlotBytes;
  // A copy in use is named in at least one partner's ring, and a ring has kRing entries.
  size_t most = kRing * t.peers.size() + 1;
  t.idle_copies.reserve(most);
  t.staged_copies.reserve(most);
  for (size_t i = 0; i < most; ++i) {
    t.idle_copies.push_back(std::make_unique<StagedCopy>());
    t.idle_copies.back()->until.assign(t.peers.size(), 0);
  }
  return true;
}

void staging_close(gt_transport& t) {
  if (t.slot[0]) gt_free(t.slot[0]);
  for (auto& a : t.staged_copies) gt_free(a->block);
  t.staged_copies.clear();
}

static bool done_with(gt_transport& t, StagedCopy& a, bool look) {
  for (size_t r = 0; r < a.until.size(); ++r) {
    Peer& p = t.peers[r];
    if (a.until[r] > p.done_seen && look) p.done_seen = p.in->done.load(std::memory_order_acquire);
    if (a.until[r] > p.done_seen && !p.ended) return false;
    a.until[r] = 0;
  }
  return true;
}

void staging_reclaim(gt_transport& t, bool look) {
  for (size_t i = 0; i < t.staged_copies.size();) {
    StagedCopy& a = *t.staged_copies[i];
    if (!done_with(t, a, look)) {
      ++i;
      continue;
    }
    if (a.slot >= 0) t.slots_busy &= ~(1u << a.slot);
    gt_free(a.block);
    t.staged_bytes -= a.bytes;
    a.block = nullptr;
    a.slot = -1;
    a.bytes = 0;
    t.idle_copies.push_back(std::move(t.staged_copies[i]));
    t.staged_copies[i] = std::move(t.staged_copies.back());
    t.staged_copies.pop_back();
  }
}

StagedCopy* staging_acquire(gt_transport& t, uint64_t bytes, char** data) {
  // A block freed in time is one whose lines are in the cache, which is worth a look at the others' lanes.
  bool small = bytes <= kSlotBytes;
  staging_reclaim(t, !small);
  if ((small && (t.slots_busy & (1u << t.slot_next))) || t.idle_copies.empty()) staging_reclaim(t, true);
  if (t.idle_copies.empty()) return nullptr;
  StagedCopy& a = *t.idle_copies.back();
  if (small && !(t.slots_busy & (1u << t.slot_next))) {
    a.slot = t.slot_next;
    t.slots_busy |= 1u << a.slot;
    t.slot_next = (t.slot_next + 1) % kSlots;
    *data = t.slot[a.slot];
  } else {
    *data = static_cast<char*>(a.block = gt_alloc(bytes));
    if (!a.block) return nullptr;
    a.bytes = bytes;
    t.staged_bytes += bytes;
  }
  t.staged_copies.push_back(std::move(t.idle_copies.back()));
  t.idle_copies.pop_back();
  return &a;
}

int staging_wait_for_room(gt_transport& t, uint64_t bytes, const gt_hooks* hooks) {
  while (t.staged_bytes && t.staged_bytes + bytes > kMostStaged) {
    staging_reclaim(t, true);
    size_t wanted = 0;
    for (auto& a : t.staged_copies) {
      if (!a->block || wanted) continue;
      for (size_t r = 0; r < a->until.size(); ++r)
        if (a->until[r]) t.wanted[wanted++] = {&t.peers[r].in->done, a->until[r], static_cast<int>(r), kDone};
    }
    if (int status = wait_all(t, wanted, 0, hooks)) return status;
  }
  return GT_OK;
}

}  // namespace gt
