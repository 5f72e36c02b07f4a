// The host's half of jobs.h: regions in, a table of jobs out.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "jobs.h"

#ifndef GT_JOB_ELEMENTS
#define GT_JOB_ELEMENTS (1 << 30)
#endif

namespace gt_jobs {

constexpr int DIMS = GT_DIMS + 1;       // a complex number that is summed is a dim of two
constexpr int SIZES[GT_DTYPES] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1, 8, 16, 1, 2, 4, 8, 16};

struct JobOperand {                         // of a source or a target
  char* at;
  int64_t stride[DIMS];                 // in bytes
};

struct Draft {                          // a job in the making
  int ndim = 0, sources = 0;
  int64_t size[DIMS];
  std::vector<JobOperand> corners;          // the sources, then the targets

  void swap(int a, int b) {
    std::swap(size[a], size[b]);
    for (JobOperand& c : corners) std::swap(c.stride[a], c.stride[b]);
  }
  void cut(int d, int64_t start, int64_t count) {  // what is left is [start, start + count) of dim d
    size[d] = count;
    for (JobOperand& c : corners) c.at += start * c.stride[d];
  }
  void push(int64_t n, int64_t bytes, int64_t target_bytes) {
    size[ndim] = n;
    for (size_t i = 0; i < corners.size(); i++) corners[i].stride[ndim] = (int)i < sources ? bytes : target_bytes;
    ndim++;
  }
};

inline int log2_of(int width) { return width == 16 ? 4 : width == 8 ? 3 : width == 4 ? 2 : width == 2; }
inline bool is_float(int dtype) { return dtype <= GT_BF16; }

inline Draft draft(const gt_cuda_move& move, const gt_region& region) {
  Draft d;
  d.ndim = region.ndim, d.sources = region.sources;
  std::copy(region.size, region.size + region.ndim, d.size);
  d.corners.resize((size_t)(region.sources + region.targets));
  for (size_t i = 0; i < d.corners.size(); i++) {
    const gt_corner& corner = move.corners[region.first + (int64_t)i];
    const gt_shard& shard = ((int)i < d.sources ? move.sources : move.targets)[corner.shard];
    const int64_t bytes = SIZES[(int)i < d.sources ? move.source_dtype : move.target_dtype];
    d.corners[i].at = shard.data;
    for (int k = 0; k < d.ndim; k++) {
      d.corners[i].stride[k] = shard.stride[k] * bytes;
      d.corners[i].at += corner.start[k] * d.corners[i].stride[k];
    }
  }
  return d;
}

// Part `part` of `parts`: of a dim far enough out for even parts, else of the longest. It depends on nothing but the
// sizes, so that all ranks cut alike. Along the last dim cuts come at multiples of 64 elements, to stay aligned.
inline void take_part(Draft& d, int64_t part, int64_t parts) {
  if (parts <= 1) return;
  if (!d.ndim) return d.push(part == 0, 0, 0);
  int dim = 0;
  while (dim < d.ndim && d.size[dim] < 16 * parts) dim++;
  if (dim == d.ndim) dim = (int)(std::max_element(d.size, d.size + d.ndim) - d.size);
  const int64_t n = d.size[dim], step = dim == d.ndim - 1 && n >= 64 * parts ? 64 : 1;
  auto edge = [&](int64_t p) { return p == parts ? n : n * p / parts / step * step; };
  d.cut(dim, edge(part), edge(part + 1) - edge(part));
}

// The target's slowest dim first; no dims of one element; neighbours merged where every shard has them so.
inline void simplify(Draft& d) {
  const size_t first = (size_t)d.sources;
  for (int i = 1; i < d.ndim; i++)
    for (int k = i; k && d.corners[first].stride[k - 1] < d.corners[first].stride[k]; k--) d.swap(k - 1, k);
  int kept = 0;
  for (int i = 0; i < d.ndim; i++) {
    if (d.size[i] == 1) continue;
    bool merges = kept > 0;
    for (const JobOperand& c : d.corners) merges = merges && c.stride[kept - 1] == c.stride[i] * d.size[i];
    const int into = merges ? kept - 1 : kept++;
    d.size[into] = merges ? d.size[into] * d.size[i] : d.size[i];
    for (JobOperand& c : d.corners) c.stride[into] = c.stride[i];
  }
  d.ndim = kept;
}

class JobTable {                           // of the jobs of one kind
 public:
  std::vector<uint64_t> words;          // filled by close(): the index and the jobs
  uint32_t tiles = 0, jobs = 0;

