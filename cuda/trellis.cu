// The search for dependent codes with error compensation along each path: bit for bit the twin of
// rust/core/src/solvers/trellis/compensated.rs, which explains the algorithm.
//
// The host launches `search` and `spread` for one block of up to BLOCK columns after the other. `search` has eight
// threads per row, one per state of the trellis. A thread keeps its path's codes and its compensated weights of the
// block in registers, and copies the weights of the path's predecessor by shuffles. `spread` adds the errors of the
// block's codes to all later columns.
//
// Columns are in the order of visits: lane after lane. All arithmetic is in f32, without fused operations (compile with
// --fmad=false) and in the order of the twin, so codes are equal.
#include "common/types.cuh"

namespace moepack {

struct Trellis {
    const float* source;  // [experts, rows, columns], weights in fine units
    float* work;          // the same, compensated for the columns before
    int* codes;           // [experts, rows, columns]
    u8* states;           // [experts, rows], after the columns before
    const float* upper;   // [experts, columns, columns], F of the factorized Hessians
    const float* pivots;  // [experts, columns]
    const float* prices;  // [experts], of a bit in squared fine units
    const float* lists;   // [lists, indices, 2], bits of an index and of the next one of its parity towards zero
    const int* runs;      // [experts, rows], each row's list
    int experts, rows, columns, indices;
    int start, count;  // the block's columns
    int first;         // whether a lane begins there: states are 0
};

#if defined(__CUDACC__)
namespace trellis {

constexpr int BLOCK = 32, STATES = 8, ROWS = 8;
constexpr int TILE = 64, TILE_THREADS = 256;
// The predecessors of the states by edges with even and odd indices, a nibble each.
constexpr u32 EVEN = 0x73156420, ODD = 0x15732064;
constexpr float FAR = 1 << 25;          // magnitudes are clamped to it
constexpr float WHOLE = 3 << 22;        // a number this large has no fractions
constexpr u32 INFINITE = 0x7f800000;

MOEPACK_DEVICE int from(u32 table, int state) {
    return int(table >> (4 * state) & 7);
}

// The nearest integer of a number of at most 2^22 in magnitude, ties to even.
MOEPACK_DEVICE int whole(float value) {
    return int(__float_as_uint(value + WHOLE)) - int(__float_as_uint(WHOLE));
}

struct Edge {
    int code;
    float cost;
};

// The better code of a state with an index of a parity, out of the nearest and the next one towards zero.
MOEPACK_DEVICE Edge edge(float own, int sign, int parity, float weight, float price, const float* list, int indices) {
    int middle = indices / 2;
    int index = 2 * whole((own - float(1 + 4 * parity)) * 0.125f) + parity;
    int last = index > middle ? middle : index;
    int place = last < -middle ? 0 : last + middle;
    int code = 4 * index + 1, inner = 4 * index + (index > 0 ? -7 : 9);
    float error = own - float(code), inner_error = own - float(inner);
    float cost = error * error * weight + price * list[2 * place];
    float inner_cost = inner_error * inner_error * weight + price * list[2 * place + 1];
    bool is_inner = inner_cost < cost;
    return {sign * (is_inner ? inner : code), is_inner ? inner_cost : cost};
}

// A thread's path: its cost, its codes, whether the index that led to each of them is odd, and the weights of the
// columns that are still free.
struct Path {
    float cost, free[BLOCK];
    int codes[BLOCK];
    u32 odd;
};

MOEPACK_DEVICE void advance(
    const Trellis& t, Path& path, int i, int expert, i64 at, const float* list, const float (&factors)[BLOCK][BLOCK]) {
    int state = threadIdx.x % STATES, base = threadIdx.x % WARP / STATES * STATES, sign = state % 2 ? -1 : 1;
    float pivot = t.pivots[i64(expert) * t.columns + t.start + i], weight = pivot * pivot, price = t.prices[expert];
    float own = float(sign) * path.free[i];
    own = own > -FAR ? own : -FAR;
    own = own < FAR ? own : FAR;
    Edge even = edge(own, sign, 0, weight, price, list, t.indices), odd = edge(own, sign, 1, weight, price, list, t.indices);
    int from_even = base + from(EVEN, state), from_odd = base + from(ODD, state);
    float total = __shfl_sync(~0u, path.cost + even.cost, from_even);
    float odd_total = __shfl_sync(~0u, path.cost + odd.cost, from_odd);
    int code = __shfl_sync(~0u, even.code, from_even), odd_code = __shfl_sync(~0u, odd.code, from_odd);
    bool is_odd = odd_total < total;
    path.cost = is_odd ? odd_total : total;
    path.codes[i] = is_odd ? odd_code : code;
    path.odd |= u32(is_odd) << i;
    float error = t.source[at + i] - float(path.codes[i]);
#pragma unroll
    for (int j = i + 1; j < BLOCK; ++j)
        if (j < t.count)
            path.free[j] = __shfl_sync(~0u, path.free[j], is_odd ? from_odd : from_even) + error * factors[i][j];
}

// Gives all threads of a row the codes of the cheapest path; returns its last state.
MOEPACK_DEVICE int trace(const Trellis& t, Path& path) {
    int base = threadIdx.x % WARP / STATES * STATES, best = 0;
    float least = __shfl_sync(~0u, path.cost, base);
#pragma unroll
    for (int state = 1; state < STATES; ++state) {
        float cost = __shfl_sync(~0u, path.cost, base + state);
        if (cost < least) least = cost, best = state;
    }
    int state = best;
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; --i)
        if (i < t.count) {
            path.codes[i] = __shfl_sync(~0u, path.codes[i], base + state);
            u32 odd = __shfl_sync(~0u, path.odd, base + state) >> i & 1;
            state = from(odd ? ODD : EVEN, state);
        }
    return best;
}

MOEPACK_DEVICE void search(const Trellis& t) {
    __shared__ float factors[BLOCK][BLOCK];
    int expert = blockIdx.y, row = blockIdx.x * ROWS + threadIdx.x / STATES, state = threadIdx.x % STATES;
    bool exists = row < t.rows;
    row = exists ? row : t.rows - 1;
    for (int i = threadIdx.x; i < BLOCK * BLOCK; i += ROWS * STATES) {
        int from = i / BLOCK, to = i % BLOCK;
        i64 at = (i64(expert) * t.columns + t.start + from) * t.columns + t.start + to;
        factors[from][to] = from < t.count && to < t.count ? t.upper[at] : 0.0f;
    }
    __syncthreads();
    i64 of_row = i64(expert) * t.rows + row, at = of_row * t.columns + t.start;
    const float* list = t.lists + i64(t.runs[of_row]) * t.indices * 2;
    Path path;
    path.odd = 0;
    path.cost = state == (t.first ? 0 : t.states[of_row]) ? 0.0f : __uint_as_float(INFINITE);
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) path.free[i] = i < t.count ? t.work[at + i] : 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i)
        if (i < t.count) advance(t, path, i, expert, at, list, factors);
    int last = trace(t, path);
    float(&errors)[BLOCK] = path.free;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) errors[i] = i < t.count ? t.source[at + i] - float(path.codes[i]) : 0.0f;
    for (int to = state; to < t.count; to += STATES) {
        float weight = t.work[at + to];
        int code = 0;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            if (i < to) weight = weight + errors[i] * factors[i][to];
            if (i == to) code = path.codes[i];
        }
        if (exists) t.work[at + to] = weight, t.codes[at + to] = code;
    }
    if (exists && state == 0) t.states[of_row] = u8(last);
}

