// Linear layers of 4-bit codes into codebooks of whole rows (codebook_tiles.cuh), for up to 64 tokens
// (common/linear.cuh).
//
// Bounds, from the machine code: from its first product to its last, a chunk takes a warp 204 to 213 instructions with
// two planes, about 160 of them on the integer pipe, and 186 to 190 and about 110 with one. The warps of a scheduler
// have 54 chunks of 4096 x 14336 on an H100. The integer pipe is busy half of the time with up to 16 tokens, and a
// third with 64. Activations before the first product and sums after the last take most of the rest. 64 tokens take 36
// us, the products alone 27.
//
// Definitions: PLANES (bytes of a centroid), BITS (4).
#include "codebook_tiles.cuh"
#include "common/linear.cuh"

MOEPACK_LINEAR_KERNELS(moepack::CodebookLinear)
