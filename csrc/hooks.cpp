// Hooks on the AccumulateGrad nodes of parameters. They run when a gradient is
// complete, and Python has no way to ask for them.
#include <cstdint>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

namespace z3ext {
namespace {

int64_t first_node_hook(const c10::List<at::Tensor>& params) {
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor param = params.get(i);
    // A node that nobody holds is gone, and its hooks with it.
    const auto node = torch::autograd::impl::try_get_grad_accumulator(param);
    if (node != nullptr && !node->post_hooks().empty()) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

} // namespace

// For every backend: it looks at the tensors' autograd state alone.
TORCH_LIBRARY_IMPL(z3ext, CompositeExplicitAutograd, m) {
  m.impl("first_node_hook", first_node_hook);
}

TORCH_LIBRARY_IMPL(z3ext, Autograd, m) {
  m.impl("first_node_hook", torch::CppFunction::makeFallthrough());
}

} // namespace z3ext
