// Layers of experts of 4-bit codes into codebooks of whole rows (codebook_tiles.cuh), for more than 64 tokens
// (common/grouped.cuh).
//
// Definitions: PLANES (bytes of a centroid), BITS (4).
#include "codebook_tiles.cuh"
#include "common/grouped.cuh"

MOEPACK_GROUPED_KERNELS(moepack::CodebookLinear)
