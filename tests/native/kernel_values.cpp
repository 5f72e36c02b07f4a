// Random regions against the plainest possible loop over elements, to be built with sanitizers: every operand lies in
// a block of memory of just its size, so that a byte too far is found. Each part of a region has a thread, as each is
// the work of another rank, so that parts that write the same bytes are found.
//
//     g++ -g -std=c++17 -pthread -fsanitize=address,undefined tests/native/kernel_values.cpp csrc/kernels/*.cpp
//     g++ -g -std=c++17 -pthread -fsanitize=thread tests/native/kernel_values.cpp csrc/kernels/*.cpp
//     ./a.out [seed [regions]]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/kernels/loops.h"
#include "../../csrc/kernels/region.h"

static std::mt19937 random_bits;
static int64_t pick(int64_t low, int64_t high) { return low + static_cast<int64_t>(random_bits() % (high - low + 1)); }

// A shard of its own memory: dims in any order, with gaps. `start` is where in it the region begins.
struct Operand {
  std::vector<int64_t> room, start;
  gt_shard shard{};
  char* memory = nullptr;
  int64_t bytes = 0;

  Operand(const std::vector<int64_t>& size, int item) {
    const int ndim = static_cast<int>(size.size());
    std::vector<int> order(ndim);
    for (int d = 0; d < ndim; d++) order[d] = d;
    if (pick(0, 1)) std::shuffle(order.begin(), order.end(), random_bits);
    room = size, start.assign(ndim, 0);
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; i--) {
      const int d = order[i];
      start[d] = pick(0, 2), room[d] += start[d] + pick(0, 2);
      if (pick(0, 1)) room[d] -= start[d], start[d] = 0;
      shard.stride[d] = step, step *= room[d];
    }
    bytes = step * item;
    memory = shard.data = static_cast<char*>(malloc(std::max<int64_t>(bytes, 1)));
    for (int64_t i = 0; i < bytes; i++) memory[i] = static_cast<char>(random_bits());
  }
  Operand(Operand&& other) noexcept
      : room(other.room), start(other.start), shard(other.shard), memory(other.memory), bytes(other.bytes) {
    other.memory = nullptr;
  }
  ~Operand() { free(memory); }

  char* at(const std::vector<int64_t>& index, int item) const {
    int64_t offset = 0;
    for (size_t d = 0; d < index.size(); d++) offset += (start[d] + index[d]) * shard.stride[d];
    return memory + offset * item;
  }
};

// Small whole numbers, so that sums in any precision are exact.
static void write(char* at, int dtype, int value) {
  const float f = static_cast<float>(value);
  const double d = value;
  const int16_t h = static_cast<int16_t>(value);
  const int32_t i = value;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint16_t b = static_cast<uint16_t>(bits >> 16);
  const int item = gt_itemsize(dtype);
  if (dtype == GT_F32) memcpy(at, &f, item);
  else if (dtype == GT_F64) memcpy(at, &d, item);
  else if (dtype == GT_BF16) memcpy(at, &b, item);
  else if (dtype == GT_I16) memcpy(at, &h, item);
  else memcpy(at, &i, item);
}

template <class F> static void each(const std::vector<int64_t>& size, F f) {
  std::vector<int64_t> index(size.size(), 0);
  for (int64_t n : size)
    if (n == 0) return;
  for (;;) {
    f(index);
    int d = static_cast<int>(size.size()) - 1;
    for (; d >= 0 && ++index[d] == size[d]; d--) index[d] = 0;
    if (d < 0) return;
  }
}

static int term(const std::vector<int64_t>& index, int k) {
  int64_t mixed = k * 7;
  for (int64_t i : index) mixed = mixed * 5 + i;
  return static_cast<int>(mixed % 13) - 6;
}

