// Where the program is: a number for the innermost Python instruction, by which ranks notice that they diverged.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace gt {

// The same in every process for the same instruction of the same file. 0, which matches any, where there is none, or
// where it is our own: a rank whose boxings someone watches comes by way of our Python, the others do not.
uint64_t call_site();

void bind_call_site(pybind11::module_& m);

}  // namespace gt
