// Layers of experts with many tokens on warpgroups (sm_90a), scheduled on the device: the code shared by all formats
// that support them.
//
// Launches of a layer: `route` sorts slots (pairs of a token and one of its experts) by expert; `lay_out` writes the
// activations of all slots as cells; `gated_16` to `gated_64`, by columns of a product, write silu(gate x) * (up x);
// `lay_out` again and `project_16` to `project_64` multiply by the down projection; `add` sums the outputs of each
// token in the order of its slots. Nothing depends on the host, and each output is a sum in a fixed order.
//
// Work: a *tile of tokens* is up to `columns` slots of one expert; its columns are *places*, numbered over all tiles.
// Blocks take (tile of tokens, tile of rows) in turn and multiply all chunks, so no sum is shared. Neighboring blocks
// have the same tokens, and weights are read from memory about once. In `gated`, eight warps multiply row blocks of
// gate and the other eight row blocks of up; pairs of them exchange sums through shared memory.
//
// Cells and Formats: common/tiles.cuh.
#pragma once
#include "common/routes.cuh"
#include "common/tiles.cuh"

namespace moepack {

constexpr int LEAST_SHARED = 218 << 10;  // bytes of shared memory of a block on GPUs with warpgroups
constexpr int LAYOUT_THREADS = 256, LAYOUT_PLACES = 4;  // of a block of `lay_out`

// The arguments of `lay_out`.
struct Layout {
    Activations x;  // rows are tokens if `top_k`, otherwise places
    Routes routes;
    u8* cells;           // [tiles, chunks] of `cell_bytes`
    float* scales;       // [places], inverses of the powers of two
    const float* units;  // per row of x, units of the activations; null: 1
    int chunks, columns, top_k;
};

// The arguments of the products.
struct Grouped {
    Routes routes;
    const u8* cells;
    const float* scales;
    float* out;  // [places, rows]
    int rows, chunks, row_tiles;
};

#if defined(__CUDACC__)
// Writes the cells of four places: a warp lays out one chunk at a time.
template <Type TYPE, class Format>
MOEPACK_DEVICE void lay_out_places(const Layout& layout) {
    constexpr int WARPS = LAYOUT_THREADS / WARP;
    __shared__ float largest_of[WARPS][LAYOUT_PLACES];
    int first = blockIdx.x * LAYOUT_PLACES, tile = first / layout.columns, start = first - tile * layout.columns;
    if (tile >= *layout.routes.count) return;
    int tokens = layout.routes.tokens[tile];
    if (start >= tokens) return;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, product = lane / 4;
    int token = start + lane % 4, place = tile * layout.columns + least(token, tokens - 1);
    int row = layout.top_k ? layout.routes.slot[place] / layout.top_k : place;
    // Rows of up to 2048 columns stay in registers; the other columns are loaded twice.
    constexpr int KEPT = 2;
    Columns<TYPE, Format> kept[KEPT], columns;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) kept[i].load(layout.x, row, warp + i * WARPS, product);
#pragma unroll
    for (int i = 0; i < KEPT; ++i) largest = fmaxf(largest, kept[i].largest());
    for (int chunk = warp + KEPT * WARPS; chunk < layout.chunks; chunk += WARPS) {
        columns.load(layout.x, row, chunk, product);
        largest = fmaxf(largest, columns.largest());
    }
    largest = largest_of_products(largest);
    if (product == 0) largest_of[warp][lane] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) largest = fmaxf(largest, largest_of[i][lane % 4]);
    Scale scale = scale_of(largest);
    bool exists = token < tokens;
    if (warp == 0 && product == 0 && exists)
        layout.scales[place] = scale.inverse * (layout.units ? layout.units[row] : 1.0f);
    int bytes = cell_bytes<Format>(layout.columns);
    u8* cells = layout.cells + (i64(tile) * layout.chunks + warp) * bytes;
#pragma unroll
    for (int i = 0; i < KEPT; ++i, cells += WARPS * bytes)
        if (warp + i * WARPS < layout.chunks)
            kept[i].template write<4>(cells, layout.columns, token, product, scale.factor, exists);
    for (int chunk = warp + KEPT * WARPS; chunk < layout.chunks; chunk += WARPS, cells += WARPS * bytes) {
        columns.load(layout.x, row, chunk, product);
        columns.template write<4>(cells, layout.columns, token, product, scale.factor, exists);
    }
}

template <class Format>
MOEPACK_DEVICE void lay_out_places(const Layout& layout) {
    if (layout.x.type == Type::f32) lay_out_places<Type::f32, Format>(layout);
    else if (layout.x.type == Type::f16) lay_out_places<Type::f16, Format>(layout);
    else lay_out_places<Type::bf16, Format>(layout);
}

