// The extension module `globaltensor._torch`. Its plain C parts are found in `_core`, which is loaded before it.
#include "allocator.h"
#include "boxing.h"
#include "call_site.h"
#include "host.h"
#include "lineage.h"
#include "op_errors.h"
#include "process_group/bind.h"
#include "products.h"
#include "recipe.h"
#include "spec.h"
#include "tensor.h"

// native.py reads this in the file, before it loads it.
[[gnu::used]] static const char built_for[] = "built for torch " TORCH_VERSION;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  gt::bind_specs(m);
  gt::bind_tensor(m);
  gt::bind_boxed_views(m);
  gt::bind_turned_views(m);
  gt::bind_recipes(m);
  gt::bind_siblings(m);
  gt::bind_execute(m);
  gt::bind_op_errors(m);
  gt::bind_traces(m);
  gt::bind_dispatch(m);
  gt::bind_lineage(m);
  gt::bind_call_site(m);
  gt::bind_host(m);
  gt::bind_boxing(m);
  gt::bind_boxing_watch(m);
  gt::bind_p2p(m);
  gt::bind_allocator(m);
  gt::bind_redistribute(m);
  gt::bind_gradient_hook(m);
  gt::bind_products(m);
  gt::bind_backend(m);
  gt::bind_symmetric_memory(m);
  gt::bind_liveness(m);
}
