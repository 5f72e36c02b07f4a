// Which state between is worth its step: those that cost least at least are priced first, so that most never are.
#include "search.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace gt::pricing {
namespace {

constexpr double kOfStep = 1e-9;                     // OF_STEP of boxings/plan.py

// The axes that a step changes, a bit each; none where its groups need each other (boxings/group_step.py).
unsigned separate_axes(const Problem& of, const State& src, const State& dst) {
  unsigned changed = 0, cut = 0;
  for (int axis = 0; axis < of.axes; axis++) {
    const int s = src[axis], t = dst[axis];
    if (of.sizes[axis] == 1) continue;
    if (s != t) {
      changed |= 1u << axis;
      for (int code : {s, t})
        if (is_split(code)) cut |= 1u << code;
    } else if (is_split(s) && cut >> s & 1) {
      return 0;
    }
  }
  return changed;
}

bool is_same(const Problem& of, const State& a, const State& b) {
  return std::equal(a.begin(), a.begin() + of.axes, b.begin());
}

// Does a split become a pending sum in the same step in which another axis changes? Alone, it moves nothing.
bool shares_while_moving(const Problem& of, const State& src, const State& dst) {
  int changes = 0;
  bool shares = false;
  for (int axis = 0; axis < of.axes; axis++) {
    changes += src[axis] != dst[axis];
    shares |= is_split(src[axis]) && dst[axis] == kSum;
  }
  return changes > 1 && shares;
}

// States that differ from both, in the order of `itertools.product` (boxings/plan.py).
template <class Do> void for_states_between(const Problem& of, const State& src, const State& dst, Do&& visit) {
  std::array<std::vector<int8_t>, kAxes> choices;
  for (int axis = 0; axis < of.axes; axis++) {
    auto& own = choices[axis];
    const int8_t x = src[axis], y = dst[axis];
    if (is_partial(x) && x != y)
      for (int d = 0; d < of.dims; d++) own.push_back((int8_t)d);
    for (int8_t code : {x, y})
      if (std::find(own.begin(), own.end(), code) == own.end()) own.push_back(code);
  }
  State state{};
  std::array<size_t, kAxes> at{};
  for (bool more = true; more;) {
    for (int axis = 0; axis < of.axes; axis++) state[axis] = choices[axis][at[axis]];
    if (!is_same(of, state, src) && !is_same(of, state, dst) && !shares_while_moving(of, src, state) &&
        !shares_while_moving(of, state, dst))
      visit(state);
    more = false;
    for (int axis = of.axes; axis-- > 0 && !more;) {
      more = ++at[axis] < choices[axis].size();
      if (!more) at[axis] = 0;
    }
  }
}

double total(Cost first, Cost then, double bytes) {
  return (first.fixed + then.fixed) + (first.rate + then.rate) * bytes + kOfStep;
}

}  // namespace

Cost Search::seconds(const State& src, const State& dst, double crossing, double touched) const {
  const double whole = (double)std::max<int64_t>(of.numel(), 1), local = touched / whole / rates.memory;
  if (!crossing) return {0.0, local};
  const double* link = rates.links + (rates.by_axes ? 2 * separate_axes(of, src, dst) : 0);
  return {link[0], crossing / whole / link[1] + local};
}

Cost Search::step(const State& src, const State& dst) {
  const auto [at, is_new] = steps.try_emplace({src, dst});
  if (is_new) {
    const Traffic moved = traffic(of, src, dst, tables);
    at->second = seconds(src, dst, (double)moved.crossing, (double)moved.touched);
  }
  return at->second;
}

Cost Search::least(const State& src, const State& dst) const {
  const LeastTraffic moved = least_traffic(of, src, dst);
  return seconds(src, dst, moved.crossing, moved.touched);
}

Cost Search::between(const State& src, const State& dst, int magnitude, State& chosen, bool& via) {
  const double bytes = std::ldexp(1.0, magnitude);
  Cost best = step(src, dst);
  via = false;
  double limit = best.fixed + best.rate * bytes;
  struct Between {
    double bound;
    State state;
  };
  std::vector<Between> candidates;                 // in the order of their states
  for_states_between(of, src, dst, [&](const State& state) {
    const double bound = total(least(src, state), least(state, dst), bytes);
    if (bound < limit) candidates.push_back({bound, state});
  });
  std::vector<size_t> order(candidates.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return candidates[a].bound < candidates[b].bound;
  });
  std::vector<std::pair<size_t, Cost>> priced;
  double lowest = limit;
  for (size_t nth : order) {
    const auto& [bound, one] = candidates[nth];
    if (bound > lowest * (1 + 1e-9)) break;
    const Cost first = step(src, one);
    if (total(first, least(one, dst), bytes) > lowest * (1 + 1e-9)) continue;
    const Cost then = step(one, dst);
    priced.push_back({nth, {first.fixed + then.fixed, first.rate + then.rate}});
    lowest = std::min(lowest, total(first, then, bytes));
  }
  std::sort(priced.begin(), priced.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [nth, cost] : priced) {
    const double seconds = cost.fixed + cost.rate * bytes + kOfStep;
    if (seconds >= limit) continue;
    limit = seconds;
    best = cost;
    chosen = candidates[nth].state;
    via = true;
  }
  return best;
}

double Search::bound(const State& src, const State& dst, int64_t nbytes) const {
  const auto at = [&](Cost cost) { return cost.fixed + cost.rate * (double)nbytes; };
  double lowest = at(least(src, dst));
  for_states_between(of, src, dst, [&](const State& state) {
    lowest = std::min(lowest, at(least(src, state)) + at(least(state, dst)));
  });
  return lowest;
}

Cost Search::best(const State& src, const State& dst, int magnitude) {
  int last = kBroadcast;
  bool several = false;
  for (int axis = 0; axis < of.axes; axis++) {
    if (!is_partial(src[axis])) continue;
    several |= last != kBroadcast && last != src[axis];
    last = src[axis];
  }
  if (!several) {
    State state;
    bool via;
    return between(src, dst, magnitude, state, via);
  }
  State first = src;                                 // once the innermost of one op are reduced
  for (int axis = of.axes; axis-- > 0;) {
    if (!is_partial(src[axis])) continue;
    if (src[axis] != last) break;
    first[axis] = kBroadcast;
  }
  if (is_same(of, first, dst)) return step(src, dst);
  const Cost a = best(src, first, magnitude), b = best(first, dst, magnitude);
  return {a.fixed + b.fixed, a.rate + b.rate};
}

}  // namespace gt::pricing