// out[token] = the sum of its slots' outputs times their weights; each thread sums four rows, or one if rows are not a
// multiple of four.
MOEPACK_DEVICE void add_slots(const int* place, const float* weights, const float* from, float* out, int top_k,
                              int rows) {
    int token = blockIdx.y, at = blockIdx.x * blockDim.x + threadIdx.x;
    if (rows % 4 == 0 && at < rows / 4) {
        float4 sum = {0, 0, 0, 0};
        for (int i = token * top_k; i < (token + 1) * top_k; ++i) {
            if (place[i] < 0) continue;
            float4 value = reinterpret_cast<const float4*>(from + i64(place[i]) * rows)[at];
            float w = weights[i];
            sum.x += w * value.x, sum.y += w * value.y, sum.z += w * value.z, sum.w += w * value.w;
        }
        reinterpret_cast<float4*>(out + i64(token) * rows)[at] = sum;
    } else if (rows % 4 != 0) {
        for (int row = at; row < rows; row += gridDim.x * blockDim.x) {
            float sum = 0;
            for (int i = token * top_k; i < (token + 1) * top_k; ++i)
                if (place[i] >= 0) sum += weights[i] * from[i64(place[i]) * rows + row];
            out[i64(token) * rows + row] = sum;
        }
    }
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The work of a block: tiles of rows vary fastest.
struct Turn {
    const Grouped& grouped;
    int at, last;
    int tile, row_tile;

    MOEPACK_DEVICE explicit Turn(const Grouped& grouped)
        : grouped(grouped), at(blockIdx.x), last(*grouped.routes.count * grouped.row_tiles) {
        enter();
    }

    MOEPACK_DEVICE void enter() {
        tile = at / grouped.row_tiles, row_tile = at - tile * grouped.row_tiles;
    }

    MOEPACK_DEVICE bool exists() const {
        return at < last;
    }

    MOEPACK_DEVICE void advance() {
        at += gridDim.x;
        enter();
    }

    // The row block of a warp, in the matrix of all experts; warps after the last row repeat it.
    template <int BLOCKS>
    MOEPACK_DEVICE i64 row_block(int warp) const {
        int of_expert = ceil_div(grouped.rows, BLOCK_ROWS);
        return i64(grouped.routes.expert[tile]) * of_expert + least(row_tile * BLOCKS + warp % BLOCKS, of_expert - 1);
    }
};

// Fills the ring with four warps: lanes 0 to 3 copy the codes of one row block each, lane 4 of the first warp the cells.
template <class Format, int N, int BLOCKS>
struct GroupedProducer {
    static constexpr int LANES = TILE_BLOCKS / 4;
    const Grouped& grouped;
    Ring<Format, N> ring;
    int row_block, lane;
    typename Format::Matrix matrix;

    MOEPACK_DEVICE GroupedProducer(const Grouped& grouped, const Ring<Format, N>& ring,
                                   const typename Format::Matrix& matrix)
        : grouped(grouped), ring(ring), row_block((threadIdx.x / WARP - TILE_BLOCKS) * LANES + threadIdx.x % LANES),
          lane(threadIdx.x % WARP), matrix(matrix) {}

    MOEPACK_DEVICE void copy(const u8* codes, const u8* cells, int chunk) {
        constexpr int CODES = Ring<Format, N>::CODES, CELLS = Ring<Format, N>::CELLS;
        typename Format::Pieces pieces(matrix, chunk);
        Shared barrier = ring.full + 8 * ring.stage;
        if (lane < LANES) {
            if (row_block == 0) arrive_expecting(barrier, TILE_BLOCKS * (pieces.first + pieces.second) + CELLS);
            Shared to = shared_address(ring.at() + row_block * Format::STAGE);
            copy_bulk(to, codes + pieces.first_at, pieces.first, barrier, KEEP);
            if (pieces.second) copy_bulk(to + pieces.first, codes + pieces.second_at, pieces.second, barrier, KEEP);
        } else if (threadIdx.x == TILE_BLOCKS * WARP + LANES) {
            copy_bulk(shared_address(ring.at() + CODES), cells + i64(chunk) * CELLS, CELLS, barrier, KEEP);
        }
    }

    MOEPACK_DEVICE void run(Turn turn) {
        for (; turn.exists(); turn.advance()) {
            const u8* codes = matrix.data + turn.template row_block<BLOCKS>(row_block) * matrix.block_bytes;
            const u8* cells = grouped.cells + i64(turn.tile) * grouped.chunks * Ring<Format, N>::CELLS;
            for (int chunk = 0; chunk < grouped.chunks; ++chunk) {
                // An unused stage is empty: the phase before the first has parity 1.
                wait_for_phase(ring.empty + 8 * ring.stage, ring.parity ^ 1);
                copy(codes, cells, chunk);
                ring.advance();
            }
        }
    }
};

// Combines the sums of two warps, which have the same rows and columns in each lane: gate and up projections.
template <int N>
struct Gating {
    static constexpr int HALF = N / 2, ROUNDS = N > 8 ? 2 : 1, EACH = HALF / ROUNDS, BYTES = 2 * EACH * WARP * 16;
    static_assert(EACH * ROUNDS == HALF);
    int number;
    float4* passed;  // by gate, then by up

    MOEPACK_DEVICE Gating(int number, u8* shared)
        : number(number), passed(reinterpret_cast<float4*>(shared + number * BYTES)) {}

    // Each warp passes half of its columns, and computes silu(gate) * up of the other half: `up` the second one.
    MOEPACK_DEVICE void exchange(bool up, int lane, const float (&sum)[N][4], float (&value)[HALF][4]) const {
#pragma unroll
        for (int begin = 0; begin < HALF; begin += EACH) {
            meet(number);  // both have read what was passed before
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const float(&first)[4] = sum[begin + i], (&second)[4] = sum[HALF + begin + i];
                passed[(up * EACH + i) * WARP + lane] = {up ? first[0] : second[0], up ? first[1] : second[1],
                                                         up ? first[2] : second[2], up ? first[3] : second[3]};
            }
            meet(number);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                float4 other = passed[(!up * EACH + i) * WARP + lane];
                float received[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float own = up ? sum[HALF + begin + i][j] : sum[begin + i][j];
                    value[begin + i][j] = silu(up ? received[j] : own) * (up ? own : received[j]);
                }
            }
        }
    }

    static MOEPACK_DEVICE float silu(float x) {
        return x / (1.0f + __expf(-x));
    }
};

