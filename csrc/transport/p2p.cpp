// Letters: bytes left for another rank, which takes them when it comes to it.
//
// One copy, by the receiver, out of the sender's memory. The sender waits for nobody while the ring has room, and
// learns from a counter what has been taken.
#include <string.h>

#include "arena.h"
#include "state.h"

namespace gt {
namespace {

static_assert(GT_LETTERS == kLetters && GT_RUNS == kRuns, "told to callers in transport.h");

Peer& peer(gt_transport& t, int rank) { return t.peers[static_cast<size_t>(rank)]; }

int wait_for(gt_transport& t, int rank, Word kind, uint64_t value, const gt_hooks* hooks) {
  t.wanted[0] = {&peer(t, rank).in->word(kind, value), value, rank, kind};
  return wait_all(t, 1, 0, hooks);
}

// The next letter of a rank, once it is there.
int next_letter(gt_transport& t, int rank, const Letter** found, const gt_hooks* hooks) {
  const Peer& p = peer(t, rank);
  *found = &p.in->letters[(p.read + 1) % kLetters];
  return wait_for(t, rank, kLetter, p.read + 1, hooks);
}

uint64_t size_of(const Letter& letter) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < letter.runs; ++i) bytes += letter.run[i].bytes;
  return bytes;
}

// Two lists of runs of as many bytes in all, cut in different ways.
void copy(const Peer& from, const Letter& letter, const gt_run* runs) {
  uint64_t at = 0;  // within *runs
  for (int32_t i = 0; i < letter.runs; ++i) {
    const char* source = from.arena + letter.run[i].source;
    for (uint64_t left = letter.run[i].bytes; left;) {
      uint64_t n = left < runs->bytes - at ? left : runs->bytes - at;
      if (n) memcpy(static_cast<char*>(runs->data) + at, source, n);
      source += n;
      left -= n;
      at += n;
      if (at == runs->bytes) ++runs, at = 0;
    }
  }
}

// Says that a letter is taken. The sender seldom waits for that: it is not woken from any other wait.
void tell_taken(gt_transport& t, int rank) {
  Peer& p = peer(t, rank);
  p.out->taken.store(++p.read, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!p.control->sleeping.load(std::memory_order_acquire)) return;
  if (p.control->waiting.kind.load(std::memory_order_relaxed) == kTaken) wake(t, rank);
}

int take(gt_transport& t, int rank, const gt_run* runs, int32_t count, uint64_t subject, const gt_hooks* hooks) {
  const Letter* letter;
  if (int status = next_letter(t, rank, &letter, hooks)) return status;
  uint64_t bytes = 0, left = size_of(*letter);
  for (int32_t i = 0; i < count; ++i) bytes += runs[i].bytes;
  if (letter->subject != subject)
    return fail(t, GT_DISAGREED, rank, "rank %d left another letter than rank %d takes", rank, t.rank);
  if (left != bytes)
    return fail(t, GT_DISAGREED, rank, "rank %d left a letter of %llu bytes, rank %d takes one of %llu", rank,
                static_cast<unsigned long long>(left), t.rank, static_cast<unsigned long long>(bytes));
  copy(peer(t, rank), *letter, runs);
  // Where its sender gave up meanwhile, what was copied may have changed.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (int status = usable(t)) return status;
  tell_taken(t, rank);
  return GT_OK;
}

int post(gt_transport& t, int rank, const gt_run* runs, int32_t count, uint64_t subject, const gt_hooks* hooks) {
  Peer& p = peer(t, rank);
  if (p.posted + 1 > p.gone + kLetters) {
    if (int status = wait_for(t, rank, kTaken, p.posted + 1 - kLetters, hooks)) return status;
    p.gone = p.in->taken.load(std::memory_order_acquire);
  }
  Letter& letter = p.out->letters[++p.posted % kLetters];
  letter.subject = subject;
  letter.runs = count;
  for (int32_t i = 0; i < count; ++i) {  // an empty run may lie anywhere, or nowhere
    letter.run[i] = {0, runs[i].bytes};
    if (runs[i].bytes) letter.run[i].source = static_cast<uint64_t>(static_cast<char*>(runs[i].data) - arena_base());
  }
  letter.seq.store(p.posted, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake(t, rank);
  return GT_OK;
}

}  // namespace
}  // namespace gt

using namespace gt;

extern "C" {

int gt_post(gt_transport* t, int rank, const gt_run* runs, int32_t count, uint64_t subject, const gt_hooks* hooks) {
  std::unique_lock<std::mutex> lock;
  if (int status = begin(*t, lock, hooks)) return status;
  if (count > kRuns) return fail(*t, GT_FAILED, t->rank, "a letter of %d runs", count);
  for (int32_t i = 0; i < count; ++i)
    if (runs[i].bytes && !gt_in_arena(runs[i].data))
      return fail(*t, GT_FAILED, t->rank, "a letter is not in memory from gt_alloc");
  return post(*t, rank, runs, count, subject, hooks);
}

uint64_t gt_posted(gt_transport* t, int rank) { return peer(*t, rank).posted; }

uint64_t gt_taken(gt_transport* t, int rank) {
  Peer& p = peer(*t, rank);
  if (t->generation == arena_generation() && p.control) p.gone = p.in->taken.load(std::memory_order_acquire);
  return p.gone;
}

int gt_all_taken(gt_transport* t, int rank, const gt_hooks* hooks) {
  std::unique_lock<std::mutex> lock;
  if (int status = begin(*t, lock, hooks)) return status;
  return wait_for(*t, rank, kTaken, peer(*t, rank).posted, hooks);
}

int gt_peek(gt_transport* t, int rank, uint64_t* bytes, const gt_hooks* hooks) {
  std::unique_lock<std::mutex> lock;
  if (int status = begin(*t, lock, hooks)) return status;
  const Letter* letter;
  if (int status = next_letter(*t, rank, &letter, hooks)) return status;
  *bytes = size_of(*letter);
  return GT_OK;
}

int gt_take(gt_transport* t, int rank, const gt_run* runs, int32_t count, uint64_t subject, const gt_hooks* hooks) {
  std::unique_lock<std::mutex> lock;
  if (int status = begin(*t, lock, hooks)) return status;
  return take(*t, rank, runs, count, subject, hooks);
}

}  // extern "C"
