// Hundreds of choices want few layouts of each operand, and give few: each is a part of their prices, and priced once.
//
// A part is priced in three ways, the next only where the price may still be the lowest: by what no plan does better,
// by bounds of the steps of all paths, and by a search.
#include "choices.h"

#include <algorithm>
#include <limits>

namespace gt::pricing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kEqual = 1e-15, kNudge = 1e-9;      // _EQUAL and _NUDGE of dispatch/choose.py

using Choice = std::array<int, kAxes>;               // a candidate per axis

int bit_length(int64_t n) {
  int length = 0;
  for (; n; n >>= 1) length++;
  return length;
}

// One boxing of choices: that of an operand, or what reducing an output will cost.
struct Part {
  enum Known { kLeast, kBound, kExact };

  Search* search;
  int64_t nbytes;
  State src, dst;
  Known known;
  double seconds;
  unsigned moves = 0, carries = 0;                   // of an operand: see _OfOperand
  double nudge = 0.0;

  Part(Search* search, int64_t nbytes, const Rates& rates, const State& src, const State& dst)
      : search(search), nbytes(nbytes), src(src), dst(dst), known(kLeast), seconds(0.0) {
    if (src == dst) {
      known = kExact;
      return;
    }
    const double received = least_received(search->of, src, dst);
    if (received > 0)
      seconds = rates.links[0] + received / whole() / rates.links[1] * (double)nbytes;
  }

  double whole() const { return (double)std::max<int64_t>(search->of.numel(), 1); }

  void price(Known as) {
    if (known >= as) return;
    known = as;
    if (as == kBound) {
      seconds = std::max(seconds, search->bound(src, dst, nbytes));
    } else {
      const Cost best = search->best(src, dst, bit_length(nbytes));
      seconds = best.fixed + best.rate * (double)nbytes;
    }
  }
};

class Prices {
 public:
  explicit Prices(const Question& question)
      : question(question), operands(question.operands.size()), debts(question.outputs.size()) {
    for (const auto* tensors : {&question.operands, &question.outputs}) {
      for (const Moved& moved : *tensors) {
        const auto same = std::find_if(all.begin(), all.end(), [&](const auto& one) {
          return one->of.dims == moved.of.dims && one->of.shape == moved.of.shape;
        });
        if (same != all.end()) {
          searches.push_back(same->get());
        } else {
          all.push_back(std::make_unique<Search>(moved.of, question.rates));
          searches.push_back(all.back().get());
        }
      }
    }
  }

  // By what is known of the parts, each priced at least like this.
  double price(const Choice& choice, Part::Known as, double limit) {
    double work = 0.0, rest = 0.0;
    gather(choice, work, rest);
    for (Part* part : parts) {
      if (part->known >= as) continue;
      part->price(as);
      double total = work + rest;
      for (const Part* one : parts) total += one->seconds;
      if (total > limit) return total;
    }
    // in the order of _price, to the bit
    double total = work;
    for (size_t q = 0; q < operands.size(); q++) total += parts[q]->seconds;
    double debt = 0.0;
    for (size_t i = operands.size(); i < parts.size(); i++) debt += parts[i]->seconds;
    return total + rest + debt;
  }

 private:
  const Candidate& candidate(const Choice& choice, int axis) const { return question.candidates[axis][choice[axis]]; }

  State states(const Choice& choice, size_t which) const {
    State all{};
    for (int axis = 0; axis < question.axes; axis++) all[axis] = candidate(choice, axis).codes[which];
    return all;
  }

  // The parts of a choice, operands first; the seconds of its work, and those that settle ties.
  void gather(const Choice& choice, double& work, double& nudge) {
    unsigned cut = 0, own = 0;
    for (int axis = 0; axis < question.axes; axis++) cut |= (unsigned)candidate(choice, axis).cuts << axis;
    work = question.work[cut];
    parts.clear();
    for (size_t q = 0; q < operands.size(); q++) {
      Part& part = of_operand(q, states(choice, q));
      own |= part.moves | part.carries;
      nudge += part.nudge;
      parts.push_back(&part);
    }
    for (size_t k = 0; k < debts.size(); k++)
      if (Part* part = of_output(k, states(choice, operands.size() + k), own)) parts.push_back(part);
  }

  uint64_t key_of(const State& state, unsigned more) const {
    uint64_t key = more;
    for (int axis = 0; axis < question.axes; axis++) key = key << 6 | (uint64_t)(state[axis] + 8);
    return key;
  }

  Part& of_operand(size_t q, const State& want) {
    const Moved& moved = question.operands[q];
    const auto [at, is_new] = operands[q].try_emplace(
        key_of(want, 0), searches[q], moved.nbytes, question.rates, moved.own, want);
    Part& part = at->second;
    for (int axis = 0; is_new && axis < question.axes; axis++) {
      const int s = moved.own[axis], t = want[axis];
      part.moves |= (unsigned)(s != t && s != kBroadcast) << axis;
      part.carries |= (unsigned)(is_partial(s) && is_partial(t)) << axis;
      part.nudge += kNudge * ((double)(is_partial(t) && !is_partial(s)) + 0.01 * (double)(s != t));
    }
    return part;
  }

  // What reducing a pending output will cost, on the axes where that is the choice's `own` doing; null where nothing.
  Part* of_output(size_t k, State before, unsigned own) {
    const Moved& moved = question.outputs[k];
    bool pending = false;
    State after = before;
    for (int axis = 0; axis < question.axes; axis++) {
      if (!is_partial(before[axis])) continue;
      after[axis] = kBroadcast;
      if (own >> axis & 1) pending = true;
      else before[axis] = kBroadcast;
    }
    if (!moved.nbytes || !pending) return nullptr;
    return &debts[k].try_emplace(key_of(before, 0), searches[operands.size() + k], moved.nbytes, question.rates, before,
                                 after).first->second;
  }

  const Question& question;
  std::vector<std::unique_ptr<Search>> all;
  std::vector<Search*> searches;                     // per operand, then per output
  std::vector<std::unordered_map<uint64_t, Part>> operands, debts;
  std::vector<Part*> parts;                          // of the choice that is looked at
};

}  // namespace

int64_t cheapest(const Question& question) {
  int64_t count = 1;
  for (int axis = 0; axis < question.axes; axis++) count *= (int64_t)question.candidates[axis].size();
  const auto choice_of = [&](int64_t number) {
    Choice choice{};
    for (int axis = question.axes; axis-- > 0;) {
      const int64_t n = (int64_t)question.candidates[axis].size();
      choice[axis] = (int)(number % n);
      number /= n;
    }
    return choice;
  };
  Prices prices(question);
  std::vector<std::pair<double, int64_t>> bounds;
  for (int64_t number = 0; number < count; number++)
    if (!question.fits || question.fits[number])
      bounds.push_back({prices.price(choice_of(number), Part::kLeast, kInfinity), number});
  std::sort(bounds.begin(), bounds.end());
  std::vector<std::pair<int64_t, double>> priced;
  double lowest = kInfinity;
  for (const auto& [least, number] : bounds) {
    const double limit = lowest * (1 + 1e-9) + kEqual;
    if (least > limit) break;
    const Choice choice = choice_of(number);
    if (prices.price(choice, Part::kBound, limit) > limit) continue;
    const double seconds = prices.price(choice, Part::kExact, limit);
    priced.push_back({number, seconds});
    lowest = std::min(lowest, seconds);
  }
  int64_t best = -1;
  for (const auto& [number, seconds] : priced)
    if (seconds <= lowest + kEqual && (best < 0 || number < best)) best = number;
  return best;
}

}  // namespace gt::pricing
