// The c10d collectives, issued by group name. The only file that includes c10d
// headers: they cost seconds of compile time, and they bind to one torch.
//
// The same code serves NCCL and gloo: plain SUM only, since gloo lacks AVG and
// PREMUL_SUM, and zero-copy NCCL forbids them. `wait()` blocks the host on gloo
// and only orders the current stream on NCCL.
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "checks.h"
#include "checks_common.h"

namespace z3ext {
namespace {

c10::intrusive_ptr<c10d::ProcessGroup> find_group(
    const char* op, const std::string& group_name) {
  try {
    return c10d::resolve_process_group(group_name);
  } catch (const c10::Error&) {
    TORCH_CHECK(
        false,
        "z3ext::",
        op,
        ": group_name '",
        group_name,
        "' names no live process group; expected the group_name of an "
        "initialised group; call torch.distributed.init_process_group first, "
        "and make a new engine after destroy_process_group");
  }
}

void check_communicated(
    const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.layout() == at::kStrided && tensor.is_contiguous(),
      "z3ext::",
      op,
      ": ",
      name,
      " is not a dense contiguous tensor; expected one; pass ",
      name,
      ".contiguous()");
  TORCH_CHECK(
      tensor.is_floating_point(),
      "z3ext::",
      op,
      ": ",
      name,
      " is ",
      dtype_name(tensor),
      "; expected a floating-point tensor; cast it first");
}

void all_reduce_(at::Tensor buf, std::string group_name) {
  check_communicated("all_reduce_", "buf", buf);
  check_writable("all_reduce_", "buf", buf);
  const auto group = find_group("all_reduce_", group_name);
  std::vector<at::Tensor> tensors{buf};
  group->allreduce(tensors)->wait();
}

void reduce_scatter_(
    const at::Tensor& input, at::Tensor output, std::string group_name) {
  check_communicated("reduce_scatter_", "input", input);
  check_communicated("reduce_scatter_", "output", output);
  check_writable("reduce_scatter_", "output", output);
  const auto group = find_group("reduce_scatter_", group_name);
  TORCH_CHECK(
      input.numel() == output.numel() * group->getSize(),
      "z3ext::reduce_scatter_: input has ",
      input.numel(),
      " elements and output ",
      output.numel(),
      " in a group of ",
      group->getSize(),
      " ranks; expected input = output * ranks; pad the input");
  TORCH_CHECK(
      input.scalar_type() == output.scalar_type() &&
          input.device() == output.device(),
      "z3ext::reduce_scatter_: input is ",
      dtype_name(input),
      " on ",
      input.device(),
      " but output is ",
      dtype_name(output),
      " on ",
      output.device(),
      "; expected the same dtype and device; allocate output like input");
  at::Tensor row = output;
  at::Tensor rows = input;
  // The older name, which every supported torch has; 2.13 deprecates it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  group->_reduce_scatter_base(row, rows)->wait();
#pragma GCC diagnostic pop
}

} // namespace

TORCH_LIBRARY_IMPL(z3ext, CompositeExplicitAutograd, m) {
  m.impl("all_reduce_", all_reduce_);
  m.impl("reduce_scatter_", reduce_scatter_);
}

} // namespace z3ext
