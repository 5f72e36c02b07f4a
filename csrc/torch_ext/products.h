#pragma once
#include <optional>
#include <string>

#include "tensor.h"

namespace gt {

// "ij,jk->ik" in its parts.
struct EquationSides {
  std::string left, right, out;
};
std::optional<EquationSides> sides_of(const std::string& equation);  // nothing where it is not written so

// einsum(equation, a, b), differentiable; every label of an operand is in the output or in the other operand.
at::Tensor contract(const std::string& equation, const at::Tensor& a, const at::Tensor& b);

// What autocast would do to an operand of a product, which is taken above it.
at::Tensor autocast(const at::Tensor& t);
std::optional<at::Tensor> autocast(const std::optional<at::Tensor>& t);

void bind_products(pybind11::module_& m);

}  // namespace gt
