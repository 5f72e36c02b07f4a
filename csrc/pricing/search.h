// The seconds of boxings on one placement: of a step, and of the best path (boxings/plan.py).
#pragma once
#include <map>

#include "traffic.h"

namespace gt::pricing {

// `links` are pairs of latency and bandwidth: of the whole placement; and where ranks are on several hosts, by the axes
// that a step changes, a bit each.
struct Rates {
  const double* links;
  bool by_axes;
  double memory;
};

// Seconds until it has started, and seconds for each byte of the whole tensor.
struct Cost {
  double fixed, rate;
};

// Searches for a tensor, which have steps in common.
class Search {
 public:
  Search(const Problem& of, const Rates& rates) : of(of), rates(rates) {}

  Cost step(const State& src, const State& dst);

  // The straight path, or that over the best state between; `via` says whether there is one.
  Cost between(const State& src, const State& dst, int magnitude, State& state, bool& via);

  // The same, where sums and maxima that are both pending are reduced one after the other.
  Cost best(const State& src, const State& dst, int magnitude);

  // Seconds that no path takes less of, from bounds of its steps.
  double bound(const State& src, const State& dst, int64_t nbytes) const;

  const Problem of;

 private:
  Cost seconds(const State& src, const State& dst, double crossing, double touched) const;
  Cost least(const State& src, const State& dst) const;

  const Rates rates;
  Tables tables;
  std::map<std::pair<State, State>, Cost> steps;
};

}  // namespace gt::pricing