// Multiplies a row block of each item; BLOCKS of the sixteen warps multiply the first matrix.
template <class Format, int N, int BLOCKS>
struct GroupedConsumer : Multiplier<Format, N> {
    static constexpr bool GATED = BLOCKS < TILE_BLOCKS;
    using Base = Multiplier<Format, N>;
    using Base::cells, Base::clear, Base::decode, Base::lane, Base::operands, Base::out, Base::ring, Base::warp;
    const Grouped& grouped;
    typename Format::Matrix matrix;
    Gating<N> gating;

    MOEPACK_DEVICE GroupedConsumer(const Grouped& grouped, const Ring<Format, N>& ring,
                                   const typename Format::Matrix& matrix)
        : Base(ring), grouped(grouped), matrix(matrix), gating(warp % BLOCKS, ring.after()) {}

    // Requests the data that a row block needs, and switches to it.
    MOEPACK_DEVICE void enter(const Turn& turn) {
        operands.ask(matrix, turn.template row_block<BLOCKS>(warp));
        operands.enter();
        decode(ring.at(), 0);
    }

    // Multiplies the sums by the scales of rows and activations.
    MOEPACK_DEVICE void scale_outputs(const Turn& turn) {
        float2 of_rows = {1, 1};
        if constexpr (!Base::GROUPS) of_rows = operands.row_scales();
        const float* scales = grouped.scales + i64(turn.tile) * 8 * N + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float first = scales[8 * i], second = scales[8 * i + 1];
            out[i][0] *= first * of_rows.x, out[i][1] *= second * of_rows.x;
            out[i][2] *= first * of_rows.y, out[i][3] *= second * of_rows.y;
        }
    }

    // Writes values of the columns of a product from `column` on.
    template <int COUNT>
    MOEPACK_DEVICE void store(const Turn& turn, const float (&value)[COUNT][4], int column) {
        int tokens = grouped.routes.tokens[turn.tile], rows = grouped.rows;
        int row = (turn.row_tile * BLOCKS + warp % BLOCKS) * BLOCK_ROWS + lane / 4 * 2;
        bool together = rows % 2 == 0;
#pragma unroll
        for (int i = 0; i < 2 * COUNT; ++i) {
            int token = column + i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (token >= tokens || row >= rows) continue;
            float* to = grouped.out + (i64(turn.tile) * 8 * N + token) * rows + row;
            float low = value[i / 2][i % 2], high = value[i / 2][2 + i % 2];
            if (together) *reinterpret_cast<float2*>(to) = {low, high};
            else to[0] = low;
            if (!together && row + 1 < rows) to[1] = high;
        }
    }

    MOEPACK_DEVICE void finish(const Turn& turn) {
        scale_outputs(turn);
        if constexpr (GATED) {
            bool up = warp >= BLOCKS;
            float value[N / 2][4];
            gating.exchange(up, lane, out, value);
            store(turn, value, up * 4 * N);
        } else {
            store(turn, out, 0);
        }
        clear();
    }

    MOEPACK_DEVICE void run(Turn turn) {
        if (!turn.exists()) return;
        clear();
        wait_for_phase(ring.full, 0);
        enter(turn);
        int chunk = 0;
        do {
            const u8* stage = ring.at();
            cells = stage + ring.CODES;
            Shared empty = ring.empty + 8 * ring.stage;
            bool ends = ++chunk == grouped.chunks, last = ends && turn.at + int(gridDim.x) >= turn.last;
            // After the last item, its codes are decoded again, because a branch would make products wait.
            if (!last) ring.advance();
            this->multiply(stage);
            __syncwarp();
            if (lane == 0) arrive(empty);
            if (!ends) continue;
            finish(turn), turn.advance(), chunk = 0;
            if (!Base::GROUPS && turn.exists()) enter(turn);
        } while (turn.exists());
    }
};

