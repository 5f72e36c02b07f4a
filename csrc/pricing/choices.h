// The cheapest signature of each axis, of all that fit (dispatch/choose.py).
#pragma once
#include "search.h"

namespace gt::pricing {

// A tensor that a choice moves: an operand before the op, or what the op leaves pending.
struct Moved {
  Problem of;                                        // of its nominal shape
  int64_t nbytes;
  State own;                                         // an operand's; nothing else reads it
};

// One legal way to run the op on an axis: codes of the operands, then of the outputs.
struct Candidate {
  bool cuts;
  std::vector<int8_t> codes;
};

struct Question {
  int axes;
  std::vector<Moved> operands, outputs;
  std::array<std::vector<Candidate>, kAxes> candidates;
  std::vector<double> work;                          // seconds, by the axes on which a label is cut, a bit each
  const uint8_t* fits;                               // by choice; null where all do
  Rates rates;
};

// The number of the best choice, the first of equals: the last axis counts fastest. -1 where none fits.
int64_t cheapest(const Question& question);

}  // namespace gt::pricing
