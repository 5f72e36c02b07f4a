// Ranks whose kernels meet and then use each other's memory. Every rank is a thread that stands for its stream:
// it makes its input, launches, checks what it got, and overwrites its input at once, with nothing that orders it with
// the others but the meetings in the kernels. So ThreadSanitizer sees the protocol, and nothing else.
//
// The argument plants a mistake (gt_plant in device.h). Exits with 1 where a value is wrong.
#include <stdio.h>
#include <stdlib.h>

#include "kernels/reduce.cu"

static constexpr int BLOCKS = 2, N = 997, ROWS = 40, COLUMNS = 24;

struct World {
  int ranks;
  std::vector<std::vector<float>> input, sums, turned;
  std::vector<std::vector<uint32_t>> pad, epoch;
  uint32_t abort = 0;
  std::vector<uint32_t> gave_up;

  explicit World(int n) : ranks(n), gave_up((size_t)n) {
    const size_t pads = GT_CUDA_PAD_BYTES / 4, epochs = GT_CUDA_EPOCH_BYTES / 4;
    for (int r = 0; r < n; r++) {
      input.emplace_back(ROWS * COLUMNS + N), sums.emplace_back(N), turned.emplace_back(ROWS * COLUMNS);
      pad.emplace_back(pads), epoch.emplace_back(epochs);
      // Close to where a count of 32 bits wraps around.
      for (uint32_t& word : epoch.back()) word = 0xFFFFFFF0u;
      for (uint32_t& word : pad.back()) word = 0xFFFFFFF0u;
    }
  }
  gt_cuda_group group(int rank) {
    gt_cuda_group g = {};
    for (int r = 0; r < ranks; r++) g.pad[r] = pad[(size_t)r].data();
    g.epoch = epoch[(size_t)rank].data(), g.abort = &abort, g.gave_up = &gave_up[(size_t)rank];
    g.rank = rank, g.ranks = ranks;
    return g;
  }
};

static float value(int rank, int i, int round) { return (float)((i * 7 + rank * 3 + round * 5) % 64); }
static void check(bool right, const char* what, int rank, int round) {
  if (right) return;
  printf("wrong: %s, rank %d, round %d\n", what, rank, round);
  fflush(stdout);
  _Exit(1);                             // the others would wait for this rank
}

// One call of three tensors: a sum of all, of which each rank makes a part and stores it into the results of all; the
// same input from rows split to columns split, turned; and cast. The last rank has no part in the second and third.
struct Calls {
  std::vector<gt_shard> inputs, sums, own, cast;
  std::vector<gt_corner> corners;
  std::vector<gt_region> regions;
  std::vector<gt_cuda_move> moves;
  std::vector<uint16_t> halves = std::vector<uint16_t>(ROWS * COLUMNS);

  Calls(World& world, int rank) {
    const int n = world.ranks, receivers = n - 1;
    for (int r = 0; r < n; r++) {
      inputs.push_back({(char*)world.input[(size_t)r].data(), {1}});
      sums.push_back({(char*)world.sums[(size_t)r].data(), {1}});
    }
    gt_region sum = {1, n, n, rank, n, 0, {N}};
    for (int r = 0; r < 2 * n; r++) corners.push_back({r % n, {}});
    regions.push_back(sum);
    for (int r = 0; r < n; r++) inputs.push_back({inputs[(size_t)r].data + N * 4, {COLUMNS, 1}});
    const int mine = COLUMNS / receivers;  // columns of a rank; every rank holds all ROWS of its own matrix
    own.push_back({(char*)world.turned[(size_t)rank].data(), {1, ROWS / n * n}});
    cast.push_back({(char*)halves.data(), {mine, 1}});
    const int rows = ROWS / n;
    for (int q = 0; q < n && rank < receivers; q++) {
      const int p = (rank + q) % n;
      regions.push_back({2, 1, 1, 0, 1, (int)corners.size(), {rows, mine}});
      corners.push_back({n + p, {0, rank * mine}});
      corners.push_back({0, {p * rows, 0}});
    }
    const int64_t some = (int64_t)regions.size() - 1;
    moves.push_back({regions.data(), 1, corners.data(), inputs.data(), sums.data(), GT_F32, GT_F32, GT_SUM});
    moves.push_back({regions.data() + 1, some, corners.data(), inputs.data(), own.data(), GT_F32, GT_F32, GT_SUM});
    moves.push_back({regions.data() + 1, some, corners.data(), inputs.data(), cast.data(), GT_F32, GT_BF16, GT_SUM});
  }
};

