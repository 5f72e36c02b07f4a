// Boxing between the processes of one host over shared memory. No torch here, and a plain C interface.
//
// Every process owns an arena (a memfd that its peers map) and, per transport, a control segment. A boxing is: post
// where my shard is, wait for the partners, one pass of gt_reduce over their memory, say that I am done. What is read
// in place is waited for before the call returns; what was staged first (small or foreign tensors) is not.
// A child of fork gets a copy of the arena as it was, and can use it; transports opened before the fork fail there.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../common/arena_memory.h"
#include "../common/wait_hooks.h"
#include "../kernels/region.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gt_transport gt_transport;

enum gt_status {
  GT_OK,
  GT_DISAGREED,    // a partner is at another boxing: gt_blame names it
  GT_DIED,         // a partner's process ended
  GT_STOPPED,      // a partner's process is stopped (SIGSTOP, a debugger)
  GT_TIMED_OUT,
  GT_DEADLOCKED,   // the ranks wait for each other in a ring
  GT_ABORTED,      // another rank failed otherwise first, or this one did before; nothing more runs here
  GT_INTERRUPTED,  // the tick hook said so
  GT_NO_MEMORY,
  GT_FAILED,       // a system call failed, or a dtype cannot do this; gt_blame has the text
};

// ---- a group of ranks, all on this host, one process each
// Opens this rank's side and listens; the address goes to the other ranks (by torch's store).
gt_transport* gt_open(int rank, int ranks, double timeout_s, char* error, size_t error_size);
const char* gt_address(const gt_transport*);
// Meets the others: addresses[r] is what rank r's gt_address gave. Maps their memory and watches their processes.
// It takes as long as the last rank does, and has no hooks: release the interpreter's lock around it.
int gt_connect(gt_transport*, const char* const* addresses);
void gt_close(gt_transport*);        // says goodbye: `how` of gt_leave, or "finished"
void gt_leave(gt_transport*, const char* how);  // how this rank is about to end, for the others' errors

// ---- boxing
enum gt_tie {                        // what ties this rank to a partner, a set of bits (twin: kernel_program.py)
  GT_I_READ = 1,                     // I read its shard
  GT_IT_READS = 2,                   // it reads mine
  GT_I_WRITE = 4,                    // I store into its result
  GT_IT_WRITES = 8,                  // it stores into mine
};

typedef struct {                     // corners' `shard` is a rank of the transport, of sources and of targets
  const gt_region* regions;
  int64_t count;
  const gt_corner* corners;
  int32_t op;
  int32_t partners;
  const int32_t* partner;            // the other ranks with which this one has to do, ascending
  const uint8_t* tie;                // one per partner; whenever a reads from b, b is read by a, and so on
} gt_program;

typedef struct {
  const gt_program* program;
  int32_t ndim;
  const void* source;                // this rank's shard, NULL where it has none or an empty one
  int64_t source_size[GT_DIMS];
  int64_t source_stride[GT_DIMS];
  int32_t source_dtype, target_dtype;
  void* target;                      // its new shard, NULL where there is none; where a partner writes, in the arena
  int64_t target_stride[GT_DIMS];
} gt_move;

// Many moves in one round of the ranks. Ranks that have to do with each other pass equally many moves, in the
// same order; one that has nothing to do in a move has no partners and no regions there. `agreement` is the same number
// on all ranks that take part, or all ranks return GT_DISAGREED. `site` travels with it and is compared
// too, unless either side's is 0. A rank that only sends looks at neither; its receivers do, and its next wait.
// After anything but GT_OK the transport is dead: every later call returns GT_ABORTED at once.
int gt_run_moves(gt_transport*, const gt_move* moves, int32_t count, uint64_t agreement, uint64_t site,
                 const gt_hooks*);

// All ranks of the transport wait for each other.
int gt_barrier(gt_transport*, uint64_t agreement, const gt_hooks*);

// ---- point-to-point messages: sending does not wait for the receiver. Between two ranks they are received in the
// order in which they were sent; they do not count as boxings, and the two directions are independent. A failure
// anywhere ends them as it ends boxings.
typedef struct {
  void* data;
  uint64_t bytes;
} gt_run;
enum { GT_RUNS = 14, GT_MESSAGES = 512 };
// Sends at most GT_RUNS runs of memory, all in the arena, which must not change until gt_acked counts this message.
// Waits only while GT_MESSAGES messages are unreceived. `tag` is compared with the receiver's.
int gt_send(gt_transport*, int rank, const gt_run* runs, int32_t count, uint64_t tag, const gt_hooks*);
uint64_t gt_sent(gt_transport*, int rank);        // messages sent to a rank
uint64_t gt_acked(gt_transport*, int rank);       // how many of these it has received
int gt_wait_acked(gt_transport*, int rank, const gt_hooks*);  // waits until it has received them all
// Waits for the next message from a rank, and tells its size.
int gt_probe(gt_transport*, int rank, uint64_t* bytes, const gt_hooks*);
// Receives it into these runs, which may be cut otherwise. Another size in all, or another tag, fails with
// GT_DISAGREED.
int gt_recv(gt_transport*, int rank, const gt_run* runs, int32_t count, uint64_t tag, const gt_hooks*);

// ---- how long this rank waited for others, in boxings and messages: counted once that is asked for
void gt_count_waits(gt_transport*, int on);
double gt_waited(const gt_transport*);           // seconds

// ---- what went wrong
int gt_blame(const gt_transport*, char* text, size_t size);  // the rank to blame (-1: none) and a sentence about it
void gt_report(gt_transport*, const char* text);  // what this rank was doing, for the others to show
// Every rank's report, waiting up to `seconds` for those that have not reported; "" for a rank that did not.
void gt_collect_reports(gt_transport*, double seconds, char* texts, size_t each);  // texts[ranks][each]

#ifdef __cplusplus
}
#endif
