// The extension module `globaltensor._torch`. Its plain C parts are found in `_core`, which is loaded before it.
#include "boxing.h"
#include "memory.h"
#include "products.h"
#include "recipe.h"
#include "tensor.h"
#include "process_group/bind.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  gt::bind_tensor(m);
  gt::bind_recipes(m);
  gt::bind_replay(m);
  gt::bind_dispatch(m);
  gt::bind_boxing(m);
  gt::bind_memory(m);
  gt::bind_convert(m);
  gt::bind_letters(m);
  gt::bind_gradients(m);
  gt::bind_products(m);
  gt::bind_backend(m);
  gt::bind_symmetric_memory(m);
}