static void stream(World& world, int rank) {
  const int n = world.ranks, mine = COLUMNS / (n - 1), rows = ROWS / n;
  const gt_cuda_group group = world.group(rank);
  Calls calls(world, rank);
  std::vector<uint64_t> room(4096);
  std::vector<float>& input = world.input[(size_t)rank];
  for (int round = 0; round < 8; round++) {
    for (int i = 0; i < (int)input.size(); i++) input[(size_t)i] = value(rank, i, round);
    int error;
    if (round % 3 == 2) {               // the pass by itself, between meetings of the streams
      error = gt_cuda_barrier(0, &group, nullptr);
      if (!error) error = gt_cuda_reduce(0, calls.moves.data(), 3, room.data(), room.size() * 8, nullptr);
      if (!error) error = gt_cuda_barrier(0, &group, nullptr);
    } else {
      error = gt_cuda_reduce_in_sync(0, &group, BLOCKS, calls.moves.data(), 3, room.data(), room.size() * 8, nullptr);
    }
    check(!error, "status", rank, round);
    for (int i = 0; i < N; i++) {
      float right = 0;
      for (int r = 0; r < n; r++) right += value(r, i, round);
      if (world.sums[(size_t)rank][(size_t)i] != right) check(false, "sum", rank, round);
    }
    for (int i = 0; i < rows * n && rank < n - 1; i++)
      for (int j = 0; j < mine; j++) {
        const float right = value(i / rows, N + i % rows * COLUMNS + rank * mine + j, round);
        if (world.turned[(size_t)rank][(size_t)(j * rows * n + i)] != right) check(false, "turned", rank, round);
        if (gt_widen(gt_bfloat{calls.halves[(size_t)(i * mine + j)]}) != right) check(false, "cast", rank, round);
      }
  }
}

static void together(World& world) {
  std::vector<std::thread> streams;
  for (int r = 0; r < world.ranks; r++) streams.emplace_back(stream, std::ref(world), r);
  for (auto& thread : streams) thread.join();
}

// A rank that waits for one that never comes, until it is told to stop: it touches nothing.
static void aborted() {
  World world(2);
  const gt_cuda_group group = world.group(0);
  Calls calls(world, 0);
  std::fill(world.sums[1].begin(), world.sums[1].end(), 5.0f);
  std::thread other([&] {
    for (int i = 0; i < 1000; i++) sched_yield();
    __atomic_store_n(&world.abort, 1u, __ATOMIC_RELAXED);
  });
  check(gt_cuda_reduce_in_sync(0, &group, BLOCKS, calls.moves.data(), 3, nullptr, 0, nullptr) == 0, "status", 0, -1);
  other.join();
  check(world.gave_up[0] == 1 && world.gave_up[1] == 0, "gave up", 0, -1);
  check(std::count(world.sums[1].begin(), world.sums[1].end(), 5.0f) == N, "untouched", 0, -1);
  gt_cuda_group none = group;
  none.ranks = GT_CUDA_RANKS + 1;
  check(gt_cuda_barrier(0, &none, nullptr) == GT_CUDA_GROUP, "too many ranks", 0, -1);
  const int many = gt_cuda_reduce_in_sync(0, &group, GT_CUDA_BLOCKS + 1, nullptr, 0, nullptr, 0, nullptr);
  check(many == GT_CUDA_GROUP, "too many blocks", 0, -1);
}

int main(int count, char** arguments) {
  const int plant = count > 1 ? atoi(arguments[1]) : 0;
#if defined(GT_PLANTS)
  gt_planted_now = plant;
#endif
  if (!plant) aborted();
  for (int ranks : {2, 3, 4}) {
    World world(ranks);
    together(world);
  }
  printf("all is right\n");
}
