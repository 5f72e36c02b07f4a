// The boxing kernel: one launch does the regions of any number of tensors, copied, turned, reduced, cast.
//
// Blocks go through the tiles of a table of jobs (jobs.h makes it, tiles.h does one). Every word is read once from each
// source, reduced in registers in the order of the sources, and stored once into each target. Between processes the
// pass stands between two barriers of the ranks:
//
//     rank 0   ... | barrier | read shards 0, 1, 2; store into results 0, 1, 2 | barrier | ...
//     rank 1       ... | barrier | the same for another part of the region | barrier | ...
//
// The first barrier says that the shards are made and the results may be overwritten; the second, that all have read
// and stored. So a step of a program costs one launch, and nothing on the host waits.
#include "reduce_cuda.h"

#include <algorithm>
#include <new>

#include "../common/device.h"
#include "jobs_host.h"
#include "tiles.h"

namespace {

using namespace gt_tiles;

constexpr int INLINE = 489;             // words of a table that travel with the launch: its arguments are 4 KB
constexpr int PIECE = 509;              // words of a table that one launch of gt_upload brings

struct LaunchPass {
  const uint64_t* room;                 // the table; null: it is `words`
  uint32_t jobs, tiles;
  uint32_t skew;                        // the first tile, so that ranks begin at different peers
  int32_t rank, ranks;                  // 0 ranks: no barrier
  bool enter, leave;                    // a barrier at its beginning, at its end
  uint32_t* pad[GT_CUDA_RANKS];
  uint32_t* epoch;
  const uint32_t* abort;
  uint32_t* gave_up;
  uint64_t words[INLINE];
};
static_assert(sizeof(LaunchPass) <= 4096, "the arguments of a launch");

// ---- which of them
#define GT_REDUCTIONS(dtype, T)                                              \
  case GT_REDUCE + 4 * dtype: return reduce<T, 1, false>(job, unit);         \
  case GT_REDUCE + 4 * dtype + 1: return reduce<T, lanes<T>, false>(job, unit); \
  case GT_REDUCE + 4 * dtype + 2: return reduce<T, 1, true>(job, unit);      \
  case GT_REDUCE + 4 * dtype + 3: return reduce<T, lanes<T>, true>(job, unit);

template <int kind> struct JobKind;
template <> struct JobKind<GT_MOVES> {
  using Shared = Square;
  static constexpr int blocks = 3;      // of a multiprocessor: what its registers allow without spilling
  static GT_DEVICE void tile(const gt_job& job, uint32_t tile, Square& square) {
    const uint32_t unit = tile * gt_times(job.path) * GT_TILE + threadIdx.x;
    switch (job.path) {
      case GT_COPY: return copy<1>(job, unit);
      case GT_COPY + 1: return copy<2>(job, unit);
      case GT_COPY + 2: return copy<4>(job, unit);
      case GT_COPY + 3: return copy<8>(job, unit);
      case GT_COPY + 4: return copy<16>(job, unit);
      case GT_TURN: return turn<StoreWord<1>>(job, tile, square);
      case GT_TURN + 1: return turn<StoreWord<2>>(job, tile, square);
      case GT_TURN + 2: return turn<StoreWord<4>>(job, tile, square);
      case GT_TURN + 3: return turn<StoreWord<8>>(job, tile, square);
      case GT_TURN + 4: return turn<StoreWord<16>>(job, tile, square);
      case GT_CAST + GT_F32: return turn<StoreCast<float>>(job, tile, square);
      case GT_CAST + GT_F64: return turn<StoreCast<double>>(job, tile, square);
      case GT_CAST + GT_F16: return turn<StoreCast<gt_half>>(job, tile, square);
      case GT_CAST + GT_BF16: return turn<StoreCast<gt_bfloat>>(job, tile, square);
    }
  }
};
struct None {};
template <> struct JobKind<GT_FLOATS> {
  using Shared = None;
  static constexpr int blocks = 4;
  static GT_DEVICE void tile(const gt_job& job, uint32_t tile, None&) {
    const uint32_t unit = tile * GT_TILE + threadIdx.x;
    switch (job.path) {
      GT_REDUCTIONS(GT_F32, float)
      GT_REDUCTIONS(GT_F64, double)
      GT_REDUCTIONS(GT_F16, gt_half)
      GT_REDUCTIONS(GT_BF16, gt_bfloat)
    }
  }
};
template <> struct JobKind<GT_INTEGERS> {
  using Shared = None;
  static constexpr int blocks = 4;
  static GT_DEVICE void tile(const gt_job& job, uint32_t tile, None&) {
    const uint32_t unit = tile * GT_TILE + threadIdx.x;
    switch (job.path) {
      GT_REDUCTIONS(GT_I8, int8_t)
      GT_REDUCTIONS(GT_I16, int16_t)
      GT_REDUCTIONS(GT_I32, int32_t)
      GT_REDUCTIONS(GT_I64, int64_t)
      GT_REDUCTIONS(GT_U8, uint8_t)
    }
  }
};

template <int kind> GT_DEVICE void do_tiles(const LaunchPass& pass, typename JobKind<kind>::Shared& shared) {
  const uint64_t* table = pass.room ? pass.room : pass.words;
  const gt_entry* index = (const gt_entry*)table;
  for (uint32_t i = blockIdx.x; i < pass.tiles; i += gridDim.x) {
    const uint32_t tile = i + pass.skew < pass.tiles ? i + pass.skew : i + pass.skew - pass.tiles;
    uint32_t low = 0, high = pass.jobs;  // the last job that begins at or before this tile
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (index[middle].tile <= tile ? low : high) = middle;
    }
    JobKind<kind>::tile(*(const gt_job*)(table + index[low].word), tile - index[low].tile, shared);
  }
}

