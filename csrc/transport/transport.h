// Boxing between the processes of one host over shared memory. No torch here, and a plain C interface.
//
// Every process owns an arena (a memfd that its peers map) and, per transport, a control segment. A boxing is: post
// where my shard lies, wait for the partners, one pass of gt_reduce over their memory, say that I am done. What is read
// in place is waited for before the call returns; what was copied aside first (small or foreign tensors) is not.
// A child of fork gets a copy of the arena as it was, and can use it; transports opened before the fork fail there.
#pragma once
#include <stddef.h>
#include <stdint.h>

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
  GT_ABORTED,      // another rank met other trouble first, or this one did before; nothing more runs here
  GT_INTERRUPTED,  // the tick hook said so
  GT_NO_MEMORY,
  GT_FAILED,       // a system call failed, or a dtype cannot do this; gt_blame has the text
};

// ---- the arena: memory of this process that its peers can read and write
void* gt_alloc(size_t bytes);        // 64-byte aligned, pooled; NULL where there is none left
void gt_free(void* data);            // NULL is fine
int gt_in_arena(const void* data);

// ---- a group of ranks, all on this host, one process each
// Opens this rank's side and listens; the address goes to the other ranks (by torch's store).
gt_transport* gt_open(int rank, int ranks, double timeout_s, char* error, size_t error_size);
const char* gt_address(const gt_transport*);
// Meets the others: addresses[r] is what rank r's gt_address gave. Maps their memory and watches their processes.
// It takes as long as the last rank does, and has no hooks: release the interpreter's lock around it.
int gt_connect(gt_transport*, const char* const* addresses);
void gt_close(gt_transport*);        // says goodbye: `how` of gt_leave, or "finished"
void gt_leave(gt_transport*, const char* how);  // how this rank is about to end, for the others' errors

// ---- waiting: called only once a wait has outlasted the spinning
typedef struct {
  void (*enter)(void*);              // before the first sleep (release the interpreter's lock)
  int (*tick)(void*);                // about every 50 ms; nonzero ends the wait with GT_INTERRUPTED
  void (*leave)(void*);
  void* context;
} gt_hooks;

// ---- boxing
enum gt_tie {                        // what ties this rank to a partner, a set of bits
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

// Many moves at once: one meeting of the ranks. Ranks that have to do with each other pass equally many moves, in the
// same order; one that has nothing to do in a move has no partners and no regions there. `agreement` is the same number
// on all ranks that take part, or all ranks return GT_DISAGREED. `site` travels with it and is compared
// too, unless either side's is 0. A rank that only sends looks at neither; its receivers do, and its next wait.
// After anything but GT_OK the transport is dead: every later call returns GT_ABORTED at once.
int gt_box(gt_transport*, const gt_move* moves, int32_t count, uint64_t agreement, uint64_t site, const gt_hooks*);

// A meeting of all ranks of the transport.
int gt_barrier(gt_transport*, uint64_t agreement, const gt_hooks*);

// ---- letters: bytes left for another rank, which takes them when it comes to it. Between two ranks they are taken in
// the order in which they were left; they do not count as boxings, and the two directions have nothing to do with
// each other. The same failures end them, and all else.
typedef struct {
  void* data;
  uint64_t bytes;
} gt_run;
enum { GT_RUNS = 14, GT_LETTERS = 512 };
// Leaves at most GT_RUNS runs of memory, all in the arena, which must be left alone until gt_taken counts this letter.
// Waits only while GT_LETTERS letters lie there. `subject` is compared with the receiver's.
int gt_post(gt_transport*, int rank, const gt_run* runs, int32_t count, uint64_t subject, const gt_hooks*);
uint64_t gt_posted(gt_transport*, int rank);      // letters left for a rank
uint64_t gt_taken(gt_transport*, int rank);       // how many of these it has taken
int gt_all_taken(gt_transport*, int rank, const gt_hooks*);  // waits until it has taken them all
// Waits for the next letter of a rank, and tells its size.
int gt_peek(gt_transport*, int rank, uint64_t* bytes, const gt_hooks*);
// Waits for it and copies it to these runs, which may be cut otherwise but hold as many bytes, or all fails with
// GT_DISAGREED, as it does where the subject is another.
int gt_take(gt_transport*, int rank, const gt_run* runs, int32_t count, uint64_t subject, const gt_hooks*);

// ---- what went wrong
int gt_blame(const gt_transport*, char* text, size_t size);  // the rank to blame (-1: none) and a sentence about it
void gt_tell(gt_transport*, const char* text);    // what this rank was doing, for the others to show
// Every rank's text, waiting up to `seconds` for those that have not told; "" for a rank that did not.
void gt_told(gt_transport*, double seconds, char* texts, size_t each);  // texts[ranks][each]

#ifdef __cplusplus
}
#endif
