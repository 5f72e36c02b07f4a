// How a rank offers its shards to its partners, and how they find them.
//
//     in all      <= 64 bytes            in the entry itself, once per partner
//     in all      <= 64 KB               copied into a slot
//     this rank is only read from        staged, whatever the size: a sender does not wait for receivers, unless
//                                        they are waiting for it and nobody else: then reading is as quick as copying
//     in the arena                       left in place; the call then waits for the readers, since the caller may
//                                        change its tensor as soon as it gets it back
//     else                               staged (copied): only the arena can be read by others
//
// A copy is packed: contiguous, whatever the strides of the original.
#include <string.h>

#include "arena.h"
#include "moves_call.h"

namespace gt {
namespace {

constexpr uint64_t kCopied = kSlotBytes;  // up to here a copy costs less than waiting for the readers
constexpr double kBytesPerNs = 100;       // that a copy moves, in the caches

uint64_t elements(const gt_move& m) {
  uint64_t n = 1;
  for (int d = 0; d < m.ndim; ++d) n *= static_cast<uint64_t>(m.source_size[d]);
  return n;
}

uint64_t bytes_of(const gt_move& m) { return elements(m) * static_cast<uint64_t>(gt_itemsize(m.source_dtype)); }

uint64_t round_up(uint64_t n) { return (n + 63) & ~uint64_t{63}; }

bool is_read(const gt_move& m) {
  uint8_t ties = 0;
  for (int32_t i = 0; i < m.program->partners; ++i) ties |= m.program->tie[i];
  return m.source && (ties & GT_IT_READS);
}

// Are all partners there already, waiting for nothing but this rank's entry?
bool all_wait(const MovesCall& c) {
  for (int32_t i = 0; i < c.partners; ++i) {
    const Peer& p = c.t.peers[static_cast<size_t>(c.partner[i])];
    const Entry& e = p.in->ring[(p.seq + 1) % kRing];
    if (e.seq.load(std::memory_order_acquire) != p.seq + 1 || !(e.flags & kOnlyYou)) return false;
  }
  return true;
}

// A moment's patience, a fraction of what copying would cost, is enough for receivers that are just about to come.
bool all_come_soon(const MovesCall& c) {
  if (all_wait(c)) return true;
  double patience = c.t.crowded ? 0 : static_cast<double>(c.bytes) / kBytesPerNs / 8;
  for (; patience > 0; patience -= c.t.pause_ns) {
    if (all_wait(c)) return true;
    spin_pause();
  }
  return false;
}

bool is_staged(const MovesCall& c, const gt_move& m) { return c.stage_all || !gt_in_arena(m.source); }

// The strides of a packed copy; true where the original has the same. A dim of one element has no stride to speak of.
bool pack_strides(const gt_move& m, int64_t* stride) {
  bool same = true;
  int64_t n = 1;
  for (int d = m.ndim - 1; d >= 0; --d) {
    stride[d] = m.source_size[d] == 1 ? 0 : n;
    same = same && (m.source_size[d] == 1 || m.source_stride[d] == n);
    n *= m.source_size[d];
  }
  return same;
}

int pack(MovesCall& c, const gt_move& m, char* to, int64_t* stride) {
  uint64_t bytes = bytes_of(m);
  if (pack_strides(m, stride) && bytes <= kSlotBytes) {  // beyond, the kernel knows better how to copy
    memcpy(to, m.source, bytes);
    return GT_OK;
  }
  gt_region whole = {};
  whole.ndim = m.ndim;
  whole.sources = whole.targets = whole.parts = 1;
  memcpy(whole.size, m.source_size, sizeof(int64_t) * static_cast<size_t>(m.ndim));
  gt_corner corners[2] = {};
  gt_shard from = {static_cast<char*>(const_cast<void*>(m.source)), {}}, copy = {to, {}};
  memcpy(from.stride, m.source_stride, sizeof(from.stride));
  memcpy(copy.stride, stride, sizeof(int64_t) * static_cast<size_t>(m.ndim));
  if (!gt_reduce(&whole, 1, corners, GT_SUM, &from, m.source_dtype, &copy, m.source_dtype)) return GT_OK;
  return fail(c.t, GT_FAILED, c.t.rank, "rank %d cannot copy a tensor of dtype %d", c.t.rank, m.source_dtype);
}

uint64_t distance(const void* data) { return static_cast<uint64_t>(static_cast<const char*>(data) - arena_base()); }

// Where one move's shards are; `copy` moves on where the source was copied there.
int place(MovesCall& c, const gt_move& m, Place& place, char** copy) {
  if (is_read(m) && is_staged(c, m)) {
    if (int status = pack(c, m, *copy, place.source_stride)) return status;
    place.source = *copy == c.inline_data ? 0 : distance(*copy);
    *copy += round_up(bytes_of(m));
  } else if (is_read(m)) {
    c.in_place = true;
    place.source = distance(m.source);
    memcpy(place.source_stride, m.source_stride, sizeof(place.source_stride));
  }
  if (!m.target || !(c.ties & GT_IT_WRITES)) return GT_OK;
  place.target = distance(m.target);
  memcpy(place.target_stride, m.target_stride, sizeof(place.target_stride));
  bool written = false;
  for (int32_t i = 0; i < m.program->partners; ++i) written = written || (m.program->tie[i] & GT_IT_WRITES);
  if (!written || gt_in_arena(m.target)) return GT_OK;
  return fail(c.t, GT_FAILED, c.t.rank, "a result that other ranks write to is not in memory from gt_alloc");
}

int offer_one(MovesCall& c) {
  const gt_move& m = c.moves[0];
  char* copy = nullptr;
  if (is_read(m) && is_staged(c, m)) {
    c.flags = c.bytes <= kSlotBytes ? kPacked : 0;
    if (c.bytes <= kInlineBytes) {
      c.flags |= kInline;
      copy = c.inline_data;
    } else if (!(c.staged = staging_acquire(c.t, c.bytes, &copy))) {
      return fail(c.t, GT_NO_MEMORY, c.t.rank, "rank %d is out of memory", c.t.rank);
    }
  }
  int status = place(c, m, c.only, &copy);
  c.source = c.only.source;
  return status;
}

int offer_many(MovesCall& c) {
  uint64_t total = round_up(sizeof(Place) * static_cast<uint64_t>(c.count));
  uint64_t copies = total;
  for (int32_t i = 0; i < c.count; ++i)
    if (is_read(c.moves[i]) && is_staged(c, c.moves[i])) total += round_up(bytes_of(c.moves[i]));
  char* data = nullptr;
  if (!(c.staged = staging_acquire(c.t, total, &data)))
    return fail(c.t, GT_NO_MEMORY, c.t.rank, "rank %d is out of memory", c.t.rank);
  Place* places = reinterpret_cast<Place*>(data);
  char* copy = data + copies;
  for (int32_t i = 0; i < c.count; ++i)
    if (int status = place(c, c.moves[i], places[i], &copy)) return status;
  c.source = distance(data);
  return GT_OK;
}

const Place& place_in(const Peer& p, const Entry& e, int32_t move) {
  return reinterpret_cast<const Place*>(p.arena + e.source)[move];
}

}  // namespace

int offer(MovesCall& c) {
  for (int32_t i = 0; i < c.count; ++i)
    if (is_read(c.moves[i])) c.bytes += bytes_of(c.moves[i]);
  c.stage_all = c.bytes <= kCopied || (c.ties == GT_IT_READS && !all_come_soon(c));
  if (c.bytes > kSlotBytes)
    if (int status = staging_wait_for_room(c.t, c.bytes, c.hooks)) return status;
  return c.count == 0 ? GT_OK : c.count == 1 ? offer_one(c) : offer_many(c);
}

gt_shard offered_source(const Peer& p, const Entry& e, int32_t move) {
  gt_shard s;
  if (e.moves != 1) {
    const Place& place = place_in(p, e, move);
    s.data = p.arena + place.source;
    memcpy(s.stride, place.source_stride, sizeof(s.stride));
    return s;
  }
  s.data = e.flags & kInline ? const_cast<char*>(e.inline_data) : p.arena + e.source;
  if (e.flags & kPacked)
    for (int d = 0; d < GT_DIMS; ++d) s.stride[d] = e.packed[d];
  else
    memcpy(s.stride, e.source_stride, sizeof(s.stride));
  return s;
}

gt_shard offered_target(const Peer& p, const Entry& e, int32_t move) {
  gt_shard s;
  bool only = e.moves == 1;
  s.data = p.arena + (only ? e.target : place_in(p, e, move).target);
  memcpy(s.stride, only ? e.target_stride : place_in(p, e, move).target_stride, sizeof(s.stride));
  return s;
}

}  // namespace gt
