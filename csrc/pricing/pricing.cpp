// The C functions that Python calls (boxings/native_prices.py, dispatch/native_choice.py): numbers in a row.
#include "choices.h"

namespace gt::pricing {
namespace {

// Reads what Python wrote, in its order.
struct Reader {
  const int64_t* at;

  int64_t next() { return *at++; }

  State state(int axes) {
    State all{};
    for (int axis = 0; axis < axes; axis++) all[axis] = (int8_t)next();
    return all;
  }

  void shape(Problem& of) {
    of.dims = (int)next();
    for (int d = 0; d < of.dims; d++) of.shape[d] = next();
  }

  Problem axes() {
    Problem of{};
    of.axes = (int)next();
    for (int axis = 0; axis < of.axes; axis++) of.sizes[axis] = next();
    return of;
  }
};

Rates rates_from(const double* rates, bool by_axes) { return {rates + 1, by_axes, rates[0]}; }

}  // namespace
}  // namespace gt::pricing

using namespace gt::pricing;

#define GT_C extern "C" __attribute__((visibility("default")))

// numbers: axes with their sizes, dims with theirs, the codes of src and of dst. Writes elements crossing and touched.
GT_C void gt_step_traffic(const int64_t* numbers, int64_t* moved) {
  Reader read{numbers};
  Problem of = read.axes();
  read.shape(of);
  const State src = read.state(of.axes), dst = read.state(of.axes);
  Tables tables;
  const Traffic all = traffic(of, src, dst, tables);
  moved[0] = all.crossing;
  moved[1] = all.touched;
}

// numbers: the same, the magnitude, and are there links by axes? rates: memory, and links. Writes seconds that are
// fixed and those per byte, and the state between; returns whether there is one.
GT_C int gt_search_between(const int64_t* numbers, const double* rates, double* seconds, int64_t* between) {
  Reader read{numbers};
  Problem of = read.axes();
  read.shape(of);
  const State src = read.state(of.axes), dst = read.state(of.axes);
  const int magnitude = (int)read.next();
  const Rates own = rates_from(rates, read.next());
  State state{};
  bool via;
  const Cost best = Search(of, own).between(src, dst, magnitude, state, via);
  seconds[0] = best.fixed;
  seconds[1] = best.rate;
  for (int axis = 0; axis < of.axes; axis++) between[axis] = state[axis];
  return via;
}

// numbers: axes; how many operands and outputs, and of each its dims, bytes and codes; per axis the candidates, and of
// each whether it cuts and its codes. rates: memory, a link, and the work by the axes that are cut. Returns the choice.
GT_C int64_t gt_cheapest(const int64_t* numbers, const double* rates, const uint8_t* fits) {
  Reader read{numbers};
  const Problem of = read.axes();
  Question question{};
  question.axes = of.axes;
  const int64_t operands = read.next(), outputs = read.next();
  for (int64_t i = 0; i < operands + outputs; i++) {
    Moved moved{of, 0, {}};
    read.shape(moved.of);
    moved.nbytes = read.next();
    moved.own = read.state(of.axes);
    (i < operands ? question.operands : question.outputs).push_back(moved);
  }
  for (int axis = 0; axis < of.axes; axis++) {
    for (int64_t left = read.next(); left > 0; left--) {
      Candidate candidate{read.next() != 0, {}};
      for (int64_t i = 0; i < operands + outputs; i++) candidate.codes.push_back((int8_t)read.next());
      question.candidates[axis].push_back(std::move(candidate));
    }
  }
  question.work.assign(rates + 3, rates + 3 + (1 << of.axes));
  question.fits = fits;
  question.rates = rates_from(rates, false);
  return cheapest(question);
}