template <class Format, int N, bool GATED>
MOEPACK_DEVICE void multiply_grouped(const Grouped& grouped, const typename Format::Matrix& first,
                                     const typename Format::Matrix& second) {
    constexpr int BLOCKS = GATED ? TILE_BLOCKS / 2 : TILE_BLOCKS, RESERVED = GATED ? BLOCKS * Gating<N>::BYTES : 0;
    static_assert(RESERVED + 2 * Ring<Format, N>::STAGE <= LEAST_SHARED, "warps decode the next item ahead");
    __shared__ u64 barriers[2 * MOST_STAGES];
    Ring<Format, N> ring(barriers, RESERVED);
    ring.clear(first.block_bytes);
    __syncthreads();
    enter_launch();
    Turn turn(grouped);
    int warp = __shfl_sync(~0u, threadIdx.x / WARP, 0);
    typename Format::Matrix matrix = first;
    if (warp >= TILE_BLOCKS) {
        if (Multiplier<Format, N>::TAKES) leave_registers<COPYING_REGISTERS>();
        if (warp >= TILE_BLOCKS + BLOCKS / 4) matrix.data = second.data;
        GroupedProducer<Format, N, BLOCKS>(grouped, ring, matrix).run(turn);
    } else {
        if (Multiplier<Format, N>::TAKES) take_registers<MULTIPLYING_REGISTERS>();
        if (warp >= BLOCKS) matrix.data = second.data;
        GroupedConsumer<Format, N, BLOCKS>(grouped, ring, matrix).run(turn);
    }
}
#elif defined(__CUDACC__)
template <class Format, int N, bool GATED>
MOEPACK_DEVICE void multiply_grouped(const Grouped&, const typename Format::Matrix&, const typename Format::Matrix&) {}
#endif

}  // namespace moepack

#if defined(__CUDACC__)
#define MOEPACK_GROUPED(FORMAT, COLUMNS)                                                                     \
    extern "C" __global__ void __launch_bounds__(moepack::LINEAR_THREADS, 1)                                 \
        gated_##COLUMNS(moepack::Grouped grouped, FORMAT::Matrix gate, FORMAT::Matrix up) {                  \
        moepack::multiply_grouped<FORMAT, COLUMNS / 8, true>(grouped, gate, up);                             \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(moepack::LINEAR_THREADS, 1)                                 \
        project_##COLUMNS(moepack::Grouped grouped, FORMAT::Matrix matrix) {                                 \
        moepack::multiply_grouped<FORMAT, COLUMNS / 8, false>(grouped, matrix, matrix);                      \
    }

// The launches of a Format: `route` with one block; `lay_out` with a block for four places; the products, with any
// number of blocks; `add`, with a grid of shares of a row by tokens.
#define MOEPACK_GROUPED_KERNELS(FORMAT)                                                                      \
    extern "C" __global__ void __launch_bounds__(moepack::ROUTE_THREADS)                                     \
        route(moepack::Routes routes, const moepack::i64* index, int slots, int experts, int columns) {      \
        moepack::enter_launch();                                                                             \
        moepack::route_slots(routes, index, slots, experts, columns);                                        \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(moepack::LAYOUT_THREADS) lay_out(moepack::Layout layout) {  \
        moepack::enter_launch();                                                                             \
        moepack::lay_out_places<FORMAT>(layout);                                                             \
    }                                                                                                        \
    MOEPACK_GROUPED(FORMAT, 16)                                                                              \
    MOEPACK_GROUPED(FORMAT, 32)                                                                              \
    MOEPACK_GROUPED(FORMAT, 64)                                                                              \
    extern "C" __global__ void __launch_bounds__(256) add(const int* place, const float* weights,            \
                                                          const float* from, float* out, int top_k, int rows) { \
        moepack::enter_launch();                                                                             \
        moepack::add_slots(place, weights, from, out, top_k, rows);                                          \
    }
#endif
