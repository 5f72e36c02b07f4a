// Boxing on GPUs: the regions of region.h, by one kernel. No torch here, and a plain C interface.
//
// All pointers of the shards are memory that `device` can reach: its own, a peer's (gt_cuda_reach), or another
// process's (gt_cuda_ipc_open). A call enqueues on `stream` (a cudaStream_t) and returns; it allocates nothing, waits
// for nothing, and can be captured in a CUDA graph.
//
//     one process drives the ranks      gt_cuda_reduce
//     a process per rank                gt_cuda_reduce_in_sync           (barrier, the same pass, barrier)
//     a process per rank, split         wait for the stream, a barrier of the processes, gt_cuda_reduce, wait, barrier
//                                       (GPUs shared by processes: a spinning kernel would wait for its turn)
//     the same, ordered by streams      gt_cuda_barrier, gt_cuda_reduce, gt_cuda_barrier
//
// Values are those of gt_reduce, to the bit (but for the payload of NaN).
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "region.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GT_CUDA_RANKS 16    // ranks with a barrier in a kernel
#define GT_CUDA_BLOCKS 256  // blocks of such a kernel
#define GT_CUDA_PAD_BYTES (GT_CUDA_RANKS * GT_CUDA_BLOCKS * 4)
#define GT_CUDA_EPOCH_BYTES (GT_CUDA_BLOCKS * 4)

enum gt_cuda_status {       // what all functions return; above 0: a cudaError_t
  GT_CUDA_OK = 0,
  GT_CUDA_DTYPE = -1,       // these dtypes cannot be reduced so, or not cast into each other
  GT_CUDA_ROOM = -2,        // the table needs room on the device: gt_cuda_room tells how much
  GT_CUDA_MISALIGNED = -3,  // the address of an element is not a multiple of its size
  GT_CUDA_TOO_LARGE = -4,   // more than 65535 sources or targets in a region, or 2**31 tiles
  GT_CUDA_GROUP = -5,       // ranks or blocks out of bounds
  GT_CUDA_NO_MEMORY = -6,   // of the host
};

typedef struct {            // one tensor's boxing
  const gt_region* regions;
  int64_t count;
  const gt_corner* corners;
  const gt_shard* sources;  // indexed by the corners' `shard`
  const gt_shard* targets;
  int32_t source_dtype, target_dtype;
  int32_t op;
} gt_cuda_move;

// All moves, none of which may depend on another, in one launch, however many tensors; in up to three where some are
// copied, some floats and some integers reduced. A table of up to 3.9 KB (some 40 regions) travels with the launch; for
// more, the caller gives `room` on the device, 8-byte aligned, in use until the stream has come to the end of the pass.
GT_EXPORT int gt_cuda_reduce(int device, const gt_cuda_move* moves, int64_t count, void* room, size_t room_bytes,
                             void* stream);
GT_EXPORT int gt_cuda_room(const gt_cuda_move* moves, int64_t count, size_t* bytes);  // 0: none needed

typedef struct {            // ranks with barriers on their devices
  uint32_t* pad[GT_CUDA_RANKS];  // GT_CUDA_PAD_BYTES of every rank, zeroed before the first barrier, as mapped here
  uint32_t* epoch;               // GT_CUDA_EPOCH_BYTES of this rank's device, zeroed; counts the barriers, replays too
  const uint32_t* abort;         // of the host, mapped: nonzero ends all waiting
  uint32_t* gave_up;             // of the host, mapped: becomes 1 where waiting ended so; then nothing can be trusted
  int32_t rank, ranks;
} gt_cuda_group;

// A barrier of the ranks' blocks, the pass, another barrier: sources may be read and targets be written once all ranks'
// streams have come here, and when the kernel ends all peers have done with this rank's memory. `blocks` is the same on
// all ranks, at most gt_cuda_blocks(device), shared by the groups whose kernels may run at the same time.
GT_EXPORT int gt_cuda_reduce_in_sync(int device, const gt_cuda_group* group, int blocks, const gt_cuda_move* moves,
                                     int64_t count, void* room, size_t room_bytes, void* stream);
// A barrier only. What comes after it on the stream runs also where waiting was ended.
GT_EXPORT int gt_cuda_barrier(int device, const gt_cuda_group* group, void* stream);

// Loads every kernel, so that no launch has to while a peer spins; once per device, before the first call.
GT_EXPORT int gt_cuda_load(int device);
GT_EXPORT int gt_cuda_blocks(int device, int* blocks);  // how many of a kernel with barriers run at the same time
GT_EXPORT int gt_cuda_reach(int device, int peer);      // lets `device` read and write the memory of `peer`

typedef struct {            // memory of a GPU, for another process of this host
  uint8_t handle[64];
  uint64_t offset;          // of the pointer in what was allocated
  uint64_t bytes;           // of what was allocated
} gt_cuda_ipc;

// Memory of cudaMalloc only (PyTorch's expandable segments cannot be exported so). Memory that is open stays open until
// it is closed as often as it was opened; its owner must not free it before.
GT_EXPORT int gt_cuda_ipc_export(int device, const void* data, gt_cuda_ipc* memory);
GT_EXPORT int gt_cuda_ipc_open(int device, const gt_cuda_ipc* memory, void** data);
GT_EXPORT int gt_cuda_ipc_close(int device, const gt_cuda_ipc* memory, void* data);

GT_EXPORT const char* gt_cuda_message(int status);  // what it means

#ifdef __cplusplus
}
#endif
