// How regions become jobs: the words that memory allows, the dims that merge, the cuts. Exits with 1 and says where a
// table is not what was expected. Values are tested elsewhere; this is about what makes them fast.
#include <stdio.h>

#include "kernels/jobs_host.h"

using gt_jobs::Plan;

static int wrong = 0;

struct Side { uintptr_t at; std::vector<int64_t> stride; };

static std::vector<gt_job> jobs_of(std::vector<int64_t> size, std::vector<Side> sources, std::vector<Side> targets,
                                   int from, int to, int op = GT_SUM, int part = 0, int parts = 1) {
  gt_region region = {(int)size.size(), (int)sources.size(), (int)targets.size(), part, parts, 0, {}};
  std::copy(size.begin(), size.end(), region.size);
  std::vector<gt_shard> shards[2];
  std::vector<gt_corner> corners;
  int which = 0;
  for (auto* sides : {&sources, &targets}) {
    for (Side& side : *sides) {
      gt_shard shard = {(char*)side.at, {}};
      std::copy(side.stride.begin(), side.stride.end(), shard.stride);
      corners.push_back({(int64_t)shards[which].size(), {}});
      shards[which].push_back(shard);
    }
    which++;
  }
  gt_cuda_move move = {&region, 1, corners.data(), shards[0].data(), shards[1].data(), from, to, op};
  Plan plan;
  if (plan.add(move)) printf("add failed\n"), wrong++;
  plan.close();
  std::vector<gt_job> found;
  for (auto& table : plan.tables)
    for (uint32_t i = 0; i < table.jobs; i++) {
      gt_entry entry;
      memcpy(&entry, &table.words[i], sizeof(entry));
      gt_job job;
      memcpy(&job, &table.words[entry.word], sizeof(job));
      found.push_back(job);
    }
  return found;
}

struct Expected { int path, ndim; uint32_t units; };
static void expect(const char* what, const std::vector<gt_job>& found, std::vector<Expected> right) {
  bool same = found.size() == right.size();
  for (size_t i = 0; same && i < right.size(); i++)
    same = found[i].path == right[i].path && found[i].ndim == right[i].ndim && found[i].units == right[i].units;
  if (same) return;
  printf("%s:", what);
  for (const gt_job& job : found) printf(" {%d, %d, %u}", job.path, job.ndim, job.units);
  printf("\n");
  wrong++;
}

