// Layers of experts of coded integers for more tokens than one decoding of each weight serves: their decoded codes
// (coded_halves.cuh) are multiplied as tiles (common/grouped.cuh).
#include "coded_tiles.cuh"
#include "common/grouped.cuh"

MOEPACK_GROUPED_KERNELS(moepack::CodedTiles)
// Without sums of groups, registers suffice for more columns, so that fewer experts have a second tile.
MOEPACK_GROUPED(moepack::CodedTiles, 96)
