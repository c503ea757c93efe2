// Linear layers with up to 64 tokens on warpgroups (sm_90a): the code shared by all formats that support them.
//
// Launches: `prepare` lays out activations as operand B, once for all blocks, unless they are few and each block lays
// them out itself. `linear_8` to `linear_64`, by columns of a product, multiply. `add` adds the sums of a row that
// several blocks have computed.
//
// Cells: the tokens of a chunk of 128 columns in the layout of `Described`: for each product, 16 bytes per token with
// the first pair of columns of four quads, then the second pair. For formats with offsets, the f32 sums of each group
// follow. All values are scaled by the power of two that brings the largest value of a row, or of a block's part of it,
// to [2^14, 2^15). This preserves bfloat16 and f16 exactly, except values 2^29 times smaller than the largest; f32
// keeps 11 bits.
//
// Work: an *item* is a chunk of a tile of 256 rows. Every block multiplies a contiguous share of all items; shares
// differ by at most one. The sums of a tile are added over all blocks that have items of it, in order. Four warps fill
// a ring of items by bulk copies; each of sixteen others multiplies a block of 16 rows.
//
// A Format has
// - Matrix, with `data`, the first row block, and `block_bytes`;
// - STAGE, the most bytes of a chunk of a row block; Pieces(matrix, chunk), their locations; and clears(block_bytes),
//   whether bytes of a stage that are not copied must be zero;
// - quad(product, lane), the quad of a chunk that a lane of four has in a product; and SECOND, the column of a quad
// that
//   forms a pair with its first: 1 or 2;
// - COLUMNS per step, decoded at once, in PARTS of QUADS products each; FETCHES, whether its codes are loaded a step
//   ahead;
// - WIDTH, columns of a chunk that share a scale, or 0 if whole rows do; SUMS, groups of a chunk that have an offset; -
// Operands, a lane's state for decoding operands A: ask(matrix, block) loads what a row block needs in addition to its
//   stages, enter() is called when the warp reaches it, decode(stage, step, quads), or fetch(stage, step) and
//   decode(quads); for groups scales(stage, group) and offsets(stage, group), for whole rows row_scales(). Rows 2 g and
//   2 g + 1 of a block are rows g and g + 8 of operand A.
#pragma once
#include "common/barriers.cuh"
#include "common/layer.cuh"
#include "common/warpgroups.cuh"

namespace moepack {

constexpr int TILE_BLOCKS = 16, TILE_ROWS = TILE_BLOCKS * BLOCK_ROWS;  // one warp per row block
constexpr int LINEAR_THREADS = (TILE_BLOCKS + 4) * WARP;  // four warps copy
constexpr int MOST_STAGES = 16;
// Registers per thread at the start, and afterwards in copying and multiplying warps for many tokens; the total does
// not grow.
constexpr int REGISTERS = 96, COPYING_REGISTERS = 24, MULTIPLYING_REGISTERS = 112;
static_assert(4 * COPYING_REGISTERS + TILE_BLOCKS * MULTIPLYING_REGISTERS <= (TILE_BLOCKS + 4) * REGISTERS);

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

    // Bytes of the cells of a chunk.
    MOEPACK_BOTH static constexpr int cell_bytes(int columns) {
        return columns * (VALUE_BYTES + 4 * Format::SUMS);
    }

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

// The values of a token that a product reads: sixteen columns of a chunk.
template <Type TYPE, class Format>
struct Columns {
    Stored<TYPE> quad[4];

    MOEPACK_DEVICE void load(const Linear<Format>& linear, int token, int chunk, int product) {
#pragma unroll
        for (int i = 0; i < 4; ++i) quad[i].load(linear.x, token, chunk * CHUNK + Format::quad(product, i) * 4);
    }

    MOEPACK_DEVICE float largest() const {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(quad[i / 4].value(i % 4)));
        return largest;
    }

    // Writes them to the cells of the chunk. Called by the lanes of its eight products, which are DISTANCE apart.
    template <int DISTANCE>
    MOEPACK_DEVICE void write(const Linear<Format>& linear, int token, int product, float factor, bool exists,
                              u8* cells) const {
        u32 first[4], second[4];
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            constexpr int SECOND = Format::SECOND, THIRD = 3 - SECOND;
            Pair pair = {to_half2(quad[i].value(0) * factor, quad[i].value(SECOND) * factor),
                         to_half2(quad[i].value(THIRD) * factor, quad[i].value(3) * factor)};
            first[i] = pair.x, second[i] = pair.y, sum += sum_of(pair);
        }
        Quad* to = reinterpret_cast<Quad*>(cells) + product * 2 * linear.columns + token;
        if (exists) to[0] = {first[0], first[1], first[2], first[3]};
        if (exists) to[linear.columns] = {second[0], second[1], second[2], second[3]};
        if constexpr (Format::SUMS > 0) {
            constexpr int PRODUCTS = 8 / most(Format::SUMS, 1);
#pragma unroll
            for (int i = PRODUCTS / 2; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i * DISTANCE);
            float* sums = reinterpret_cast<float*>(cells + linear.columns * VALUE_BYTES);
            if (exists && product % PRODUCTS == 0) sums[product / PRODUCTS * linear.columns + token] = sum;
        }
    }
};

