// The ops of ours on plain tensors that are products: globaltensor::contract by one product of matrices, linear, and
// products_for_peers.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "allocator.h"
#include "products.h"

namespace gt {
namespace {

// How a product of two tensors is one of matrices: which dims of either are merged into one, in the order of groups.
struct MatmulPlan {
  using Groups = std::vector<std::vector<int64_t>>;
  Groups left, right;                                // batch (where there is one), rows, inner; batch, inner, columns
  bool batched, swapped;                             // swapped: b x a, since that is the order of the result
  std::vector<std::pair<bool, int64_t>> dims;        // of the result, in its order: is it of the right one? which?
  std::vector<int64_t> order;                        // to what is wanted; empty where that is it
};

MatmulPlan plan_matmul(const std::string& left, const std::string& right, const std::string& out) {
  std::string batch, rows, columns, inner;           // labels of all three; left, out; right, out; left, right
  for (char c : left) {
    const bool shared = right.find(c) != std::string::npos, kept = out.find(c) != std::string::npos;
    (shared ? kept ? batch : inner : rows) += c;
  }
  for (char c : right)
    if (left.find(c) == std::string::npos) columns += c;
  if (!rows.empty() && out == batch + columns + rows) {
    MatmulPlan other = plan_matmul(right, left, out);
    other.swapped = true;
    return other;
  }
  auto dims_of = [](const std::string& dims, const std::vector<std::string>& groups) {
    MatmulPlan::Groups by_group;
    for (const auto& group : groups) {
      by_group.emplace_back();
      for (char c : group) by_group.back().push_back(dims.find(c));
    }
    return by_group;
  };
  MatmulPlan plan{{}, {}, !batch.empty(), false, {}, {}};
  using Names = std::vector<std::string>;
  plan.left = dims_of(left, batch.empty() ? Names{rows, inner} : Names{batch, rows, inner});
  plan.right = dims_of(right, batch.empty() ? Names{inner, columns} : Names{batch, inner, columns});
  const std::string has = batch + rows + columns;
  for (char c : has) {
    const size_t at = left.find(c);
    plan.dims.emplace_back(at == std::string::npos, at == std::string::npos ? right.find(c) : at);
  }
  if (has != out)
    for (char c : out) plan.order.push_back(has.find(c));
  return plan;
}

const MatmulPlan& matmul_plan(std::string_view text) {
  static thread_local std::unordered_map<std::string, MatmulPlan> known;
  std::string equation(text);
  auto at = known.find(equation);
  if (at != known.end()) return at->second;
  const auto [left, right, out] = *sides_of(equation);
  MatmulPlan plan = plan_matmul(left, right, out);
  return known.emplace(std::move(equation), std::move(plan)).first->second;
}

// t with the dims of each group merged into one: a view where its strides allow it.
at::Tensor merge_dims(const at::Tensor& t, const MatmulPlan::Groups& groups) {
  c10::SmallVector<int64_t, 3> sizes, strides;
  bool views = true;
  for (const auto& group : groups) {
    int64_t size = 1, stride = 1;
    bool first = true;
    for (auto dim = group.rbegin(); dim != group.rend(); ++dim) {    // from the innermost out
      if (t.size(*dim) == 1) continue;
      if (first) stride = t.stride(*dim);
      views = views && t.stride(*dim) == stride * size;
      first = false;
      size *= t.size(*dim);
    }
    sizes.push_back(size);
    strides.push_back(stride);
  }
  if (views) return t.sizes().equals(sizes) && t.strides().equals(strides) ? t : t.as_strided(sizes, strides);
  std::vector<int64_t> order;
  for (const auto& group : groups) order.insert(order.end(), group.begin(), group.end());
  return t.permute(order).reshape(sizes);
}

at::Tensor contract_plain(std::string_view equation, const at::Tensor& left, const at::Tensor& right) {
  const MatmulPlan& plan = matmul_plan(equation);
  const at::Tensor &a = plan.swapped ? right : left, &b = plan.swapped ? left : right;
  const at::Tensor rows = merge_dims(a, plan.left), columns = merge_dims(b, plan.right);
  at::Tensor product = plan.batched ? at::bmm(rows, columns) : at::mm(rows, columns);
  c10::SmallVector<int64_t, 6> sizes;
  for (const auto& [in_right, dim] : plan.dims) sizes.push_back((in_right ? b : a).size(dim));
  if (!product.sizes().equals(sizes)) product = product.view(sizes);
  return plan.order.empty() ? product : product.permute(plan.order).contiguous();
}

at::Tensor linear_plain(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return at::linear(x, weight, bias);
}

at::Tensor products_for_peers(at::TensorList left, at::TensorList right, const std::optional<at::Tensor>& added) {
  ArenaScope for_peers(true);
  at::Tensor sum = added ? added->addmm(left[0], right[0]) : at::matmul(left[0], right[0]);
  for (size_t i = 1; i < left.size(); i++)
    sum.dim() == 3 ? sum.baddbmm_(left[i], right[i]) : sum.addmm_(left[i], right[i]);
  return sum;
}

}  // namespace
}  // namespace gt

TORCH_LIBRARY_IMPL(globaltensor, CompositeExplicitAutograd, m) {
  m.impl("contract", &gt::contract_plain);
  m.impl("linear", &gt::linear_plain);
  m.impl("products_for_peers", &gt::products_for_peers);
}
