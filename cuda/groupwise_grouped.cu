// Layers of experts of group-wise integers (groupwise.cuh) for more than 64 tokens (common/grouped.cuh).
//
// The definitions are the same as for groupwise.cuh.
#include "common/grouped.cuh"
#include "groupwise_tiles.cuh"

MOEPACK_GROUPED_KERNELS(moepack::GroupwiseLinear)
