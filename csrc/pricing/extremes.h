// The busiest ranks of a step where parts are not alike (boxings/traffic.py, `_extremes_within`).
#pragma once
#include "traffic.h"

namespace gt::pricing {

Traffic extremes(const Problem& of, const State& src, const State& dst, Tables& tables);

// The dim to divide into `more` parts, where dims are divided into `parts` (boxings/roles.py).
int tied_dim(const Problem& of, const std::array<int64_t, kDims>& parts, int64_t more);

}  // namespace gt::pricing