// A barrier of block b of all ranks: each posts how often it has been here on the pads of all, and
// waits for theirs on its own. No block waits for another of its grid; all that is asked of the devices is that these
// run at the same time. The counts live in device memory, so they go on when a graph is replayed. Returns false where
// waiting was ended.
GT_DEVICE bool gt_device_barrier(const LaunchPass& pass, uint32_t epoch) {
  if (!gt_planted(GT_NO_SYNC)) gt_sync();  // what the others of this block read and wrote came before
  bool all_came = true;
  if ((int)threadIdx.x < pass.ranks) {
    const uint32_t block = blockIdx.x * GT_CUDA_RANKS;
    gt_send(pass.pad[threadIdx.x] + block + pass.rank, epoch);
    const uint32_t* mine = pass.pad[pass.rank] + block + threadIdx.x;
    for (uint32_t spins = 1; (int32_t)(gt_look(mine) - epoch) < 0; spins++, gt_pause())
      if (spins % GT_PATIENCE == 0 && gt_glance(pass.abort)) {
        gt_note(pass.gave_up, 1);
        all_came = false;
        break;
      }
  }
  return gt_all(all_came);
}

template <int kind> GT_KERNEL(GT_THREADS, JobKind<kind>::blocks) gt_reduce_kernel(GT_ARGUMENT LaunchPass pass) {
  GT_SHARED(typename JobKind<kind>::Shared, shared);
  const uint32_t epoch = pass.ranks ? pass.epoch[blockIdx.x] : 0;
  if (pass.enter && !gt_planted(GT_NO_ENTRY) && !gt_device_barrier(pass, epoch + 1)) return;
  if (pass.ranks && !pass.enter && !gt_all(!gt_glance(pass.gave_up))) return;  // the launch that entered did not
  do_tiles<kind>(pass, shared);
  if (pass.leave) {
    if (!gt_planted(GT_NO_EXIT) && !gt_device_barrier(pass, epoch + 2)) return;
    if (threadIdx.x == 0) pass.epoch[blockIdx.x] = epoch + 2;
  }
}

