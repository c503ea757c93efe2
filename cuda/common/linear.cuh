// Linear layers with up to 64 tokens on warpgroups (sm_90a): the code shared by all formats that support them.
//
// Launches: `prepare` lays out activations as operand B, once for all blocks, unless they are few and each block lays
// them out itself. `linear_8` to `linear_64`, by columns of a product, multiply. `add` adds the sums of a row that
// several blocks have computed.
//
// Work: every block multiplies a contiguous share of all items (common/tiles.cuh); shares differ by at most one. The
// sums of a tile are added over all blocks that have items of it, in order.
#pragma once
#include "common/tiles.cuh"

namespace moepack {

// The arguments of the launches.
template <class Format>
struct Linear {
    Activations x;
    typename Format::Matrix matrix;
    u8* cells;           // [chunks] of `cell_bytes`
    float* scales;       // [tokens], inverses of the powers of two
    const float* units;  // [tokens], units of the activations; null: 1
    float* out;          // [tokens, rows]
    float* parts;        // [most segments per tile, tokens, rows]
    int tokens, columns;  // columns of a product: 8, 16, 32 or 64
    int rows, chunks;
    int blocks, items;  // of the launch
    int ahead;          // items whose codes are requested before activations are available
    int own;            // chunks whose cells a block lays out itself, for at most 16 tokens; 0 if `prepare` does

    // The factor of a token's values, applied at the end.
    MOEPACK_BOTH float unit(int token) const {
        return units ? units[token] : 1.0f;
    }

    // The first item of a block, and the block that has an item.
    MOEPACK_BOTH int first_item(int block) const {
        return items * block / blocks;
    }

    MOEPACK_BOTH int block_of(int item) const {
        return ((item + 1) * blocks - 1) / items;
    }
};

// The blocks that have items of a tile.
struct Segments {
    int first, count;

    template <class Format>
    MOEPACK_BOTH Segments(const Linear<Format>& linear, int tile)
        : first(linear.block_of(tile * linear.chunks)),
          count(linear.block_of((tile + 1) * linear.chunks - 1) - first + 1) {}
};

#if defined(__CUDACC__)
// The largest absolute value of a row, returned to all threads of a block.
MOEPACK_DEVICE float largest_of_row(const Activations& x, int row) {
    __shared__ u32 largest_of[WARP];
    float largest = 0;
    for_each_eight(x, row, [&](int, const float(&value)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(value[i]));
    });
    u32 bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (threadIdx.x % WARP == 0) largest_of[threadIdx.x / WARP] = bits;
    __syncthreads();
    bits = threadIdx.x % WARP < blockDim.x / WARP ? largest_of[threadIdx.x % WARP] : 0;
    return __uint_as_float(__reduce_max_sync(~0u, bits));
}

// Writes the cells of a token: a thread writes every `step`-th product from `begin` on.
template <Type TYPE, class Format>
MOEPACK_DEVICE void write_cells(const Linear<Format>& linear, int token, float factor, int begin, int step) {
    int products = linear.chunks * 8;
    for (int item = begin; item - item % WARP < products; item += step) {
        int chunk = least(item, products - 1) / 8;
        u8* cells = linear.cells + i64(chunk) * cell_bytes<Format>(linear.columns);
        Columns<TYPE, Format> columns;
        columns.load(linear.x, token, chunk, item % 8);
        columns.template write<1>(cells, linear.columns, token, item % 8, factor, item < products);
    }
}

template <class Format>
MOEPACK_DEVICE void prepare_token(const Linear<Format>& linear, int token) {
    Scale scale = scale_of(largest_of_row(linear.x, token));
    if (blockIdx.x == 0 && threadIdx.x == 0) linear.scales[token] = scale.inverse * linear.unit(token);
    int begin = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    if (linear.x.type == Type::f32) write_cells<Type::f32>(linear, token, scale.factor, begin, step);
    else if (linear.x.type == Type::f16) write_cells<Type::f16>(linear, token, scale.factor, begin, step);
    else write_cells<Type::bf16>(linear, token, scale.factor, begin, step);
}

