// Low-rank factors of a compensated tensor (docs/format.md, section 8): W = Wq + U V. Each expert has V [rank, columns]
// and U [rows, rank], stored by columns. Both consist of rows of 64-value chunks with 3, 8 or 16 bits.
//
// V x is computed by a separate launch before the one that multiplies by Wq: `project_right`, with a warp per row of V
// for all tokens of a tile. U is added to the sums of Wq in that launch (Layer::correct), where a row of U's chunks
// meets 16 rows.
#pragma once
#include "common/ptx.cuh"
#include "common/routing.cuh"

namespace moepack {

constexpr int FACTOR_CHUNK = 64;

// The factors of all experts; expert e has rows starts[e] to starts[e + 1] of both sides.
struct Factors {
    const int* starts;
    const u16 *right_scales, *left_scales;  // f16, [total rank, chunks]; empty for 16 bits
    const u8 *right, *left;
    float* product;  // V x: [slots, most]
    int most;        // the largest rank
    int columns, rows;
};

// Value i of a chunk, without its scale.
template <int WIDTH>
MOEPACK_BOTH float factor_value(const u8* chunk, int i) {
    if (WIDTH == 16) return half_value(u16(chunk[2 * i] | chunk[2 * i + 1] << 8));
    if (WIDTH == 8) return float(int(chunk[i]) - 128);
    int lane = i % 8, plane = i / 8;
    if (plane < 6) return float((chunk[plane / 2 * 8 + lane] >> plane % 2 * 3 & 7) - 4);
    return float((chunk[(plane - 6) * 8 + lane] >> 6 | (chunk[16 + lane] >> plane & 1) << 2) - 4);
}

// Value i of row `row` of a side with `length` values per row.
template <int WIDTH>
MOEPACK_BOTH float factor_at(const u8* codes, const u16* scales, int row, int length, int i) {
    i64 chunk = i64(row) * ceil_div(length, FACTOR_CHUNK) + i / FACTOR_CHUNK;
    float value = factor_value<WIDTH>(codes + chunk * (WIDTH * FACTOR_CHUNK / 8), i % FACTOR_CHUNK);
    return WIDTH == 16 ? value : value * half_value(scales[chunk]);
}

#if defined(__CUDACC__)
// part[i] += the sum over first, first + step, ... of U's row times V x, for token i of a tile.
template <int WIDTH, int MOST>
MOEPACK_DEVICE void multiply_left(const Factors& f, const Tile& tile, const u16* order, int row, int first, int step,
                                  float (&part)[MOST]) {
    int begin = f.starts[tile.expert], rank = f.starts[tile.expert + 1] - begin;
#pragma unroll 1
    for (int j = first; j < rank; j += step) {
        float u = factor_at<WIDTH>(f.left, f.left_scales, begin + j, f.rows, row);
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (i < tile.tokens) part[i] += u * f.product[i64(order[tile.start + i]) * f.most + j];
    }
}

// A value of a row of activations.
MOEPACK_DEVICE float activation(const Activations& x, i64 row, int column) {
    i64 at = row * x.columns + column;
    if (x.type == Type::f32) return static_cast<const float*>(x.data)[at];
    u16 bits = static_cast<const u16*>(x.data)[at];
    return x.type == Type::f16 ? half_value(bits) : bf16_value(bits);
}

// Row j of V times the tokens of a tile, computed by a warp. Slots divided by `shared` are rows of x.
template <int WIDTH, int MOST>
MOEPACK_DEVICE void multiply_right(const Factors& f, const Activations& x, const Routing& routing, const Tile& tile,
                                   int j, int shared) {
    int lane = threadIdx.x % WARP, row = f.starts[tile.expert] + j;
    float sum[MOST] = {};
#pragma unroll 4
    for (int column = lane; column < f.columns; column += WARP) {
        float v = factor_at<WIDTH>(f.right, f.right_scales, row, f.columns, column);
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (i < tile.tokens) sum[i] += v * activation(x, routing.order[tile.start + i] / shared, column);
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
#pragma unroll
        for (int distance = WARP / 2; distance; distance /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], distance);
        if (lane == 0 && i < tile.tokens) f.product[i64(routing.order[tile.start + i]) * f.most + j] = sum[i];
    }
}

// V x of all slots: the warps of all blocks process (tile, row of V) in a strided loop.
template <int WIDTH, int MOST>
MOEPACK_DEVICE void project_right(const Factors& f, const Activations& x, const Routing& routing, int shared) {
    int warps = gridDim.x * (blockDim.x / WARP), warp = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    for (int item = warp; item < routing.tiles * f.most; item += warps) {
        const Tile& tile = routing.tile[item / f.most];
        int j = item % f.most;
        if (j < f.starts[tile.expert + 1] - f.starts[tile.expert])
            multiply_right<WIDTH, MOST>(f, x, routing, tile, j, shared);
    }
}
#endif

}  // namespace moepack
