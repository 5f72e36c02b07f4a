#pragma once
#include "tensor.h"

namespace gt {

// einsum(equation, a, b), differentiable; every label of an operand stands in the output or in the other operand.
at::Tensor contract(const std::string& equation, const at::Tensor& a, const at::Tensor& b);

void bind_products(pybind11::module_& m);

}  // namespace gt
