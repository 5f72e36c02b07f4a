// Copies of shards that partners may read after the call that made them has returned.
//
// Small ones lie in one of a few slots, used in turn so that their lines stay in the caches; others in a block of the
// arena. Either is used again once every reader is done with the entry that pointed there, which nobody waits for:
// it is looked up when the next one is needed.
#include "state.h"

namespace gt {

bool aside_open(gt_transport& t) {
  char* slots = static_cast<char*>(gt_alloc(kSlots * kSlotBytes));
  if (!slots) return false;
  for (int i = 0; i < kSlots; ++i) t.slot[i] = slots + static_cast<uint64_t>(i) * kSlotBytes;
  // An aside that is in use is named in at least one partner's ring, and a ring has kRing entries.
  size_t most = kRing * t.peers.size() + 1;
  t.idle_asides.reserve(most);
  t.asides.reserve(most);
  for (size_t i = 0; i < most; ++i) {
    t.idle_asides.push_back(std::make_unique<Aside>());
    t.idle_asides.back()->until.assign(t.peers.size(), 0);
  }
  return true;
}

void aside_close(gt_transport& t) {
  if (t.slot[0]) gt_free(t.slot[0]);
  for (auto& a : t.asides) gt_free(a->block);
  t.asides.clear();
}

static bool done_with(gt_transport& t, Aside& a, bool look) {
  for (size_t r = 0; r < a.until.size(); ++r) {
    Peer& p = t.peers[r];
    if (a.until[r] > p.acked && look) p.acked = p.in->done.load(std::memory_order_acquire);
    if (a.until[r] > p.acked && !p.ended) return false;
    a.until[r] = 0;
  }
  return true;
}

void aside_reclaim(gt_transport& t, bool look) {
  for (size_t i = 0; i < t.asides.size();) {
    Aside& a = *t.asides[i];
    if (!done_with(t, a, look)) {
      ++i;
      continue;
    }
    if (a.slot >= 0) t.slots_busy &= ~(1u << a.slot);
    gt_free(a.block);
    t.bytes_aside -= a.bytes;
    a.block = nullptr;
    a.slot = -1;
    a.bytes = 0;
    t.idle_asides.push_back(std::move(t.asides[i]));
    t.asides[i] = std::move(t.asides.back());
    t.asides.pop_back();
  }
}

Aside* aside_take(gt_transport& t, uint64_t bytes, char** data) {
  // A block freed in time is one whose lines are in the cache, which is worth a look at the others' lanes.
  bool small = bytes <= kSlotBytes;
  aside_reclaim(t, !small);
  if ((small && (t.slots_busy & (1u << t.slot_next))) || t.idle_asides.empty()) aside_reclaim(t, true);
  if (t.idle_asides.empty()) return nullptr;
  Aside& a = *t.idle_asides.back();
  if (small && !(t.slots_busy & (1u << t.slot_next))) {
    a.slot = t.slot_next;
    t.slots_busy |= 1u << a.slot;
    t.slot_next = (t.slot_next + 1) % kSlots;
    *data = t.slot[a.slot];
  } else {
    *data = static_cast<char*>(a.block = gt_alloc(bytes));
    if (!a.block) return nullptr;
    a.bytes = bytes;
    t.bytes_aside += bytes;
  }
  t.asides.push_back(std::move(t.idle_asides.back()));
  t.idle_asides.pop_back();
  return &a;
}

int aside_room(gt_transport& t, uint64_t bytes, const gt_hooks* hooks) {
  while (t.bytes_aside && t.bytes_aside + bytes > kMostAside) {
    aside_reclaim(t, true);
    size_t wanted = 0;
    for (auto& a : t.asides) {
      if (!a->block || wanted) continue;
      for (size_t r = 0; r < a->until.size(); ++r)
        if (a->until[r]) t.wanted[wanted++] = {&t.peers[r].in->done, a->until[r], static_cast<int>(r), kDone};
    }
    if (int status = wait_all(t, wanted, 0, hooks)) return status;
  }
  return GT_OK;
}

}  // namespace gt
