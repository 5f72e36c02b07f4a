// What the extension module asks of this folder: the faces that torch.distributed sees.
#pragma once
#include <torch/extension.h>

namespace gt {

void bind_backend(pybind11::module_& module);           // the backend "globaltensor"
void bind_symmetric_memory(pybind11::module_& module);  // torch's symmetric memory, on CPUs
void bind_liveness(pybind11::module_& module);          // hearts, and an end to waits

}  // namespace gt