GT_KERNEL(GT_THREADS, 1) gt_barrier_kernel(GT_ARGUMENT LaunchPass pass) {
  const uint32_t epoch = pass.epoch[0];
  if (gt_device_barrier(pass, epoch + 1) && threadIdx.x == 0) pass.epoch[0] = epoch + 1;
}

struct UploadPiece {
  uint64_t* to;
  uint32_t count;
  uint64_t words[PIECE];
};
static_assert(sizeof(UploadPiece) <= 4096, "the arguments of a launch");

// Brings a part of a table to the device. Not cudaMemcpyAsync: it would wait for the stream, or want pinned memory that
// lives until it has run, in a graph for as long as that.
GT_KERNEL(GT_THREADS, 1) gt_upload_kernel(GT_ARGUMENT UploadPiece piece) {
  for (uint32_t i = threadIdx.x; i < piece.count; i += GT_THREADS) piece.to[i] = piece.words[i];
}

// -------------------------------------------------------------------------------------------------- the host's side
int upload(const std::vector<uint64_t>& words, void* room, void* stream) {
  UploadPiece piece = {};
  for (size_t done = 0; done < words.size(); done += piece.count) {
    piece.to = (uint64_t*)room + done;
    piece.count = (uint32_t)std::min<size_t>(PIECE, words.size() - done);
    memcpy(piece.words, words.data() + done, piece.count * 8);
    if (gt_planted(GT_BAD_UPLOAD) && !done) piece.words[1] = piece.words[0];
    if (int error = gt_launch(gt_upload_kernel, 1, GT_THREADS, stream, piece)) return error;
  }
  return GT_CUDA_OK;
}

int tabulate(const gt_cuda_move* moves, int64_t count, gt_jobs::Plan& plan) {
  try {
    for (int64_t i = 0; i < count; i++)
      if (int error = plan.add(moves[i])) return error;
    plan.close();
    return GT_CUDA_OK;
  } catch (const std::bad_alloc&) {
    return GT_CUDA_NO_MEMORY;
  }
}

size_t room_for(const gt_jobs::Plan& plan) {
  size_t bytes = 0;
  for (const gt_jobs::JobTable& table : plan.tables) bytes += table.words.size() > INLINE ? table.words.size() * 8 : 0;
  return bytes;
}

int join(LaunchPass& pass, const gt_cuda_group& group, int blocks) {
  if (group.ranks < 1 || group.ranks > GT_CUDA_RANKS || group.rank < 0 || group.rank >= group.ranks || blocks < 1 ||
      blocks > GT_CUDA_BLOCKS)
    return GT_CUDA_GROUP;
  pass.rank = group.rank, pass.ranks = group.ranks;
  std::copy(group.pad, group.pad + group.ranks, pass.pad);
  pass.epoch = group.epoch, pass.abort = group.abort, pass.gave_up = group.gave_up;
  return GT_CUDA_OK;
}

int enqueue(int kind, int grid, void* stream, const LaunchPass& pass) {
  switch (kind) {
    case GT_MOVES: return gt_launch(gt_reduce_kernel<GT_MOVES>, grid, GT_THREADS, stream, pass);
    case GT_FLOATS: return gt_launch(gt_reduce_kernel<GT_FLOATS>, grid, GT_THREADS, stream, pass);
    default: return gt_launch(gt_reduce_kernel<GT_INTEGERS>, grid, GT_THREADS, stream, pass);
  }
}

