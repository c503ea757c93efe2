// Linear layers of group-wise integers (groupwise.cuh) for up to 64 tokens (common/linear.cuh).
//
// Bounds, from the machine code: from its first product to its last, a chunk of 3 bits in groups of 64 takes a warp 151
// instructions with up to 8 tokens, 169 with 16, 179 with 32 and 210 with 64; decoding takes 88 of them. On an H100 the
// warps of a scheduler have 54 chunks of 4096 x 14336, and the tensor cores take 8 us for 64 tokens. One token takes 15
// us, 3 of them for `add`; 64 take 30, the products alone 22.
//
// The definitions are the same as for groupwise.cuh.
#include "common/linear.cuh"
#include "groupwise_tiles.cuh"

MOEPACK_LINEAR_KERNELS(moepack::GroupwiseLinear)