int main() {
  const uintptr_t A = 1 << 20, B = 2 << 20, C = 3 << 20;
  auto reduction = [](int dtype, int which) { return GT_REDUCE + 4 * dtype + which; };
  expect("contiguous", jobs_of({4, 6, 8}, {{A, {48, 8, 1}}}, {{B, {48, 8, 1}}}, GT_F32, GT_F32),
         {{GT_COPY + 4, 1, 48}});
  expect("a row of bf16 with head and tail", jobs_of({101}, {{A + 6, {1}}}, {{B + 6, {1}}}, GT_BF16, GT_BF16),
         {{GT_COPY + 4, 1, 12}, {GT_COPY + 1, 1, 5}});
  expect("misaligned to each other by 4", jobs_of({100}, {{A + 4, {1}}}, {{B + 8, {1}}}, GT_BF16, GT_BF16),
         {{GT_COPY + 2, 1, 50}});
  expect("rows of 12 bytes", jobs_of({9, 3}, {{A, {6, 1}}}, {{B, {3, 1}}}, GT_F32, GT_F32), {{GT_COPY + 2, 2, 27}});
  expect("rows of 16 bytes", jobs_of({9, 4}, {{A, {8, 1}}}, {{B, {4, 1}}}, GT_F32, GT_F32), {{GT_COPY + 4, 2, 9}});
  expect("every other element", jobs_of({50}, {{A, {2}}}, {{B, {1}}}, GT_F32, GT_F32), {{GT_COPY + 2, 1, 50}});
  expect("zeros", jobs_of({64}, {}, {{B, {1}}}, GT_I8, GT_I8), {{GT_COPY + 4, 1, 4}});
  expect("zeros where a sum is cast", jobs_of({64}, {}, {{B, {1}}}, GT_F32, GT_BF16), {{GT_COPY + 4, 1, 8}});
  expect("turned", jobs_of({40, 50}, {{A, {1, 40}}}, {{B, {50, 1}}}, GT_F16, GT_F16), {{GT_TURN + 1, 2, 2000}});
  expect("turned, cast", jobs_of({40, 50}, {{A, {1, 40}}}, {{B, {50, 1}}}, GT_F16, GT_F32),
         {{GT_CAST + GT_F16, 2, 2000}});
  expect("too narrow to turn", jobs_of({3, 50}, {{A, {1, 3}}}, {{B, {50, 1}}}, GT_F16, GT_F16),
         {{GT_COPY + 1, 2, 150}});
  expect("heads and sequence change places",
         jobs_of({4, 8, 10, 64}, {{A, {5120, 64, 512, 1}}}, {{B, {5120, 640, 64, 1}}}, GT_BF16, GT_BF16),
         {{GT_COPY + 4, 4, 4 * 8 * 10 * 8}});
  expect("a sum", jobs_of({64}, {{A, {1}}, {B, {1}}}, {{C, {1}}}, GT_F32, GT_F32), {{reduction(GT_F32, 1), 1, 16}});
  expect("a maximum in bf16, cast", jobs_of({67}, {{A, {1}}, {B, {1}}}, {{C, {1}}}, GT_BF16, GT_F32, GT_MAX),
         {{reduction(GT_BF16, 3), 1, 8}, {reduction(GT_BF16, 2), 1, 3}});
  expect("a cast", jobs_of({64}, {{A, {1}}}, {{B, {1}}}, GT_F32, GT_BF16), {{reduction(GT_F32, 1), 1, 16}});
  expect("complex numbers are summed by parts", jobs_of({64}, {{A, {1}}, {B, {1}}}, {{C, {1}}}, GT_C64, GT_C64),
         {{reduction(GT_F32, 1), 1, 32}});
  expect("truths are or-ed", jobs_of({64}, {{A, {1}}, {B, {1}}}, {{C, {1}}}, GT_BOOL, GT_BOOL),
         {{reduction(GT_U8, 3), 1, 16}});
  expect("a half of it, still aligned", jobs_of({1000}, {{A, {1}}}, {{B, {1}}}, GT_F32, GT_F32, GT_SUM, 1, 2),
         {{GT_COPY + 4, 1, 138}});
  expect("a scalar, made by the first", jobs_of({}, {{A, {}}}, {{B, {}}}, GT_F32, GT_F32, GT_SUM, 0, 2),
         {{GT_COPY + 2, 1, 1}});
  expect("and by nobody else", jobs_of({}, {{A, {}}}, {{B, {}}}, GT_F32, GT_F32, GT_SUM, 1, 2), {});
  expect("divided where 32 bits end", jobs_of({3ll << 29, 1}, {{A, {1, 1}}}, {{B, {1, 1}}}, GT_U8, GT_U8),
         {{GT_COPY + 4, 1, 3u << 24}, {GT_COPY + 4, 1, 3u << 24}});
  const uint32_t end = (1u << 31) - 1;
  for (uint32_t size : {1u, 2u, 3u, 5u, 7u, 64u, 641u, 65535u, 65537u, 999999937u, 1u << 30}) {
    int shift;
    const uint32_t magic = gt_magic(size, shift), multiple = end / size * size;
    for (uint32_t n : {0u, 1u, size - 1, size, size + 1, 12345u, 1u << 30, end, multiple, multiple - 1})
      if (gt_divide(n, magic, shift) != n / size) printf("%u / %u is wrong\n", n, size), wrong++;
  }
  return wrong != 0;
}
