// Products of tensors of more than two dims, without flattening any of them: the twin of tensors/products.py.
//
// They are taken at the key that only global tensors have, before torch decomposes them. Each is one op of ours, whose
// rule is its equation, so that any label can stay split. A product of two matrices goes torch's own way, but for
// linear. contract.cpp has what these ops do on plain tensors.
#include "products.h"

#include <ATen/LegacyVmapMode.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>

#include "boxed_view.h"
#include "op_errors.h"

namespace py = pybind11;

namespace gt {

at::Tensor autocast(const at::Tensor& t) {
  const auto device = t.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return t;
  if (!t.is_floating_point() || t.scalar_type() == c10::kDouble) return t;
  return t.to(at::autocast::get_autocast_dtype(device));
}

std::optional<at::Tensor> autocast(const std::optional<at::Tensor>& t) {
  return t && t->defined() ? std::optional(autocast(*t)) : t;
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

PyObject* lookup = nullptr;                          // the embedding of a split vocabulary: (weight, indices, padding)
PyObject* pick = nullptr;                            // x[i, j] along a cut dim: (x, *indices)

Tensor contract_op(const std::string& equation, const Tensor& a, const Tensor& b) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("globaltensor::contract", "")
                       .typed<Tensor(std::string_view, const Tensor&, const Tensor&)>();
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(equation, a, b);
}

Tensor linear_op(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("globaltensor::linear", "")
                       .typed<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&)>();
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(x, weight, bias);
}

// Products that only the gradient of a leaf waits for, deferred while somebody asks for that.
struct DeferredProducts {
  std::vector<Tensor> inputs;                        // leaves whose gradients are not deferred
  std::vector<std::tuple<Tensor, std::string, Tensor, Tensor>> products;  // leaf, equation, a, b
};
std::mutex deferred_lock;
std::optional<DeferredProducts> deferred;

// Defers the gradient of this operand of the product whose backward runs, contract(equation, a, b), where it may be.
bool defer(size_t operand, const std::string& equation, const Tensor& a, const Tensor& b) {
  std::lock_guard<std::mutex> guard(deferred_lock);  // backward passes on devices run on threads of their own
  if (!deferred) return false;
  const auto& next = torch::autograd::get_current_node()->next_edge(operand).function;
  auto* end = dynamic_cast<torch::autograd::AccumulateGrad*>(next.get());
  if (!end) return false;                            // no leaf
  for (const Tensor& t : deferred->inputs)
    if (t.is_same(end->variable)) return false;
  deferred->products.emplace_back(end->variable, equation, a, b);
  return true;
}

Tensor conjugate(const Tensor& t) { return t.is_complex() ? t.conj() : t; }

// Does it stand for a batch of gradients (`is_grads_batched`)? What autograd notes of it is lost behind it.
bool in_batch(const Tensor& t) { return t.defined() && t.key_set().has(c10::DispatchKey::Batched); }

// Is more asked of these operands than a backward pass? Then torch's own ops do it, which have formulas for all.
template <class... Tensors>
bool beyond_backward(const Tensors&... operands) {
  return is_transformed() || ((has_tangent(operands) || in_batch(operands)) || ...);
}

bool needs_grad(const Tensor& t) { return t.defined() && t.requires_grad(); }

// Of two factors those that the gradients need: the other may be written to before they are made.
void save_factors(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
  ctx->save_for_backward({needs_grad(b) ? a : Tensor(), needs_grad(a) ? b : Tensor()});
}

struct Contract : torch::autograd::Function<Contract> {
  static Tensor forward(AutogradContext* ctx, const std::string& equation, const Tensor& a, const Tensor& b) {
    ctx->saved_data["equation"] = equation;
    save_factors(ctx, a, b);
    return contract_op(equation, a, b);
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list grads) {
    const EquationSides sides = *sides_of(ctx->saved_data["equation"].toStringRef());
    const auto& [left, right, out] = sides;
    auto saved = ctx->get_saved_variables();
    auto gradient = [&](size_t of, const std::string& equation) {
      const Tensor other = conjugate(saved[1 - of]);
      return defer(of, equation, grads[0], other) ? Tensor() : contract(equation, grads[0], other);
    };
    Tensor a, b;
    if (ctx->needs_input_grad(0)) a = gradient(0, out + "," + right + "->" + left);
    if (ctx->needs_input_grad(1)) b = gradient(1, out + "," + left + "->" + right);
    return {Tensor(), a, b};
  }
};

