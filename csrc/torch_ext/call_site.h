// Where the program is: a number for a Python instruction, by which ranks notice that they diverged.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace gt {

enum class CallSite {
  innermost,  // of all instructions. 0, which matches any, where that is our own: a rank whose boxings someone watches
              // comes by way of our Python, the others do not
  outside,    // of those that are not ours: what asked for a boxing by name is always there, and each asks for its own
};

// The same in every process for the same instruction of the same file. 0 where there is none.
uint64_t call_site(CallSite);

void bind_call_site(pybind11::module_& m);

}  // namespace gt
