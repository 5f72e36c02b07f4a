// The ops of batch normalization on plain tensors: globaltensor::squares_around and globaltensor::norm_gradient.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

namespace gt {
namespace {

// A value per channel, shaped to broadcast over x [n, c, ...].
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& x) {
  c10::SmallVector<int64_t, 6> sizes(x.dim(), 1);
  sizes[1] = x.size(1);
  return values.view(sizes);
}

at::Tensor squares_around_plain(const at::Tensor& x, const at::Tensor& centre) {
  c10::SmallVector<int64_t, 6> dims;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (d != 1) dims.push_back(d);
  return at::sub(x, per_channel(centre, x)).square_().sum(dims);
}

// Of a channel, or, where channels lie innermost, of all of a row.
template <typename T>
void norm_gradient_of(const T* grad, const T* x, T* out, int64_t n, T mean, T shift, T slope, T scale) {
  for (int64_t k = 0; k < n; ++k) out[k] = (grad[k] - shift - (x[k] - mean) * slope) * scale;
}

template <typename T>
void norm_gradient_of_row(const T* grad, const T* x, T* out, int64_t n, const T* mean, const T* shift, const T* slope,
                          const T* scale) {
  for (int64_t k = 0; k < n; ++k) out[k] = (grad[k] - shift[k] - (x[k] - mean[k]) * slope[k]) * scale[k];
}

constexpr int64_t kGrain = 1 << 15;                  // elements that are worth a thread

// One pass over tensors that lie alike, without gaps: `inner` elements of a channel in a row, or 1.
template <typename T>
void norm_gradient_into(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& out, int64_t inner,
                        const at::Tensor& mean, const at::Tensor& shift, const at::Tensor& slope,
                        const at::Tensor& scale) {
  const int64_t channels = x.size(1), length = inner > 1 ? inner : channels;
  const T *g = grad.const_data_ptr<T>(), *in = x.const_data_ptr<T>();
  const T *m = mean.const_data_ptr<T>(), *s = shift.const_data_ptr<T>();
  const T *sl = slope.const_data_ptr<T>(), *sc = scale.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  at::parallel_for(0, x.numel() / length, std::max<int64_t>(kGrain / length, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * length, c = row % channels;
      if (inner > 1)
        norm_gradient_of(g + at, in + at, to + at, length, m[c], s[c], sl[c], sc[c]);
      else
        norm_gradient_of_row(g + at, in + at, to + at, length, m, s, sl, sc);
    }
  });
}

at::Tensor norm_gradient_plain(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& mean,
                               const at::Tensor& shift, const at::Tensor& slope, const at::Tensor& scale) {
  const auto dtype = x.scalar_type();
  bool simple = x.is_cpu() && x.numel() > 0 && (dtype == at::kFloat || dtype == at::kDouble) &&
                grad.scalar_type() == dtype && grad.strides().equals(x.strides()) && x.is_non_overlapping_and_dense();
  for (const auto* each : {&mean, &shift, &slope, &scale})
    simple = simple && each->scalar_type() == dtype && each->is_contiguous();
  const bool rows = x.size(1) > 1 && x.stride(1) == 1;             // channels lie innermost
  if (simple && (x.is_contiguous() || rows)) {
    at::Tensor out = at::empty_like(x);
    const int64_t inner = rows ? 1 : x.numel() / (x.size(0) * x.size(1));
    AT_DISPATCH_FLOATING_TYPES(dtype, "norm_gradient", [&] {
      norm_gradient_into<scalar_t>(grad, x, out, inner, mean, shift, slope, scale);
    });
    return out;
  }
  at::Tensor inner = at::sub(grad, per_channel(shift, x));
  inner.addcmul_(at::sub(x, per_channel(mean, x)), per_channel(slope, x), -1);
  return inner.mul_(per_channel(scale, x)).to(dtype);
}

}  // namespace
}  // namespace gt

TORCH_LIBRARY_IMPL(globaltensor, CompositeExplicitAutograd, m) {
  m.impl("squares_around", &gt::squares_around_plain);
  m.impl("norm_gradient", &gt::norm_gradient_plain);
}