std::string leading(int64_t dims) { return std::string("ABCDEFGHIJKLMNOPQRSTUVWXYZ").substr(0, dims); }

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
    save_factors(ctx, x, weight);
    ctx->saved_data["biased"] = bias && bias->defined();
    return linear_op(x, weight, bias);
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list grads) {
    auto saved = ctx->get_saved_variables();
    const Tensor &grad = grads[0], &x = saved[0], &weight = saved[1];
    const std::string lead = leading(grad.dim() - 1);
    Tensor dx, dweight, dbias;
    if (ctx->needs_input_grad(0)) dx = contract(lead + "n,nk->" + lead + "k", grad, conjugate(weight));
    if (ctx->needs_input_grad(1)) {
      const std::string equation = lead + "n," + lead + "k->nk";
      if (!defer(1, equation, grad, conjugate(x))) dweight = contract(equation, grad, conjugate(x));
    }
    if (ctx->saved_data["biased"].toBool() && ctx->needs_input_grad(2)) {
      std::vector<int64_t> dims(grad.dim() - 1);
      for (size_t i = 0; i < dims.size(); i++) dims[i] = i;
      dbias = grad.sum(dims);
    }
    return {dx, dweight, dbias};
  }
};

[[noreturn]] void misfit(const std::string& op, const char* left, const Tensor& a, const char* right,
                         const Tensor& b) {
  try {
    TORCH_CHECK(false, op, ": ", left, " of shape ", a.sizes(), " and ", right, " of shape ", b.sizes(),
                " cannot be multiplied");
  } catch (...) {
    raise_with_operands(op, [&](const NoteOperand& note) { note(left, a), note(right, b); });
  }
}

Tensor linear_in_graph(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const bool any_grad = needs_grad(x) || needs_grad(weight) || (bias && needs_grad(*bias));
  return at::GradMode::is_enabled() && any_grad ? Linear::apply(x, weight, bias) : linear_op(x, weight, bias);
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const bool biased = bias && bias->defined();
  if (x.is_nested() || x.dim() < 2 || weight.dim() != 2 || (biased && bias->dim() != 1) ||
      beyond_backward(x, weight, biased ? *bias : Tensor())) {
    c10::impl::ExcludeDispatchKeyGuard torch_does(kGlobal);
    return at::linear(x, weight, bias);
  }
  if (x.size(-1) != weight.size(1)) misfit("linear", "input", x, "weight", weight);
  if (x.dim() == 2 && weight.size(0) <= weight.size(1) && is_global(x.unsafeGetTensorImpl())) {
    // Rows that torch melted, as its attention does, and will part again: nothing need move for that.
    if (const auto sizes = sizes_of_rows(x); !sizes.empty())
      return gt::linear(x.view(sizes), weight, bias).view({x.size(0), weight.size(0)});
  }
  return linear_in_graph(autocast(x), autocast(weight), autocast(bias));
}

// x without the leading dims of size 1 that are broadcast, and the labels of those that stay.
std::pair<Tensor, std::string> without_ones(const Tensor& x, c10::IntArrayRef batch) {
  const int64_t many = batch.size(), first = many - (x.dim() - 2);
  std::vector<int64_t> ones;
  std::string labels;
  for (int64_t i = 0; i < x.dim() - 2; i++) {
    if (x.size(i) == 1 && batch[first + i] != 1)
      ones.push_back(i);
    else
      labels += leading(many)[first + i];
  }
  return {ones.empty() ? x : x.squeeze(ones), labels};
}

// Operands of several dtypes, and bools, are torch's: it multiplies them where there is nothing to add up, and else
// complains. So are nested tensors, which have no sizes to ask for.
bool is_odd(const Tensor& a, const Tensor& b) {
  return a.is_nested() || b.is_nested() || a.scalar_type() != b.scalar_type() || a.scalar_type() == c10::kBool;
}

Tensor matmul(const Tensor& x, const Tensor& y) {
  const Tensor a = autocast(x), b = autocast(y);
  if (a.dim() < 2 || b.dim() < 2 || (a.dim() == 2 && b.dim() == 2) || is_odd(a, b) || beyond_backward(a, b)) {
    c10::impl::ExcludeDispatchKeyGuard torch_does(kGlobal);
    return at::matmul(x, y);
  }
  if (a.size(-1) != b.size(-2)) misfit("matmul", "input", a, "other", b);
  auto batch = at::infer_size(a.sizes().slice(0, a.dim() - 2), b.sizes().slice(0, b.dim() - 2));
  auto [left, of_left] = without_ones(a, batch);
  auto [right, of_right] = without_ones(b, batch);
  return contract(of_left + "mk," + of_right + "kn->" + leading(batch.size()) + "mn", left, right);
}