static void fail(const char* what, const gt_region& region, int source, int target) {
  printf("%s: %d dims, %d sources of dtype %d, %d targets of dtype %d, %d parts, sizes", what, region.ndim,
         region.sources, source, region.targets, target, region.parts);
  for (int d = 0; d < region.ndim; d++) printf(" %ld", static_cast<long>(region.size[d]));
  printf("\n");
  exit(1);
}

// `large`: so much that it is stored past the caches.
static void once(bool large) {
  static const int reduced[] = {GT_F32, GT_F64, GT_BF16, GT_I16, GT_I32};
  const int ndim = static_cast<int>(large ? 2 : pick(0, 5));
  std::vector<int64_t> size(ndim);
  int64_t count = 1;
  for (auto& n : size) {
    n = pick(0, 3) ? pick(1, 9) : pick(0, ndim < 3 ? 300 : 40);
    if (count * n > 20000) n = 2;
    if (large) n = pick(1800, 1900);
    count *= n;
  }
  gt_region region{};
  region.ndim = ndim, region.sources = static_cast<int>(pick(0, 5)), region.targets = static_cast<int>(pick(1, 3));
  if (large) region.sources %= 3;
  region.parts = static_cast<int>(pick(1, 3));
  std::copy(size.begin(), size.end(), region.size);
  int source = reduced[pick(0, 4)];
  int target = source < GT_I8 && pick(0, 1) ? reduced[pick(0, 2)] : source;
  if (region.sources == 1 && pick(0, 1)) source = target = static_cast<int>(pick(0, GT_DTYPES - 1));
  const bool numbers = std::count(reduced, reduced + 5, source) > 0;

  std::vector<Operand> all;
  std::vector<gt_shard> shards;
  std::vector<gt_corner> corners;
  for (int k = 0; k < region.sources + region.targets; k++) {
    all.emplace_back(size, gt_itemsize(k < region.sources ? source : target));
    gt_corner corner{};
    corner.shard = k < region.sources ? k : k - region.sources;
    std::copy(all[k].start.begin(), all[k].start.end(), corner.start);
    corners.push_back(corner), shards.push_back(all[k].shard);
    if (k < region.sources && numbers)
      each(size, [&](const auto& i) { write(all[k].at(i, gt_itemsize(source)), source, term(i, k)); });
  }
  std::vector<std::vector<char>> expected;
  const int item = gt_itemsize(target);
  for (int t = 0; t < region.targets; t++) {
    const Operand& o = all[region.sources + t];
    expected.emplace_back(o.memory, o.memory + o.bytes);
    each(size, [&](const auto& i) {
      char* at = expected[t].data() + (o.at(i, item) - o.memory);
      int sum = 0;
      for (int k = 0; k < region.sources; k++) sum += term(i, k);
      if (region.sources == 0) memset(at, 0, item);
      else if (numbers) write(at, target, sum);
      else memcpy(at, all[0].at(i, item), item);
    });
  }
  std::vector<std::thread> ranks;
  for (int part = 0; part < region.parts; part++)
    ranks.emplace_back([&, part, own = region]() mutable {
      own.part = part;
      if (gt_reduce(&own, 1, corners.data(), GT_SUM, shards.data(), source, shards.data() + own.sources, target))
        fail("refused", own, source, target);
    });
  for (std::thread& rank : ranks) rank.join();
  for (int t = 0; t < region.targets; t++)
    if (!expected[t].empty() && memcmp(expected[t].data(), all[region.sources + t].memory, expected[t].size()))
      fail("wrong", region, source, target);
}

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(atoll(argv[1])) : 1;
  const int regions = argc > 2 ? atoi(argv[2]) : 4000, large = regions / 1000 + 2;
  printf("seed %u\n", seed);
  for (int level = 0; level < 4; level++) {
    if (gt_use_vectors(level) != level) break;
    random_bits.seed(seed);
    for (int i = 0; i < regions; i++) once(false);
    for (int i = 0; i < large; i++) once(true);
    printf("level %d: %d regions\n", level, regions + large);
  }
}