// Writes the cells of a token: a thread writes every `step`-th product from `begin` on.
template <Type TYPE, class Format>
MOEPACK_DEVICE void write_cells(const Linear<Format>& linear, int token, float factor, int begin, int step) {
    int products = linear.chunks * 8;
    for (int item = begin; item - item % WARP < products; item += step) {
        int chunk = least(item, products - 1) / 8;
        u8* cells = linear.cells + i64(chunk) * Linear<Format>::cell_bytes(linear.columns);
        Columns<TYPE, Format> columns;
        columns.load(linear, token, chunk, item % 8);
        columns.template write<1>(linear, token, item % 8, factor, item < products, cells);
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

// The largest value of eight lanes that are four apart.
MOEPACK_DEVICE float largest_of_products(float value) {
#pragma unroll
    for (int distance = 4; distance < WARP; distance *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    return value;
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
        columns[i].load(linear, existing, chunk < linear.chunks ? chunk : chunk - linear.chunks, product);
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
        u8* cells = chunks.cells + at * Linear<Format>::cell_bytes(linear.columns);
        columns[i].template write<4>(linear, token, product, scale.factor, exists && at < chunks.count, cells);
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
// A ring of items in shared memory: the codes of sixteen row blocks and the cells of a chunk.
template <class Format, int N>
struct Ring {
    static constexpr int CODES = TILE_BLOCKS * Format::STAGE, CELLS = Linear<Format>::cell_bytes(8 * N);
    static constexpr int STAGE = ceil_div(CODES + CELLS, 128) * 128;
    Shared full, empty;  // barriers of the stages
    int depth;
    int stage = 0, parity = 0;

    MOEPACK_DEVICE Ring(u64* barriers, int own)
        : full(shared_address(barriers)), empty(full + 8 * MOST_STAGES),
          depth(least((int(shared_size()) - own * CELLS) / STAGE, MOST_STAGES)) {
        if (threadIdx.x == 0)
            for (int i = 0; i < depth; ++i) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, TILE_BLOCKS);
        if (threadIdx.x == 0) publish_barriers();
    }

    // Zeroes a ring if some stages are not copied completely.
    MOEPACK_DEVICE void clear(i64 block_bytes) {
        int bytes = Format::clears(block_bytes) ? depth * STAGE : 0;
        for (int i = threadIdx.x * 16; i < bytes; i += LINEAR_THREADS * 16)
            *reinterpret_cast<Quad*>(shared_memory + i) = {0, 0, 0, 0};
        publish_operands();
    }

    MOEPACK_DEVICE u8* at() const {
        return shared_memory + stage * STAGE;
    }

    // The cells that a block lays out itself.
    MOEPACK_DEVICE u8* own_cells() const {
        return shared_memory + depth * STAGE;
    }

    MOEPACK_DEVICE void advance() {
        if (++stage == depth) stage = 0, parity ^= 1;
    }
};

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

// Multiplies a row block of each item, step by step. The products of a step run while the previous one is scaled and
// the next one decoded. With 64 tokens and groups, sums leave no registers for this, and other warps run in the
// meantime.
template <class Format, int N>
struct Consumer {
    static constexpr int COLUMNS = Format::COLUMNS, STEPS = CHUNK / COLUMNS, PRODUCTS = COLUMNS / 16;
    static constexpr int QUADS = Format::QUADS, PARTS = Format::PARTS;
    static constexpr bool GROUPS = Format::WIDTH != 0, AHEAD = N < 8 || !GROUPS;
    // Whether these warps take over registers: sums of few tokens with groups do not need them, and need not wait.
    static constexpr bool TAKES = N >= 4 || !GROUPS;
    static constexpr int WIDTH = GROUPS ? Format::WIDTH : CHUNK;
    static_assert(PARTS * QUADS == PRODUCTS);

    const Linear<Format>& linear;
    Ring<Format, N> ring;
    int warp, lane;
    typename Format::Operands operands;
    const float* scales;  // per token
    const u8* cells;      // cells of the item
    float sum[AHEAD ? 2 : 1][N][4], out[N][4];
    u32 quads[2][PARTS][2][QUADS][2];

    MOEPACK_DEVICE Consumer(const Linear<Format>& linear, const Ring<Format, N>& ring, const float* scales)
        : linear(linear), ring(ring), scales(scales), warp(__shfl_sync(~0u, threadIdx.x / WARP, 0)),
          lane(threadIdx.x % WARP), operands(warp, lane) {}

    MOEPACK_DEVICE void decode(const u8* stage, int step) {
        if constexpr (Format::FETCHES) {
            if (step == 0) operands.fetch(stage, 0);
            operands.decode(quads[step % 2]);
            if (step + 1 < STEPS) operands.fetch(stage, step + 1);
        } else {
            operands.decode(stage, step, quads[step % 2]);
        }
    }

    // The accumulator for the products of a step: whole rows need no separate sums.
    MOEPACK_DEVICE float (&sums_of(int step))[N][4] {
        return GROUPS ? sum[AHEAD ? step % 2 : 0] : out;
    }

    // out += the sums of products up to a column times their group's scale, and, if the group ends there, the sums of
    // activations times its offset.
    MOEPACK_DEVICE void scale(const u8* stage, int column, const float (&sum)[N][4]) {
        if constexpr (GROUPS) {
            int group = (column - 1) / WIDTH;
            float2 scales = operands.scales(stage, group);
#pragma unroll
            for (int i = 0; i < 4 * N; ++i) out[i / 4][i % 4] += (i % 4 < 2 ? scales.x : scales.y) * sum[i / 4][i % 4];
            if (Format::SUMS == 0 || column % WIDTH != 0) return;
            float2 offsets = operands.offsets(stage, group);
            const u8* sums = cells + 8 * N * (VALUE_BYTES + 4 * group) + lane % 4 * 8;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float2 x = *reinterpret_cast<const float2*>(sums + 32 * i);
                out[i][0] += offsets.x * x.x, out[i][1] += offsets.x * x.y;
                out[i][2] += offsets.y * x.x, out[i][3] += offsets.y * x.y;
            }
        }
    }

    // Starts the products of a step, and completes those of groups that end inside it.
    MOEPACK_DEVICE void begin(const u8* stage, int step) {
        Described b(cells, 8 * N);
        float(&c)[N][4] = sums_of(step);
        u32(&a)[PARTS][2][QUADS][2] = quads[step % 2];
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) {
            int column = step * COLUMNS + j * 16;
            bool begins = j == 0 || column % WIDTH == 0;
            if (begins && j > 0) wait_products(c), scale(stage, column, c);
            if (begins) begin_products(reinterpret_cast<u32(&)[4 * PRODUCTS]>(a), c);
            const u32(&part)[2][QUADS][2] = a[j / QUADS];
            multiply_add(c, part[0][j % QUADS][0], part[1][j % QUADS][0], part[0][j % QUADS][1], part[1][j % QUADS][1],
                         b.after(column * 8 * N * 2), !(GROUPS && begins));
        }
        end_products();
    }

    // Multiplies an item from a step on, and decodes the first step of the ring's next item. No product may run across
    // items, because the compiler would then make all of them wait.
    template <int STEP = 0>
    MOEPACK_DEVICE void multiply(const u8* stage) {
        constexpr bool LAST = STEP + 1 == STEPS;
        begin(stage, STEP);
        if constexpr (AHEAD && STEP > 0) {
            float(&done)[N][4] = sums_of(STEP + 1);
            wait_products_before(done), scale(stage, STEP * COLUMNS, done);
        }
        if (LAST) wait_for_phase(ring.full + 8 * ring.stage, ring.parity);
        decode(LAST ? ring.at() : stage, (STEP + 1) % STEPS);
        if constexpr (LAST || !AHEAD) {
            float(&done)[N][4] = sums_of(STEP);
            wait_products(done), scale(stage, (STEP + 1) * COLUMNS, done);
        }
        if constexpr (!LAST) multiply<STEP + 1>(stage);
    }

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

    MOEPACK_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < 4 * N; ++i) out[i / 4][i % 4] = 0;
    }

    // Writes the sums of a tile, or this block's part of them.
    MOEPACK_DEVICE void store(int tile) {
        Segments segments(linear, tile);
        i64 size = i64(linear.tokens) * linear.rows;
        float* to = segments.count == 1 ? linear.out : linear.parts + (blockIdx.x - segments.first) * size;
        int row = tile * TILE_ROWS + warp * BLOCK_ROWS + lane / 4 * 2;
        bool together = linear.rows % 2 == 0;
        float2 of_rows = {1, 1};
        if constexpr (!GROUPS) of_rows = operands.row_scales();
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
            cells = N <= 2 && linear.own ? ring.own_cells() + own * ring.CELLS : stage + ring.CODES;
            if (++own == linear.chunks) own = 0;
            Shared empty = ring.empty + 8 * ring.stage;
            // After the last item, its codes are decoded again, because a branch would make products wait.
            if (item + 1 < last) ring.advance();
            multiply(stage);
            __syncwarp();
            if (lane == 0) arrive(empty);
            if (++chunk < linear.chunks && item + 1 < last) continue;
            store(tile), clear(), ++tile, chunk = 0;
            if (!GROUPS && item + 1 < last) enter(tile);
        }
    }
};

template <class Format, int N>
MOEPACK_DEVICE void multiply_linear(const Linear<Format>& linear) {
    __shared__ u64 barriers[2 * MOST_STAGES];
    __shared__ float scales[TILE_BLOCKS];
    Ring<Format, N> ring(barriers, linear.own);
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
            make_own_cells(linear, {ring.own_cells(), first % linear.chunks, least(last - first, linear.own)}, scales);
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