  bool put(const gt_job& job, const std::vector<uint64_t>& more, int64_t count) {
    if (tiles + count > INT32_MAX) return false;
    index_.push_back({tiles, (uint32_t)body_.size()});
    tiles += (uint32_t)count;
    jobs++;
    body_.resize(body_.size() + sizeof(job) / 8);
    memcpy(&body_[body_.size() - sizeof(job) / 8], &job, sizeof(job));
    body_.insert(body_.end(), more.begin(), more.end());
    return true;
  }

  void close() {
    for (gt_entry& entry : index_) entry.word += jobs;
    words.resize(jobs);
    if (jobs) memcpy(words.data(), index_.data(), jobs * sizeof(gt_entry));
    words.insert(words.end(), body_.begin(), body_.end());
  }

 private:
  std::vector<gt_entry> index_;
  std::vector<uint64_t> body_;
};

class Plan {
 public:
  JobTable tables[GT_KINDS];

  int add(const gt_cuda_move& move) {
    const bool cast = move.source_dtype != move.target_dtype;
    for (int64_t i = 0; i < move.count; i++) {
      const gt_region& region = move.regions[i];
      if (region.sources && cast && !(is_float(move.source_dtype) && is_float(move.target_dtype))) return GT_CUDA_DTYPE;
      if (region.sources > 0xFFFF || region.targets > 0xFFFF) return GT_CUDA_TOO_LARGE;
      Draft d = draft(move, region);
      take_part(d, region.part, region.parts);
      if (!region.targets || std::count(d.size, d.size + d.ndim, 0)) continue;
      from_ = region.sources ? move.source_dtype : move.target_dtype, to_ = move.target_dtype;
      op_ = region.sources > 1 ? move.op : GT_SUM;
      if (region.sources > 1) {
        if (to_ >= GT_RAW1 || (to_ >= GT_C64 && op_ != GT_SUM)) return GT_CUDA_DTYPE;
        if (to_ >= GT_C64) {            // a sum of complex numbers is one of both their parts
          from_ = to_ = to_ == GT_C64 ? GT_F32 : GT_F64;
          d.push(2, SIZES[to_], SIZES[to_]);
        }
        if (to_ == GT_BOOL) {           // the sum of truths is their or
          from_ = to_ = GT_U8;
          if (op_ == GT_SUM) op_ = GT_MAX;
        }
      }
      simplify(d);
      if (!d.ndim) d.push(1, SIZES[from_], SIZES[to_]);
      if (int error = divide(d)) return error;
    }
    return GT_CUDA_OK;
  }

  void close() {
    for (JobTable& table : tables) table.close();
  }

 private:
  int from_ = 0, to_ = 0, op_ = 0;

  int divide(const Draft& d) {          // a job counts its units in 32 bits
    int64_t volume = 1;
    for (int k = 0; k < d.ndim; k++) volume *= d.size[k];
    if (volume <= GT_JOB_ELEMENTS) return choose(d);
    const int longest = (int)(std::max_element(d.size, d.size + d.ndim) - d.size);
    const int64_t n = d.size[longest], half = n < 128 ? n / 2 : (n / 2 + 63) / 64 * 64;
    Draft low = d, high = d;
    low.cut(longest, 0, half);
    high.cut(longest, half, n - half);
    const int error = divide(low);
    return error ? error : divide(high);
  }

  bool contiguous(const Draft& d, int dim, size_t begin, size_t end) const {
    for (size_t i = begin; i < end; i++)
      if (d.corners[i].stride[dim] != SIZES[(int)i < d.sources ? from_ : to_]) return false;
    return true;
  }

  int choose(Draft d) {
    const int size = SIZES[from_], last = d.ndim - 1;
    const size_t sources = (size_t)d.sources, all = d.corners.size();
    for (size_t i = 0; i < all; i++)
      if ((uintptr_t)d.corners[i].at % (uintptr_t)SIZES[i < sources ? from_ : to_]) return GT_CUDA_MISALIGNED;
    const bool copy = from_ == to_ && sources <= 1;
    if (contiguous(d, last, 0, all)) {
      const int64_t widest = copy ? 16 / size : gt_lanes(size, is_float(from_));
      for (int64_t units = widest; units > 1; units = copy ? units / 2 : 1) {
        const int64_t head = head_of(d, units);
        if (head >= 0) return along(d, units, head, copy);
      }
    } else if (sources == 1 && contiguous(d, last, 1, all) && d.size[last] >= 8) {
      for (int k = 0; k < last; k++)
        if (contiguous(d, k, 0, 1) && d.size[k] >= 8) {
          for (; k < last - 1; k++) d.swap(k, k + 1);
          return emit(d, (uint8_t)(copy ? GT_TURN + log2_of(size) : GT_CAST + from_), size);
        }
    }
    return emit(d, path(copy, 1), 0);
  }