bool has_memory(const Tensor& t) {
  return is_global(t.unsafeGetTensorImpl()) || !t.numel() || (t.has_storage() && t.storage().data());
}

// Labels are letters, none twice in a tensor, each kept or shared, one summed, and no size is broadcast.
bool is_plain(const std::string& equation, const Tensor& a, const Tensor& b) {
  const auto sides = sides_of(equation);
  if (!sides || a.is_nested() || b.is_nested()) return false;
  const auto& [left, right, out] = *sides;
  for (const auto& side : {left, right, out})
    for (size_t i = 0; i < side.size(); i++)
      if (!isalpha(static_cast<unsigned char>(side[i])) || side.find(side[i], i + 1) != std::string::npos) return false;
  if (int64_t(left.size()) != a.dim() || int64_t(right.size()) != b.dim()) return false;
  for (size_t i = 0; i < left.size(); i++) {
    const size_t other = right.find(left[i]);
    if (other == std::string::npos ? out.find(left[i]) == std::string::npos : a.size(i) != b.size(other)) return false;
  }
  for (char label : right)
    if (left.find(label) == std::string::npos && out.find(label) == std::string::npos) return false;
  for (char label : out)
    if (left.find(label) == std::string::npos && right.find(label) == std::string::npos) return false;
  for (char label : left)
    if (out.find(label) == std::string::npos) return true;
  // A product of elements is torch's, but ours says what is wrong with an operand without memory.
  return !has_memory(a) || !has_memory(b);
}

// The labels of a product as torch has them in memory: those of both operands first, then those of one each.
std::string memory_order(const EquationSides& sides) {
  std::string shared, left, right;
  for (char label : sides.out) {
    const bool in_left = sides.left.find(label) != std::string::npos;
    const bool in_right = sides.right.find(label) != std::string::npos;
    (in_left && in_right ? shared : in_left ? left : right) += label;
  }
  const bool swapped = !left.empty() && !right.empty() && sides.out.find(right.back()) < sides.out.find(left.front());
  return shared + (swapped ? right + left : left + right);
}

Tensor contract_in_order(const std::string& equation, const Tensor& a, const Tensor& b) {
  const EquationSides sides = *sides_of(equation);
  const std::string order = memory_order(sides);
  if (order == sides.out) return contract(equation, a, b);
  std::vector<int64_t> dims;
  for (char label : sides.out) dims.push_back(order.find(label));
  return contract(sides.left + "," + sides.right + "->" + order, a, b).permute(dims);
}

Tensor einsum(std::string_view text, at::TensorList operands, at::OptionalIntArrayRef path) {
  std::string equation(text);
  equation.erase(std::remove(equation.begin(), equation.end(), ' '), equation.end());
  if (operands.size() == 2 && is_plain(equation, operands[0], operands[1])) {
    const Tensor a = autocast(operands[0]), b = autocast(operands[1]);
    if (!is_odd(a, b)) return contract_in_order(equation, a, b);
  }
  c10::impl::ExcludeDispatchKeyGuard torch_does(kGlobal);
  return at::einsum(text, operands, path);
}

Tensor embedding(const Tensor& weight, const Tensor& indices, c10::SymInt padding, bool by_frequency, bool sparse) {
  const bool of_global = is_global(weight.unsafeGetTensorImpl());    // whose gradient is never sparse
  const bool is_split = of_global && weight.dim() == 2 && global(weight)->spec->parts[0] > 1;
  if (is_split && !by_frequency && !beyond_backward(weight, indices)) {
    py::gil_scoped_acquire lock;
    c10::impl::ExcludeDispatchKeyGuard once(kGlobal);  // the hook calls embedding itself
    return py::handle(lookup)(weight, indices, padding.expect_int()).cast<Tensor>();
  }
  c10::impl::ExcludeDispatchKeyGuard torch_does(kGlobal);
  return at::embedding_symint(weight, indices, padding, by_frequency, sparse && !of_global);
}

