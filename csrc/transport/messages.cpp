// Point-to-point messages: send returns at once, and the receiver copies the bytes when it receives.
//
// One copy, out of the sender's memory. The sender only waits where the ring is full, and reads from a counter which
// messages were received (acked).
#include <string.h>

#include "arena.h"
#include "state.h"

namespace gt {
namespace {

static_assert(GT_MESSAGES == kMessages && GT_RUNS == kRuns, "as transport.h tells callers");

Peer& peer(gt_transport& t, int rank) { return t.peers[static_cast<size_t>(rank)]; }

int wait_for(gt_transport& t, int rank, WaitKind kind, uint64_t value, const gt_hooks* hooks) {
  t.wanted[0] = {&peer(t, rank).in->word(kind, value), value, rank, kind};
  return wait_all(t, 1, 0, hooks);
}

// The next message from a rank, once it is there.
int next_message(gt_transport& t, int rank, const Message** message, const gt_hooks* hooks) {
  const Peer& p = peer(t, rank);
  *message = &p.in->messages[(p.received + 1) % kMessages];
  return wait_for(t, rank, kMessage, p.received + 1, hooks);
}

uint64_t size_of(const Message& message) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < message.runs; ++i) bytes += message.run[i].bytes;
  return bytes;
}

// Two lists of runs of as many bytes in all, cut in different ways.
void copy(const Peer& from, const Message& message, const gt_run* runs) {
  uint64_t at = 0;  // within *runs
  for (int32_t i = 0; i < message.runs; ++i) {
    const char* source = from.arena + message.run[i].source;
    for (uint64_t left = message.run[i].bytes; left;) {
      uint64_t n = left < runs->bytes - at ? left : runs->bytes - at;
      if (n) memcpy(static_cast<char*>(runs->data) + at, source, n);
      source += n;
      left -= n;
      at += n;
      if (at == runs->bytes) ++runs, at = 0;
    }
  }
}

// The sender seldom waits for an ack, so it is woken by one only if that is what it waits for.
void send_ack(gt_transport& t, int rank) {
  Peer& p = peer(t, rank);
  p.out->acked.store(++p.received, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!p.control->sleeping.load(std::memory_order_acquire)) return;
  if (p.control->waiting.kind.load(std::memory_order_relaxed) == kAcked) wake(t, rank);
}

int recv(gt_transport& t, int rank, const gt_run* runs, int32_t count, uint64_t tag, const gt_hooks* hooks) {
  const Message* message;
  if (int status = next_message(t, rank, &message, hooks)) return status;
  uint64_t bytes = 0, left = size_of(*message);
  for (int32_t i = 0; i < count; ++i) bytes += runs[i].bytes;
  if (message->tag != tag)
    return fail(t, GT_DISAGREED, rank, "rank %d sent another message than rank %d expects", rank, t.rank);
  if (left != bytes)
    return fail(t, GT_DISAGREED, rank, "rank %d sent a message of %llu bytes, rank %d expects one of %llu", rank,
                static_cast<unsigned long long>(left), t.rank, static_cast<unsigned long long>(bytes));
  copy(peer(t, rank), *message, runs);
  // If the sender gave up meanwhile, it may have changed what was copied.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (int status = usable(t)) return status;
  send_ack(t, rank);
  return GT_OK;
}

int send(gt_transport& t, int rank, const gt_run* runs, int32_t count, uint64_t tag, const gt_hooks* hooks) {
  Peer& p = peer(t, rank);
  if (p.sent + 1 > p.acked + kMessages) {
    if (int status = wait_for(t, rank, kAcked, p.sent + 1 - kMessages, hooks)) return status;
    p.acked = p.in->acked.load(std::memory_order_acquire);
  }
  Message& message = p.out->messages[++p.sent % kMessages];
  message.tag = tag;
  message.runs = count;
  for (int32_t i = 0; i < count; ++i) {  // an empty run needs no address
    message.run[i] = {0, runs[i].bytes};
    if (runs[i].bytes) message.run[i].source = static_cast<uint64_t>(static_cast<char*>(runs[i].data) - arena_base());
  }
  message.seq.store(p.sent, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake(t, rank);
  return GT_OK;
}

}  // namespace
}  // namespace gt

using namespace gt;

extern "C" {

int gt_send(gt_transport* t, int rank, const gt_run* runs, int32_t count, uint64_t tag, const gt_hooks* hooks) {
  std::unique_lock<std::mutex> lock;
  if (int status = begin(*t, lock, hooks)) return status;
  if (count > kRuns) return fail(*t, GT_FAILED, t->rank, "a message of %d runs", count);
  for (int32_t i = 0; i < count; ++i)
    if (runs[i].bytes && !gt_in_arena(runs[i].data))
      return fail(*t, GT_FAILED, t->rank, "a message is not in memory from gt_alloc");
  return send(*t, rank, runs, count, tag, hooks);
}

uint64_t gt_sent(gt_transport* t, int rank) { return peer(*t, rank).sent; }

uint64_t gt_acked(gt_transport* t, int rank) {
  Peer& p = peer(*t, rank);
  if (t->generation == arena_generation() && p.control) p.acked = p.in->acked.load(std::memory_order_acquire);
  return p.acked;
}

int gt_wait_acked(gt_transport* t, int rank, const gt_hooks* hooks) {
  std::unique_lock<std::mutex> lock;
  if (int status = begin(*t, lock, hooks)) return status;
  return wait_for(*t, rank, kAcked, peer(*t, rank).sent, hooks);
}

int gt_probe(gt_transport* t, int rank, uint64_t* bytes, const gt_hooks* hooks) {
  std::unique_lock<std::mutex> lock;
  if (int status = begin(*t, lock, hooks)) return status;
  const Message* message;
  if (int status = next_message(*t, rank, &message, hooks)) return status;
  *bytes = size_of(*message);
  return GT_OK;
}

int gt_recv(gt_transport* t, int rank, const gt_run* runs, int32_t count, uint64_t tag, const gt_hooks* hooks) {
  std::unique_lock<std::mutex> lock;
  if (int status = begin(*t, lock, hooks)) return status;
  return recv(*t, rank, runs, count, tag, hooks);
}

}  // extern "C"