  uint8_t path(bool copy, int64_t units) const {
    return (uint8_t)(copy ? GT_COPY + log2_of((int)units * SIZES[from_])
                          : GT_REDUCE + 4 * from_ + 2 * (op_ != GT_SUM) + (units > 1));
  }

  // How many elements come before the first whole word of `units` elements, the same in every row and shard; -1 where
  // there is no such place, or rows are too short for a cut to be worth it.
  int64_t head_of(const Draft& d, int64_t units) const {
    const int last = d.ndim - 1;
    int64_t head = 0;
    for (size_t i = 0; i < d.corners.size(); i++) {
      const JobOperand& c = d.corners[i];
      const int64_t size = SIZES[(int)i < d.sources ? from_ : to_], word = std::min<int64_t>(16, units * size);
      const int64_t here = -(int64_t)(uintptr_t)c.at & (word - 1);
      for (int k = 0; k < last; k++)
        if (c.stride[k] & (word - 1)) return -1;
      if (i == 0) head = here / size % units;
      if (here != head * size % word) return -1;
    }
    const int64_t n = d.size[last];
    if (head == 0 && n % units == 0) return 0;
    return n >= (last ? 8 : 1) * units + head ? head : -1;
  }

  int along(const Draft& d, int64_t units, int64_t head, bool copy) {  // head, whole words, tail
    const int last = d.ndim - 1;
    const int64_t n = d.size[last], words = (n - head) / units, tail = n - head - words * units;
    Draft body = d;
    body.cut(last, head, words);
    for (JobOperand& c : body.corners) c.stride[last] *= units;
    if (int error = emit(body, path(copy, units), 0)) return error;
    for (auto [start, count] : {std::pair{(int64_t)0, head}, std::pair{n - tail, tail}}) {
      if (!count) continue;
      Draft rest = d;
      rest.cut(last, start, count);
      if (int error = emit(rest, path(copy, 1), 0)) return error;
    }
    return GT_CUDA_OK;
  }

  bool alike(const Draft& d, size_t begin, size_t end) const {
    for (size_t i = begin + 1; i < end; i++)
      if (!std::equal(d.corners[i].stride, d.corners[i].stride + d.ndim, d.corners[begin].stride)) return false;
    return true;
  }

  // `turned`: 0, or the size of an element of the source of a turn.
  int emit(const Draft& d, uint8_t path, int turned) {
    const size_t sources = (size_t)d.sources, all = d.corners.size();
    gt_job job = {};
    job.path = path, job.ndim = (uint8_t)d.ndim, job.to = (uint8_t)to_, job.least = op_ == GT_MIN;
    job.each = (uint8_t)((alike(d, 0, sources) ? 0 : 1) | (alike(d, sources, all) ? 0 : 2));
    job.sources = (uint16_t)sources, job.targets = (uint16_t)(all - sources);
    job.units = 1;
    std::vector<uint64_t> more;
    for (int k = 0; k < d.ndim; k++) {
      const uint32_t size = (uint32_t)d.size[k], magic = gt_magic(size, job.shift[k]);
      more.push_back((uint64_t)magic << 32 | size);  // read as {size, magic}: both machines are little-endian
      job.units *= size;
    }
    const int64_t each = (int64_t)GT_TILE * gt_times(path);
    int64_t count = (job.units + each - 1) / each;
    if (turned) {
      const int64_t side = gt_turn_side(turned), x = d.size[d.ndim - 1], y = d.size[d.ndim - 2];
      job.across = (uint32_t)((x + side - 1) / side), job.down = (uint32_t)((y + side - 1) / side);
      count = job.units / (x * y) * job.across * job.down;
    }
    for (const JobOperand& c : d.corners) more.push_back((uint64_t)(uintptr_t)c.at);
    for (size_t i = 0; i < all; i++)
      if (i == 0 || i == sources || job.each & (i < sources ? 1 : 2))
        more.insert(more.end(), d.corners[i].stride, d.corners[i].stride + d.ndim);
    const gt_kind kind = path < GT_REDUCE ? GT_MOVES : is_float(from_) ? GT_FLOATS : GT_INTEGERS;
    return tables[kind].put(job, more, count) ? GT_CUDA_OK : GT_CUDA_TOO_LARGE;
  }
};

}  // namespace gt_jobs