// Chunks with contiguous cells: `count` from `first` on, wrapping around at the end of a row.
struct Chunks {
    u8* cells;
    int first, count;
};

// Lays out the cells of some chunks, at most 64 KB, with the sixteen multiplying warps: a warp processes four of at
// most sixteen tokens at once, so neighboring lanes write to different banks. Values stay in registers after loading;
// the scales are the inverses of the powers of two. Calls __syncthreads once.
template <Type TYPE, class Format>
MOEPACK_DEVICE void make_own_cells(const Linear<Format>& linear, const Chunks& chunks, float* scales) {
    constexpr int BATCH = 4;
    __shared__ float largest_of[TILE_BLOCKS][4];
    int shift = linear.tokens <= 4 ? 0 : linear.columns == 8 ? 1 : 2, groups = 1 << shift;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, product = lane / 4;
    int token = warp % groups * 4 + lane % 4, existing = least(token, linear.tokens - 1);
    int first = warp >> shift, step = TILE_BLOCKS >> shift;
    Columns<TYPE, Format> columns[BATCH];
    float largest = 0;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        if (i * step >= chunks.count) break;
        int chunk = chunks.first + least(first + i * step, chunks.count - 1);
        columns[i].load(linear.x, existing, chunk < linear.chunks ? chunk : chunk - linear.chunks, product);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
        if (i * step < chunks.count) largest = fmaxf(largest, columns[i].largest());
    largest = largest_of_products(largest);
    if (product == 0) largest_of[warp][lane] = largest;
    __syncthreads();
    for (int i = warp % groups + product * groups; i < TILE_BLOCKS; i += 8 * groups)
        largest = fmaxf(largest, largest_of[i][lane % 4]);
    Scale scale = scale_of(largest_of_products(largest));
    bool exists = token == existing;
    if (first == 0 && product == 0 && exists) scales[token] = scale.inverse * linear.unit(token);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        if (i * step >= chunks.count) break;
        int at = first + i * step;
        u8* cells = chunks.cells + at * cell_bytes<Format>(linear.columns);
        columns[i].template write<4>(cells, linear.columns, token, product, scale.factor, exists && at < chunks.count);
    }
}