MOEPACK_DEVICE void spread(const Trellis& t) {
    __shared__ float errors[TILE][BLOCK + 1], factors[BLOCK][TILE];
    int tiles = ceil_div(t.rows, TILE), expert = blockIdx.y / tiles, first = blockIdx.y % tiles * TILE;
    int stop = t.start + t.count, column = stop + blockIdx.x * TILE;
    i64 of_expert = i64(expert) * t.rows * t.columns;
    for (int i = threadIdx.x; i < TILE * BLOCK; i += TILE_THREADS) {
        int row = first + i / BLOCK, from = i % BLOCK;
        i64 at = of_expert + i64(row) * t.columns + t.start + from;
        errors[i / BLOCK][from] = row < t.rows && from < t.count ? t.source[at] - float(t.codes[at]) : 0.0f;
    }
    for (int i = threadIdx.x; i < BLOCK * TILE; i += TILE_THREADS) {
        int from = i / TILE, to = column + i % TILE;
        i64 at = (i64(expert) * t.columns + t.start + from) * t.columns + to;
        factors[from][i % TILE] = from < t.count && to < t.columns ? t.upper[at] : 0.0f;
    }
    __syncthreads();
    int across = threadIdx.x % 16, down = threadIdx.x / 16 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int row = first + down + i, to = column + across + 16 * j;
            if (row >= t.rows || to >= t.columns) continue;
            float* place = t.work + of_expert + i64(row) * t.columns + to;
            float sum = *place;
#pragma unroll
            for (int from = 0; from < BLOCK; ++from) sum = sum + errors[down + i][from] * factors[from][across + 16 * j];
            *place = sum;
        }
}

}  // namespace trellis
#endif

}  // namespace moepack

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(64) search(moepack::Trellis trellis) {
    moepack::trellis::search(trellis);
}

extern "C" __global__ void __launch_bounds__(256) spread(moepack::Trellis trellis) {
    moepack::trellis::spread(trellis);
}
#endif