// A launch per kind of job there is. With a group, the first one begins with a barrier and the last one ends with one,
// so that ranks agree on the barriers whatever each has to do, nothing at all too.
int run(int device, const gt_cuda_group* group, int blocks, const gt_cuda_move* moves, int64_t count, void* room,
        size_t room_bytes, void* stream) {
  gt_jobs::Plan plan;
  LaunchPass pass = {};
  if (int error = tabulate(moves, count, plan)) return error;
  if (group)
    if (int error = join(pass, *group, blocks)) return error;
  if (room_for(plan) > (room ? room_bytes : 0)) return GT_CUDA_ROOM;
  std::vector<int> kinds;
  for (int kind = 0; kind < GT_KINDS; kind++)
    if (plan.tables[kind].tiles) kinds.push_back(kind);
  if (group && kinds.empty()) kinds.push_back(GT_MOVES);
  gt_on_device here(device);
  if (here.error) return here.error;
  for (int kind : kinds) {
    const gt_jobs::JobTable& table = plan.tables[kind];
    pass.jobs = table.jobs, pass.tiles = table.tiles, pass.room = nullptr;
    pass.skew = group ? (uint32_t)((uint64_t)table.tiles * (uint32_t)pass.rank / (uint32_t)pass.ranks) : 0;
    pass.enter = group && kind == kinds.front(), pass.leave = group && kind == kinds.back();
    if (table.words.size() <= INLINE) {
      std::copy(table.words.begin(), table.words.end(), pass.words);
    } else {
      if (int error = upload(table.words, room, stream)) return error;
      pass.room = (const uint64_t*)room;
      room = (char*)room + table.words.size() * 8;
    }
    // Without barriers the device hands out blocks as others end; enough of them keep it busy to the last.
    const int grid = group ? blocks : (int)std::min<int64_t>(table.tiles, (int64_t)gt_processors(device) * GT_WAVES);
    if (int error = enqueue(kind, grid, stream, pass)) return error;
  }
  return GT_CUDA_OK;
}

}  // namespace

int gt_cuda_reduce(int device, const gt_cuda_move* moves, int64_t count, void* room, size_t room_bytes, void* stream) {
  return run(device, nullptr, 0, moves, count, room, room_bytes, stream);
}

int gt_cuda_room(const gt_cuda_move* moves, int64_t count, size_t* bytes) {
  gt_jobs::Plan plan;
  const int error = tabulate(moves, count, plan);
  *bytes = error ? 0 : room_for(plan);
  return error;
}

int gt_cuda_reduce_in_sync(int device, const gt_cuda_group* group, int blocks, const gt_cuda_move* moves, int64_t count,
                void* room, size_t room_bytes, void* stream) {
  return run(device, group, blocks, moves, count, room, room_bytes, stream);
}

int gt_cuda_barrier(int device, const gt_cuda_group* group, void* stream) {
  LaunchPass pass = {};
  if (int error = join(pass, *group, 1)) return error;
  gt_on_device here(device);
  return here.error ? here.error : gt_launch(gt_barrier_kernel, 1, GT_THREADS, stream, pass);
}

#if defined(__CUDACC__)
int gt_cuda_load_random();              // philox.cu

int gt_cuda_load(int device) {
  gt_on_device here(device);
  int error = here.error;
  for (const void* kernel : {(const void*)gt_reduce_kernel<GT_MOVES>, (const void*)gt_reduce_kernel<GT_FLOATS>,
                             (const void*)gt_reduce_kernel<GT_INTEGERS>, (const void*)gt_barrier_kernel,
                             (const void*)gt_upload_kernel}) {
    cudaFuncAttributes attributes;
    if (!error) error = (int)cudaFuncGetAttributes(&attributes, kernel);
  }
  return error ? error : gt_cuda_load_random();
}

int gt_cuda_blocks(int device, int* blocks) {
  gt_on_device here(device);
  int error = here.error, least = GT_CUDA_BLOCKS;
  for (const void* kernel : {(const void*)gt_reduce_kernel<GT_MOVES>, (const void*)gt_reduce_kernel<GT_FLOATS>,
                             (const void*)gt_reduce_kernel<GT_INTEGERS>}) {
    int each = 0;
    if (!error) error = (int)cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, GT_THREADS, 0);
    least = std::min(least, each * gt_processors(device));
  }
  *blocks = error ? 0 : least;
  return error;
}
#endif