template <class Format>
MOEPACK_DEVICE void make_own_cells(const Linear<Format>& linear, const Chunks& chunks, float* scales) {
    if (linear.x.type == Type::f32) make_own_cells<Type::f32>(linear, chunks, scales);
    else if (linear.x.type == Type::f16) make_own_cells<Type::f16>(linear, chunks, scales);
    else make_own_cells<Type::bf16>(linear, chunks, scales);
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Fills the ring with four warps: lanes 0 to 3 copy the codes of one row block each, lane 4 of the first warp the
// cells.
template <class Format, int N>
struct Producer {
    static constexpr int LANES = TILE_BLOCKS / 4;
    const Linear<Format>& linear;
    Ring<Format, N> ring;
    int tile, chunk, row_block, lane;
    const u8* codes;  // of this lane's row block in the tile
    u64 policy;

    MOEPACK_DEVICE Producer(const Linear<Format>& linear, const Ring<Format, N>& ring, int item)
        : linear(linear), ring(ring), tile(item / linear.chunks), chunk(item - tile * linear.chunks),
          row_block((threadIdx.x / WARP - TILE_BLOCKS) * LANES + threadIdx.x % LANES), lane(threadIdx.x % WARP),
          policy(read_once()) {
        begin_tile();
    }

    MOEPACK_DEVICE void begin_tile() {
        i64 block = least(tile * TILE_BLOCKS + row_block, ceil_div(linear.rows, BLOCK_ROWS) - 1);
        codes = linear.matrix.data + block * linear.matrix.block_bytes;
    }

    MOEPACK_DEVICE void advance() {
        ring.advance();
        if (++chunk == linear.chunks) chunk = 0, ++tile, begin_tile();
    }

    MOEPACK_DEVICE void copy_codes() {
        if (lane >= LANES) return;
        typename Format::Pieces pieces(linear.matrix, chunk);
        Shared barrier = ring.full + 8 * ring.stage;
        int cells = linear.own ? 0 : Ring<Format, N>::CELLS;
        if (row_block == 0) arrive_expecting(barrier, TILE_BLOCKS * (pieces.first + pieces.second) + cells);
        Shared to = shared_address(ring.at() + row_block * Format::STAGE);
        copy_bulk(to, codes + pieces.first_at, pieces.first, barrier, policy);
        if (pieces.second) copy_bulk(to + pieces.first, codes + pieces.second_at, pieces.second, barrier, policy);
    }

    MOEPACK_DEVICE void copy_cells() {
        if (linear.own || threadIdx.x != TILE_BLOCKS * WARP + LANES) return;
        constexpr int CODES = Ring<Format, N>::CODES, CELLS = Ring<Format, N>::CELLS;
        const u8* from = linear.cells + i64(chunk) * CELLS;
        copy_bulk(shared_address(ring.at() + CODES), from, CELLS, ring.full + 8 * ring.stage, KEEP);
    }

    // Copies `count` items.
    MOEPACK_DEVICE void run(int count) {
        int ahead = least(least(linear.ahead, ring.depth), count);
        Producer late = *this;
        for (int i = 0; i < ahead; ++i) copy_codes(), advance();
        wait_for_launch_before();
        // Wait until the other warps have loaded and laid out activations, so that they do not queue behind codes.
        if (linear.own) __syncthreads(), __syncthreads();
        for (int i = 0; i < ahead; ++i) late.copy_cells(), late.advance();
        for (int i = ahead; i < count; ++i) {
            // An unused stage is empty: the phase before the first has parity 1.
            wait_for_phase(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            copy_codes(), copy_cells();
            advance();
        }
    }
};

// Multiplies a row block of each item.
template <class Format, int N>
struct Consumer : Multiplier<Format, N> {
    using Base = Multiplier<Format, N>;
    using Base::cells, Base::clear, Base::decode, Base::lane, Base::operands, Base::out, Base::ring, Base::warp;
    const Linear<Format>& linear;
    const float* scales;  // per token

    MOEPACK_DEVICE Consumer(const Linear<Format>& linear, const Ring<Format, N>& ring, const float* scales)
        : Base(ring), linear(linear), scales(scales) {}

    // Requests the data that a tile's row block needs.
    MOEPACK_DEVICE void ask(int tile) {
        i64 block = tile * TILE_BLOCKS + warp;
        operands.ask(linear.matrix, least(block, i64(ceil_div(linear.rows, BLOCK_ROWS) - 1)));
    }

    // Switches to a requested tile, and requests the next one.
    MOEPACK_DEVICE void enter(int tile) {
        operands.enter();
        ask(tile + 1);
        decode(ring.at(), 0);
    }

    // Writes the sums of a tile, or this block's part of them.
    MOEPACK_DEVICE void store(int tile) {
        Segments segments(linear, tile);
        i64 size = i64(linear.tokens) * linear.rows;
        float* to = segments.count == 1 ? linear.out : linear.parts + (blockIdx.x - segments.first) * size;
        int row = tile * TILE_ROWS + warp * BLOCK_ROWS + lane / 4 * 2;
        bool together = linear.rows % 2 == 0;
        float2 of_rows = {1, 1};
        if constexpr (!Base::GROUPS) of_rows = operands.row_scales();
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (token >= linear.tokens || row >= linear.rows) continue;
            float scale = scales[token];
            float low = out[i / 2][i % 2] * (scale * of_rows.x), high = out[i / 2][2 + i % 2] * (scale * of_rows.y);
            float* at = to + i64(token) * linear.rows + row;
            if (together) *reinterpret_cast<float2*>(at) = {low, high};
            else at[0] = low;
            if (!together && row + 1 < linear.rows) at[1] = high;
        }
    }

    MOEPACK_DEVICE void run(int item, int last) {
        int tile = item / linear.chunks, chunk = item - tile * linear.chunks, own = 0;
        clear();
        wait_for_phase(ring.full, 0);
        enter(tile);
        for (; item < last; ++item) {
            const u8* stage = ring.at();
            cells = N <= 2 && linear.own ? ring.after() + own * ring.CELLS : stage + ring.CODES;
            if (++own == linear.chunks) own = 0;
            Shared empty = ring.empty + 8 * ring.stage;
            // After the last item, its codes are decoded again, because a branch would make products wait.
            if (item + 1 < last) ring.advance();
            this->multiply(stage);
            __syncwarp();
            if (lane == 0) arrive(empty);
            if (++chunk < linear.chunks && item + 1 < last) continue;
            store(tile), clear(), ++tile, chunk = 0;
            if (!Base::GROUPS && item + 1 < last) enter(tile);
        }
    }
};

template <class Format, int N>
MOEPACK_DEVICE void multiply_linear(const Linear<Format>& linear) {
    __shared__ u64 barriers[2 * MOST_STAGES];
    __shared__ float scales[TILE_BLOCKS];
    Ring<Format, N> ring(barriers, linear.own * Ring<Format, N>::CELLS);
    ring.clear(linear.matrix.block_bytes);
    __syncthreads();
    int first = linear.first_item(blockIdx.x), last = linear.first_item(blockIdx.x + 1);
    if (threadIdx.x >= TILE_BLOCKS * WARP) {
        if (Consumer<Format, N>::TAKES) leave_registers<COPYING_REGISTERS>();
        Producer<Format, N>(linear, ring, first).run(last - first);
    } else {
        if (Consumer<Format, N>::TAKES) take_registers<MULTIPLYING_REGISTERS>();
        Consumer<Format, N> consumer(linear, ring, N <= 2 && linear.own ? scales : linear.scales);
        consumer.ask(first / linear.chunks);
        enter_launch();
        if (N <= 2 && linear.own) {
            make_own_cells(linear, {ring.after(), first % linear.chunks, least(last - first, linear.own)}, scales);
            publish_operands();
            __syncthreads();
        }
        consumer.run(first, last);
    }
}
#elif defined(__CUDACC__)
template <class Format, int N>
MOEPACK_DEVICE void multiply_linear(const Linear<Format>&) {}
#endif

#if defined(__CUDACC__)
// Adds the parts of a tile that several blocks have computed; one thread per row.
template <class Format>
MOEPACK_DEVICE void add_segments(const Linear<Format>& linear, int tile, int token) {
    enter_launch();
    Segments segments(linear, tile);
    int row = tile * TILE_ROWS + threadIdx.x;
    if (segments.count == 1 || row >= linear.rows) return;
    i64 at = i64(token) * linear.rows + row, size = i64(linear.tokens) * linear.rows;
    float sum = linear.parts[at];
#pragma unroll 4
    for (int i = 1; i < segments.count; ++i) sum += linear.parts[i * size + at];
    linear.out[at] = sum;
}
#endif

}  // namespace moepack

