// Steps whose parts are all alike, and what others move at least: see traffic.h.
#include "traffic.h"

#include <algorithm>
#include <cmath>

#include "extremes.h"

namespace gt::pricing {
namespace {

using PerDim = std::array<int64_t, kDims>;

PerDim ones() {
  PerDim all;
  all.fill(1);
  return all;
}

// False where parts of a dim differ.
bool even_traffic(const Problem& of, const State& src, const State& dst, Traffic& moved) {
  int64_t terms = 1, shared = 1, summed = 1;
  PerDim common = ones(), cut = ones(), kept = ones(), by_dst = ones(), shares = ones();
  for (int axis = 0; axis < of.axes; axis++) {
    const int s = src[axis], t = dst[axis];
    const int64_t parts = of.sizes[axis];
    if (parts == 1 || (s == t && t < 0)) continue;
    if (is_partial(s)) terms *= parts;
    if (t == kSum && s < 0) {                        // a tied axis
      summed *= parts;
      if (s == kBroadcast) shared *= parts;
    } else if (t == kSum) {                          // a loose one
      kept[s] *= parts;
    }
    if (is_split(s)) {
      if (s == t && cut[s] == 1 && by_dst[s] == 1 && kept[s] == 1) {
        common[s] *= parts;
        continue;
      }
      cut[s] *= parts;
    }
    if (is_split(t)) {
      by_dst[t] *= parts;
      if (s == kBroadcast) shares[t] *= parts;
    }
  }
  const bool moving = terms > 1 || !std::equal(cut.begin(), cut.begin() + of.dims, kept.begin());
  if (moving && std::any_of(kept.begin(), kept.begin() + of.dims, [](int64_t n) { return n > 1; })) return false;
  if (moving && summed > 1 && of.dims) {
    PerDim parts;
    for (int d = 0; d < of.dims; d++) parts[d] = common[d] * by_dst[d];
    const int d = tied_dim(of, parts, summed);
    by_dst[d] *= summed;
    shares[d] *= shared;
  }
  int64_t wanted = 1, own = 1, near = 1;
  for (int d = 0; d < of.dims; d++) {
    const int64_t n = of.shape[d], both = common[d], a = cut[d], b = by_dst[d];
    const bool crosses = moving && a > 1 && b > 1;
    if (n % (both * a * (crosses ? shares[d] : 1)) || n % (both * b)) return false;
    wanted *= n / (both * b);
    near *= n / (both * std::max(a, b));
    own *= crosses ? 0 : n / (both * std::max(a, b));
  }
  moved = moving ? Traffic{terms * wanted - own, terms * wanted} : Traffic{0, near};
  return true;
}

// Elements of a rank's part, rounded up, where dims are cut into so many parts.
int64_t part_of(const Problem& of, const PerDim& cut) {
  int64_t part = 1;
  for (int d = 0; d < of.dims; d++) part *= (of.shape[d] + cut[d] - 1) / cut[d];
  return part;
}

}  // namespace

int64_t Problem::ranks() const {
  int64_t n = 1;
  for (int axis = 0; axis < axes; axis++) n *= sizes[axis];
  return n;
}

int64_t Problem::numel() const {
  int64_t n = 1;
  for (int d = 0; d < dims; d++) n *= shape[d];
  return n;
}

Traffic traffic(const Problem& of, const State& src, const State& dst, Tables& tables) {
  Traffic moved;
  return even_traffic(of, src, dst, moved) ? moved : extremes(of, src, dst, tables);
}

LeastTraffic least_traffic(const Problem& of, const State& src, const State& dst) {
  int64_t terms = 1, shares = 1;
  PerDim cut = ones(), by_dst = ones();
  for (int axis = 0; axis < of.axes; axis++) {
    const int s = src[axis], t = dst[axis];
    const int64_t parts = of.sizes[axis];
    if (is_split(s)) cut[s] *= parts;
    else if (is_partial(s) && s != t) terms *= parts;
    if (is_split(t)) by_dst[t] *= parts;
    else if (t == kSum && s != kSum) shares *= parts;
  }
  const double wanted = part_of(of, by_dst), held = part_of(of, cut);
  const double share = wanted / shares, touched = terms * share;
  return {touched - std::min(share, held), touched};
}

double least_received(const Problem& of, const State& src, const State& dst) {
  int64_t terms = 1, kept = 1, shares = 1, cuts = 1;
  PerDim cut = ones(), by_dst = ones();
  for (int axis = 0; axis < of.axes; axis++) {
    const int s = src[axis], t = dst[axis];
    const int64_t parts = of.sizes[axis];
    if (is_split(s)) cut[s] *= parts;
    else if (is_partial(s)) (s == t ? kept : terms) *= parts;
    if (is_split(t)) by_dst[t] *= parts, cuts *= parts;
    else if (is_partial(t) && s != t) shares *= parts;
  }
  const double wanted = part_of(of, by_dst), held = part_of(of, cut), share = wanted / shares;
  if (terms == 1) return share - std::min(share, held);
  const double ranks = of.ranks(), holders = ranks / (cuts * kept * shares);
  const double summed = (double)(of.numel() * kept) * ((double)(terms - 1) + std::max(holders - 1, 0.0)) / ranks;
  return std::max(share, summed);
}

}  // namespace gt::pricing
