// Expert layers, and linear layers not covered by groupwise_linear.cu, of group-wise integers (groupwise.cuh).
//
// Launch: common/layer.cuh. Definitions: BITS, GROUP (columns; 0: the whole row), SYMMETRIC (0, 1), HALVES (parameters
// are f16, otherwise bf16), TOKENS (most per tile: 8 or 32), BLOCK_WARPS, RESIDENT (blocks per SM), RANK_BITS (of the
// values of low-rank factors; 0: there are none).
//
// On GPUs with warpgroups (sm_90a), they multiply tiles of more than eight tokens: the tensor cores read the
// activations of four row blocks from shared memory once, and multiply while the next codes are decoded.
//
// Bounds: bytes of codes and parameters over memory bandwidth, 8 us for 4096 x 14336 weights of 3 bits in groups of 64
// on an H100, or instructions: a chunk of 64 weights per lane takes 155, plus about 55 to copy the next one, and 234
// with 32 tokens; decoding takes 96 of them. One token takes 17 us, a little more than half of it in the main loop: the
// four warps of a scheduler issue 0.56 instructions per cycle. The rest is the launch, activations and sums. 16 tokens
// take 20 us and 32 take 25: 11 and 14 of them in the main loop, 4 and 6 for activations.
#include "common/kernels.cuh"
#include "groupwise.cuh"

namespace moepack {

#if defined(__CUDACC__)
// Code i of quad q of a unit.
MOEPACK_DEVICE u32 code_of(const u32 (&word)[BITS], int q, int i) {
    if (BITS == 3 && q >= 6)
        return (word[q - 6] >> (8 * i + 6) & 3) | (word[BITS - 1] >> (8 * i + q) & 1) << 2;
    constexpr int PER = BITS == 3 ? 2 : 8 / BITS;
    return word[q / PER] >> (8 * i + q % PER * BITS) & ((1u << BITS) - 1);
}

// Decodes the 32 values of a unit of a row in a block; columns after the last have arbitrary values.
MOEPACK_DEVICE void unit_values(const u8* block, int row, int column, int columns, float (&value)[Groupwise::UNIT]) {
    using G = Groupwise;
    int unit = column / G::UNIT, record = G::RECORD_UNITS ? unit / most(G::RECORD_UNITS, 1) : 0;
    i64 at = i64(record) * G::RECORD + G::PARAMETERS + i64(unit - record * G::RECORD_UNITS) * G::UNIT_BYTES;
    const u8* codes = block + at;
    u32 word[BITS];
#pragma unroll
    for (int i = 0; i < BITS; ++i) word[i] = reinterpret_cast<const u32*>(codes + i * G::REGISTER)[row];
#pragma unroll
    for (int i = 0; i < G::UNIT; ++i) {
        int group = GROUP ? least(column + i, columns - 1) / most(GROUP, 1) : 0;
        const u8* at = block + i64(group / G::RECORD_GROUPS) * G::RECORD + group % G::RECORD_GROUPS * G::GROUP_BYTES;
        u16 scale = reinterpret_cast<const u16*>(at)[row], offset = reinterpret_cast<const u16*>(at + 32)[row];
        value[i] = (HALVES ? half_value(scale) : bf16_value(scale)) * (int(code_of(word, i / 4, i % 4)) - G::MIDDLE);
        if (!SYMMETRIC) value[i] += HALVES ? half_value(offset) : bf16_value(offset);
    }
}

#if RANK_BITS
// Adds U V for a row of an expert to the 32 values that start at `column`, which are half a chunk of V.
MOEPACK_DEVICE void add_factors(const Factors& f, int expert, int row, int column, float (&value)[Groupwise::UNIT]) {
    for (int j = f.starts[expert]; j < f.starts[expert + 1]; ++j) {
        i64 chunk = i64(j) * ceil_div(f.columns, FACTOR_CHUNK) + column / FACTOR_CHUNK;
        float u = factor_at<RANK_BITS>(f.left, f.left_scales, j, f.rows, row);
        if (RANK_BITS < 16) u *= half_value(f.right_scales[chunk]);
        const u8* right = f.right + chunk * (RANK_BITS * FACTOR_CHUNK / 8);
#pragma unroll
        for (int i = 0; i < Groupwise::UNIT; ++i)
            value[i] += u * factor_value<RANK_BITS>(right, column % FACTOR_CHUNK + i);
    }
}
#endif
#endif

}  // namespace moepack

#if defined(__CUDACC__)
using namespace moepack;

MOEPACK_LAYER_KERNELS(Groupwise)

// Decodes `blocks` blocks of 16 rows, starting at `first`, to bfloat16 or, if `wide`, float32 [experts, rows, columns];
// each thread decodes 32 columns.
extern "C" __global__ void __launch_bounds__(256, RANK_BITS ? 1 : 2)
dequantize(Groupwise::Matrix matrix, i64 first, i64 blocks, int rows, int columns, int wide, void* out) {
    constexpr int UNIT = Groupwise::UNIT;
    int units = ceil_div(columns, UNIT), per_expert = ceil_div(rows, BLOCK_ROWS);
    i64 items = blocks * units * BLOCK_ROWS;
    for (i64 item = i64(blockIdx.x) * blockDim.x + threadIdx.x; item < items; item += i64(gridDim.x) * blockDim.x) {
        int row = item % BLOCK_ROWS, unit = item / BLOCK_ROWS % units;
        i64 block = item / BLOCK_ROWS / units;
        int in_expert = block % per_expert * BLOCK_ROWS + row;
        if (in_expert >= rows) continue;
        float value[UNIT];
        unit_values(matrix.data + (first + block) * matrix.block_bytes, row, unit * UNIT, columns, value);
#if RANK_BITS
        add_factors(matrix.factors, (first + block) / per_expert, in_expert, unit * UNIT, value);
#endif
        i64 to = (block / per_expert * rows + in_expert) * columns + unit * UNIT;
#pragma unroll
        for (int i = 0; i < UNIT; i += 8) {
            int left = columns - unit * UNIT - i;
            const float(&eight)[8] = reinterpret_cast<const float(&)[8]>(value[i]);
            if (left > 0) store_eight(out, to + i, eight, left, wide, columns % 8 == 0);
        }
    }
}

#if RANK_BITS
// Multiplies by V the activations that a launch will multiply by Wq; slots divided by `shared` are rows of x.
extern "C" __global__ void __launch_bounds__(THREADS)
multiply_by_right(Problem problem, Factors factors, int shared) {
    __shared__ Routing routing;
    enter_launch();
    build_routing<TOKENS>(routing, problem.index, problem.slots(), problem.experts);
    project_right<RANK_BITS, TOKENS>(factors, problem.x, routing, shared);
}
#endif
#endif