#if defined(__CUDACC__)
#define MOEPACK_LINEAR(FORMAT, COLUMNS)                                                    \
    extern "C" __global__ void __launch_bounds__(moepack::LINEAR_THREADS, 1)               \
        linear_##COLUMNS(moepack::Linear<FORMAT> linear) {                                 \
        moepack::multiply_linear<FORMAT, COLUMNS / 8>(linear);                             \
    }

// The launches of a Format: `prepare`, with a grid of shares of a row by tokens; the products; `add`, with a grid of
// tiles by tokens.
#define MOEPACK_LINEAR_KERNELS(FORMAT)                                                     \
    extern "C" __global__ void __launch_bounds__(512) prepare(moepack::Linear<FORMAT> linear) { \
        moepack::enter_launch();                                                           \
        moepack::prepare_token(linear, blockIdx.y);                                        \
    }                                                                                      \
    MOEPACK_LINEAR(FORMAT, 8)                                                              \
    MOEPACK_LINEAR(FORMAT, 16)                                                             \
    MOEPACK_LINEAR(FORMAT, 32)                                                             \
    MOEPACK_LINEAR(FORMAT, 64)                                                             \
    extern "C" __global__ void __launch_bounds__(moepack::TILE_ROWS) add(moepack::Linear<FORMAT> linear) { \
        moepack::add_segments(linear, blockIdx.x, blockIdx.y);                             \
    }
#endif
