// The extension module `globaltensor._torch`. Its plain C parts are found in `_core`, which is loaded before it.
#include "allocator.h"
#include "boxing.h"
#include "call_site.h"
#include "host.h"
#include "process_group/bind.h"
#include "products.h"
#include "recipe.h"
#include "tensor.h"

// Compiled against another torch, the module may load, and then read torch's objects wrongly.
static void check_torch() {
  auto version = pybind11::module_::import("torch").attr("__version__").cast<std::string>();
  if (version.rfind(TORCH_VERSION, 0) != 0)
    throw pybind11::import_error("it was compiled against torch " TORCH_VERSION ", and this is torch " + version);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  check_torch();
  gt::bind_tensor(m);
  gt::bind_boxed_views(m);
  gt::bind_recipes(m);
  gt::bind_execute(m);
  gt::bind_traces(m);
  gt::bind_dispatch(m);
  gt::bind_call_site(m);
  gt::bind_host(m);
  gt::bind_boxing(m);
  gt::bind_p2p(m);
  gt::bind_allocator(m);
  gt::bind_redistribute(m);
  gt::bind_gradient_hook(m);
  gt::bind_products(m);
  gt::bind_backend(m);
  gt::bind_symmetric_memory(m);
}