// Are these several numbers of elements, of dims of which one is cut? Then the gradient lies as x does.
bool picks_along_cut(const Tensor& x, const c10::List<std::optional<Tensor>>& indices) {
  if (indices.size() < 2 || !is_global(x.unsafeGetTensorImpl()) || int64_t(indices.size()) > x.dim()) return false;
  if (!at::GradMode::is_enabled() || !needs_grad(x) || beyond_backward(x)) return false;
  bool cut = false;
  for (size_t d = 0; d < indices.size(); d++) {
    const std::optional<Tensor> index = indices.get(d);
    if (!index || !index->defined()) return false;
    if (index->scalar_type() != c10::kLong && index->scalar_type() != c10::kInt) return false;
    cut = cut || global(x)->spec->parts[d] > 1;
  }
  return cut;
}

Tensor index(const Tensor& x, const c10::List<std::optional<Tensor>>& indices) {
  if (C10_UNLIKELY(picks_along_cut(x, indices))) {
    py::gil_scoped_acquire lock;
    py::list numbers;
    for (size_t d = 0; d < indices.size(); d++) numbers.append(*indices.get(d));
    return py::handle(pick)(x, *numbers).cast<Tensor>();
  }
  c10::impl::ExcludeDispatchKeyGuard torch_does(kGlobal);
  return x.index(indices);
}

// The products of a batch, as one.
Tensor contract_batch(const std::string& equation, const Tensor& a, const Tensor& b) {
  const int64_t level = at::impl::VmapMode::current_vmap_level();
  char label = 'a';
  while (equation.find(label) != std::string::npos) label = label == 'z' ? 'A' : label + 1;
  auto [left, right, out] = *sides_of(equation);
  auto whole = [&](const Tensor& t, std::string& side) {
    if (!in_batch(t)) return t;
    side = label + side;
    return at::_remove_batch_dim(t, level, 1, 0);
  };
  const Tensor all_a = whole(a, left), all_b = whole(b, right);
  return at::_add_batch_dim(contract(left + "," + right + "->" + label + out, all_a, all_b), 0, level);
}

}  // namespace

std::optional<EquationSides> sides_of(const std::string& equation) {
  const size_t comma = equation.find(','), arrow = equation.find("->");
  if (comma == std::string::npos || arrow == std::string::npos || comma > arrow) return std::nullopt;
  return EquationSides{equation.substr(0, comma), equation.substr(comma + 1, arrow - comma - 1),
                       equation.substr(arrow + 2)};
}

Tensor contract(const std::string& equation, const Tensor& a, const Tensor& b) {
  if (in_batch(a) || in_batch(b)) return contract_batch(equation, a, b);
  if (beyond_backward(a, b)) {
    c10::impl::ExcludeDispatchKeyGuard torch_does(kGlobal);
    return at::einsum(equation, {a, b});
  }
  if (at::GradMode::is_enabled() && (needs_grad(a) || needs_grad(b))) return Contract::apply(equation, a, b);
  return contract_op(equation, a, b);
}

void bind_products(py::module_& m) {
  m.def("defer_weight_grads", [](std::vector<Tensor> inputs) {
    std::lock_guard<std::mutex> guard(deferred_lock);
    deferred = DeferredProducts{std::move(inputs), {}};
  }, "From here on backward passes defer products that only a leaf waits for; not for these inputs.");
  m.def("pop_deferred_weight_grads", [] {
    std::lock_guard<std::mutex> guard(deferred_lock);
    DeferredProducts all = std::move(deferred).value_or(DeferredProducts{});
    deferred.reset();
    return all.products;
  }, "What was deferred, as (leaf, equation, a, b); from here on nothing is.");
  m.def("on_lookup", [](py::object hook) { lookup = hook.release().ptr(); },
        "What an embedding of a split vocabulary calls.");
  m.def("on_pick", [](py::object hook) { pick = hook.release().ptr(); }, "What x[i, j] along a cut dim calls.");
}

}  // namespace gt

// Called by name, as a graph that torch traced calls them.
TORCH_LIBRARY_IMPL(globaltensor, Autograd, m) {
  m.impl("contract", [](std::string_view equation, const at::Tensor& a, const at::Tensor& b) {
    return gt::contract(std::string(equation), a, b);
  });
  m.impl("linear", &gt::linear_in_graph);
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  m.impl("linear", &gt::linear);
  m.impl("matmul", &gt::matmul);
  m.impl("einsum", &gt::einsum);
  m.impl("embedding", &gt::embedding);
  m.impl("index.Tensor", &gt::index);
}
