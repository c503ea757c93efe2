// Products of a few tokens with up to three dense matrices of bf16 or f16 in one launch: y = x W^T + bias.
//
// A block computes 16 rows of a matrix for all tokens; its warps divide the columns and add their sums in shared memory.
// Weights are operand A of the tensor cores and tokens operand B. Both go from global memory to registers directly: the
// columns of a product are assigned in the order in which a lane loads them, 16 bytes of a row. The first weights are
// requested before the previous launch has ended, because no launch writes them.
//
// Sums in f32, rounded to the activations' type, then added to the bias and rounded again.
//
// Definitions: HALF (1: f16, 0: bf16), COLUMNS: tokens, 8 or 16; TEAM: warps of a block, 4, 8 or 16.
#include "common/layer.cuh"

namespace moepack {

// Matrices [rows, columns], one below the other; rows are multiples of 16, columns of 32. Missing ones have no rows.
struct Dense {
    const u16 *first, *second, *third;
    const u16 *first_bias, *second_bias, *third_bias;  // or null
    int first_rows, second_rows, third_rows, columns;
    const u16* x;  // [tokens, columns]
    u16* out;      // [tokens, all rows]
    int tokens;
};

#if defined(__CUDACC__)
namespace dense {

constexpr int ROWS = 16;
constexpr int STEP = 32;     // columns that a lane's two loads cover
constexpr int TILES = COLUMNS / 8;
constexpr int AHEAD = 6;      // steps whose weights are in flight

MOEPACK_DEVICE void product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (HALF) multiply_add(c, a0, a1, a2, a3, b0, b1);
    else multiply_add_bf16(c, a0, a1, a2, a3, b0, b1);
}

MOEPACK_DEVICE float value_of(u16 bits) {
    return HALF ? half_value(bits) : bf16_value(bits);
}

MOEPACK_DEVICE u16 bits_of(float value) {
    return u16(HALF ? to_half2(value, 0.0f) : to_bf16x2(value, 0.0f));
}

// The rows of a block.
struct Rows {
    const u16 *weights, *bias;

    MOEPACK_DEVICE Rows(const Dense& d, int row) {
        int part = row < d.first_rows ? 0 : row < d.first_rows + d.second_rows ? 1 : 2;
        row -= part == 0 ? 0 : d.first_rows + (part - 1) * d.second_rows;
        weights = (part == 0 ? d.first : part == 1 ? d.second : d.third) + i64(row) * d.columns;
        bias = part == 0 ? d.first_bias : part == 1 ? d.second_bias : d.third_bias;
        bias = bias ? bias + row : nullptr;
    }
};

MOEPACK_DEVICE Quad quad_at(const u16* from, int column, int columns) {
    return column < columns ? load_quad(from + column) : Quad{0, 0, 0, 0};
}

MOEPACK_DEVICE void multiply(const Dense& d) {
    __shared__ float sums[TEAM][ROWS][COLUMNS + 1];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int row = blockIdx.x * ROWS, all = d.first_rows + d.second_rows + d.third_rows;
    Rows rows(d, row);
    const u16* above = rows.weights + i64(g) * d.columns;
    const u16* below = above + i64(8) * d.columns;
    int share = ceil_div(d.columns / STEP, TEAM) * STEP, begin = warp * share, end = least(begin + share, d.columns);
    Quad weight[AHEAD][2];
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
        weight[n][0] = quad_at(above, begin + n * STEP + t * 8, end);
        weight[n][1] = quad_at(below, begin + n * STEP + t * 8, end);
    }
    enter_launch();
    float sum[TILES][4] = {};
    for (int column = begin; column < end; column += AHEAD * STEP) {
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            int at = column + n * STEP + t * 8;
            if (at - t * 8 >= end) break;
            Quad a = weight[n][0], b = weight[n][1];
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                int token = i * 8 + g;
                Quad x = quad_at(d.x + i64(least(token, d.tokens - 1)) * d.columns, at, end);
                product(sum[i], a.x, b.x, a.y, b.y, x.x, x.y);
                product(sum[i], a.z, b.z, a.w, b.w, x.z, x.w);
            }
            weight[n][0] = quad_at(above, at + AHEAD * STEP, end);
            weight[n][1] = quad_at(below, at + AHEAD * STEP, end);
        }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[warp][g + j / 2 * 8][i * 8 + 2 * t + j % 2] = sum[i][j];
    __syncthreads();
    for (int item = threadIdx.x; item < ROWS * d.tokens; item += TEAM * WARP) {
        int token = item / ROWS, of = item % ROWS;
        float total = 0;
#pragma unroll
        for (int i = 0; i < TEAM; ++i) total += sums[i][of][token];
        u16 bits = bits_of(total);
        if (rows.bias) bits = bits_of(value_of(bits) + value_of(rows.bias[of]));
        d.out[i64(token) * all + row + of] = bits;
    }
}

}  // namespace dense
#endif

}  // namespace moepack

#if defined(__CUDACC__)
// Grid: all rows / 16.
extern "C" __global__ void __launch_bounds__(TEAM* moepack::WARP, 16 / TEAM)
multiply(moepack::Dense dense) {
    moepack::dense::multiply(dense);
}
#endif
