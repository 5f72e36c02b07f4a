// Attention of global tensors on accelerators, where a fused kernel would not do: the twin of tensors/attention.py.
//
// It is taken at the key that only global tensors have, before torch chooses a kernel; all else goes torch's own way.
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>

#include "products.h"

namespace gt {
namespace {

using at::Tensor;

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const std::optional<Tensor>& mask, double dropout, bool causal,
                                    std::optional<double> scale, bool shared_heads) {
  const bool masked = mask && mask->defined();
  const Tensor q = autocast(query), k = autocast(key), v = autocast(value);
  std::optional<Tensor> bias = masked ? autocast(mask) : std::nullopt;
  c10::impl::ExcludeDispatchKeyGuard cast(c10::autocast_dispatch_keyset);    // as autocast calls it
  if (query.is_cpu() || query.is_meta() || (dropout == 0 && !(masked && mask->requires_grad())))
    return at::native::scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale, shared_heads);
  if (masked && bias->scalar_type() == c10::kBool)
    bias = bias->to(q.scalar_type()).log();          // 0 where it is seen, -inf elsewhere
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, std::nullopt, scale,
                                                            shared_heads));
}

}  // namespace
}  // namespace gt

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  m.impl("scaled_dot_product_attention", &gt::scaled_dot_product_attention);
}
