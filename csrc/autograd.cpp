// An op that writes to a tensor raises its version, as torch's own in-place ops
// do: a backward that saved the tensor then says so, where it would otherwise
// read values that are not those of its forward.
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace z3ext {
namespace {

constexpr const char* kInPlace[] = {
    "flat_overflow_",
    "pack_",
    "pack_rows_",
    "unpack_",
    "unscale_",
    "all_reduce_",
    "reduce_scatter_",
};

void raise_versions(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      written.push_back(
          torch::jit::peek(*stack, i, arguments.size()).toTensor());
    }
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const at::Tensor& tensor : written) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

} // namespace

TORCH_LIBRARY_IMPL(z3ext, ADInplaceOrView, m) {
  for (const char* op : kInPlace) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&raise_versions>());
  }
}

// torch's kernel for ops without a derivative would pass the versions by. There
// is nothing to differentiate: the checks refuse an output that requires grad.
TORCH_LIBRARY_IMPL(z3ext, Autograd, m) {
  for (const char* op : kInPlace) {
    m.impl(op, torch::CppFunction::makeFallthrough());
  }
}

} // namespace z3ext
