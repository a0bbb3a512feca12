// Every schema of z3ext, and nothing else. docs/architecture.md says what each
// op computes; the backends register their implementations in csrc/cpu,
// csrc/cuda, csrc/comm.cpp and csrc/hooks.cpp.
#include <torch/library.h>

TORCH_LIBRARY(z3ext, m) {
  m.def("flat_overflow(Tensor buf) -> Tensor");
  m.def("flat_overflow_(Tensor(a!) flag, Tensor buf) -> ()");
  m.def(
      "pack_(Tensor[] grads, int[] offsets, Tensor(a!) bucket, "
      "Tensor(b!) flag, float[] divisors) -> ()");
  m.def(
      "pack_rows_(Tensor[] grads, int[] chunk_offsets, int row_numel, "
      "int world_size, Tensor(a!) bucket, Tensor(b!) flag, "
      "float[] divisors) -> ()");
  m.def(
      "unpack_(Tensor bucket, Tensor(a!) partitions, int[] src_offsets, "
      "int[] dst_offsets, int[] numels, int[] padded_numels, "
      "float[] multipliers, bool accumulate) -> ()");
  m.def(
      "segment_check(Tensor buf, Tensor offsets, int lanes) "
      "-> (Tensor, Tensor)");
  m.def("unscale_(Tensor partition, Tensor scale, Tensor(a!) out) -> ()");
  m.def("all_reduce_(Tensor(a!) buf, str group_name) -> ()");
  m.def(
      "reduce_scatter_(Tensor input, Tensor(a!) output, str group_name) "
      "-> ()");
  m.def("first_node_hook(Tensor[] params) -> int");
}
