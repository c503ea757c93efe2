// Linear layers of group-wise integers (groupwise.cuh) of up to 64 tokens for warpgroups (sm_90a).
//
// Launches: `prepare` lays activations out as operand B, once for all blocks, but a few that each block lays out for
// itself; `linear_8` to `linear_64`, by the columns of their products, multiply; `add` adds what several blocks have
// summed of a row.
//
// Cells: the tokens of a chunk of 128 columns as `Described` wants them, 16 bytes a token of columns 0 and 2 of four
// quads, then of columns 1 and 3, product by product; then, for formats with offsets, the sums of each group, f32. The
// power of two that brings the largest value of a row, or of what a block multiplies of it, to [2^14, 2^15) scales all
// of them: bfloat16 and f16 survive exactly, but for values 2^29 times smaller than the largest; f32 keeps 11 bits.
//
// Work: an *item* is a chunk of a tile of 256 rows. Every block multiplies a contiguous share of all items, so that all
// have as many, one more or less; a tile's sums are those of all blocks that have items of it, in their order. Four
// warps keep a ring of items full by bulk copies; each of sixteen others multiplies a block of 16 rows.
//
// Bounds, by machine code: a chunk of 3 bits in groups of 64 takes 176 instructions of a warp with up to 8 tokens, 183
// with 16, 205 with 32 and 240 with 64, of which 88 decode. On an H100 the warps of a scheduler have 54 chunks of
// 4096 x 14336, and the tensor cores take 8 us for 64 tokens. One token takes 15 us, 1.5 of them in `add`; 64 take 30,
// each launch by itself 4 (`prepare`), 23 and 5.
#include "common/barriers.cuh"
#include "groupwise.cuh"

namespace moepack {

constexpr int TILE_BLOCKS = 16, TILE_ROWS = TILE_BLOCKS * BLOCK_ROWS;  // of row blocks; a warp each
constexpr int LINEAR_THREADS = (TILE_BLOCKS + 4) * WARP;  // four warps copy
constexpr int MOST_STAGES = 16;
// Registers of a thread at the start; of the warps that copy and multiply many tokens then: no more in all.
constexpr int REGISTERS = 96, COPYING_REGISTERS = 24, MULTIPLYING_REGISTERS = 112;
static_assert(4 * COPYING_REGISTERS + TILE_BLOCKS * MULTIPLYING_REGISTERS <= (TILE_BLOCKS + 4) * REGISTERS);

// The arguments of the launches.
struct Linear {
    Activations x;
    Groupwise::Matrix matrix;
    u8* cells;      // [chunks] of `cell_bytes`
    float* scales;  // [tokens], what undoes the powers of two
    float* out;     // [tokens, rows]
    float* parts;   // [segments of a tile at most, tokens, rows]
    int tokens, columns;  // those of a product: 8, 16, 32 or 64
    int rows, chunks;
    int blocks, items;  // of the launch
    int ahead;          // items whose codes are asked for before activations are there
    int own;            // chunks whose cells a block makes itself, at most 16 tokens; or 0: `prepare` has made them

    // Bytes of the cells of a chunk.
    MOEPACK_BOTH static constexpr int cell_bytes(int columns) {
        return columns * (VALUE_BYTES + 4 * Groupwise::SUMS);
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

    MOEPACK_BOTH Segments(const Linear& linear, int tile)
        : first(linear.block_of(tile * linear.chunks)),
          count(linear.block_of((tile + 1) * linear.chunks - 1) - first + 1) {}
};

#if defined(__CUDACC__)
// The largest absolute value of a row, for all threads of a block.
MOEPACK_DEVICE float largest_of_row(const Activations& x, int row) {
    __shared__ u32 largest_of[WARP];
    constexpr int BATCH = 4;
    float largest = 0;
    for (int first = threadIdx.x * 8; first < x.columns; first += blockDim.x * 8 * BATCH) {
        u32 word[BATCH][8];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) load_eight(x, row, first + i * blockDim.x * 8, word[i]);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            float value[8];
            to_floats(x.type, word[i], value);
#pragma unroll
            for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(value[j]));
        }
    }
    u32 bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (threadIdx.x % WARP == 0) largest_of[threadIdx.x / WARP] = bits;
    __syncthreads();
    bits = threadIdx.x % WARP < blockDim.x / WARP ? largest_of[threadIdx.x % WARP] : 0;
    return __uint_as_float(__reduce_max_sync(~0u, bits));
}

// Writes what a product reads of a token, sixteen columns, to the cells of its chunk. Eight neighbouring lanes call it
// for the products of a chunk.
template <Type TYPE>
MOEPACK_DEVICE void write_product(const Linear& linear, int token, int chunk, int product, float factor, bool exists,
                                  u8* cells) {
    Stored<TYPE> quad[4];
    u32 even[4], odd[4];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) quad[i].load(linear.x, token, chunk * CHUNK + Groupwise::quad(product, i) * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Stored<TYPE>& q = quad[i];
        Pair pair = {to_half2(q.value(0) * factor, q.value(2) * factor),
                     to_half2(q.value(1) * factor, q.value(3) * factor)};
        even[i] = pair.x, odd[i] = pair.y, sum += sum_of(pair);
    }
    Quad* to = reinterpret_cast<Quad*>(cells) + product * 2 * linear.columns + token;
    if (exists) to[0] = {even[0], even[1], even[2], even[3]};
    if (exists) to[linear.columns] = {odd[0], odd[1], odd[2], odd[3]};
    if constexpr (Groupwise::SUMS > 0) {
        constexpr int PRODUCTS = 8 / most(Groupwise::SUMS, 1);
#pragma unroll
        for (int distance = PRODUCTS / 2; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        float* sums = reinterpret_cast<float*>(cells + linear.columns * VALUE_BYTES);
        if (exists && product % PRODUCTS == 0) sums[product / PRODUCTS * linear.columns + token] = sum;
    }
}

// Chunks whose cells lie side by side: `count` from `first` on; behind a row's last its first.
struct Chunks {
    u8* cells;
    int first, count;
};

// Writes the cells of a token in some chunks: a thread every `step`-th product from `begin` on.
template <Type TYPE>
MOEPACK_DEVICE void write_cells(const Linear& linear, int token, float factor, const Chunks& chunks, int begin,
                                int step) {
    int products = chunks.count * 8;
    for (int item = begin; item - item % WARP < products; item += step) {
        int at = least(item, products - 1) / 8, chunk = (chunks.first + at) % linear.chunks;
        u8* cells = chunks.cells + i64(at) * Linear::cell_bytes(linear.columns);
        write_product<TYPE>(linear, token, chunk, item % 8, factor, item < products, cells);
    }
}

MOEPACK_DEVICE void write_cells(const Linear& linear, int token, float factor, const Chunks& chunks, int begin,
                                int step) {
    if (linear.x.type == Type::f32) write_cells<Type::f32>(linear, token, factor, chunks, begin, step);
    else if (linear.x.type == Type::f16) write_cells<Type::f16>(linear, token, factor, chunks, begin, step);
    else write_cells<Type::bf16>(linear, token, factor, chunks, begin, step);
}

MOEPACK_DEVICE void prepare_token(const Linear& linear, int token) {
    Scale scale = scale_of(largest_of_row(linear.x, token));
    if (blockIdx.x == 0 && threadIdx.x == 0) linear.scales[token] = scale.inverse;
    write_cells(linear, token, scale.factor, {linear.cells, 0, linear.chunks}, blockIdx.x * blockDim.x + threadIdx.x,
                gridDim.x * blockDim.x);
}

// The largest absolute value of a token in some chunks, for all lanes of a warp.
MOEPACK_DEVICE float largest_of_chunks(const Linear& linear, int token, const Chunks& chunks) {
    constexpr int BATCH = 4;  // of two chunks
    float largest = 0;
    for (int first = threadIdx.x % WARP / 16; first < chunks.count; first += 2 * BATCH) {
        u32 word[BATCH][8];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            int chunk = (chunks.first + least(first + 2 * i, chunks.count - 1)) % linear.chunks;
            load_eight(linear.x, token, chunk * CHUNK + threadIdx.x % 16 * 8, word[i]);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            float value[8];
            to_floats(linear.x.type, word[i], value);
#pragma unroll
            for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(value[j]));
        }
    }
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
}

// Makes the cells of some chunks by the sixteen warps that multiply: at most sixteen tokens, as many warps a token as
// there are for all. The scales undo the powers of two.
MOEPACK_DEVICE void make_own_cells(const Linear& linear, const Chunks& chunks, float* scales) {
    int shares = TILE_BLOCKS / linear.tokens, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int token = warp % linear.tokens, share = warp / linear.tokens;
    if (share >= shares) return;
    Scale scale = scale_of(largest_of_chunks(linear, token, chunks));
    if (share == 0 && lane == 0) scales[token] = scale.inverse;
    write_cells(linear, token, scale.factor, chunks, share * WARP + lane, shares * WARP);
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A ring of items in shared memory: codes of sixteen row blocks and the cells of a chunk.
template <int N>
struct Ring {
    static constexpr int CODES = TILE_BLOCKS * Groupwise::STAGE, CELLS = Linear::cell_bytes(8 * N);
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

    // Zeroes a ring of which some stages are not copied whole. What lies behind the end of rows is multiplied by
    // zeros, and its scales must be numbers.
    MOEPACK_DEVICE void clear(i64 block_bytes) {
        int bytes = Groupwise::WHOLE && block_bytes % Groupwise::STAGE ? depth * STAGE : 0;
        for (int i = threadIdx.x * 16; i < bytes; i += LINEAR_THREADS * 16)
            *reinterpret_cast<Quad*>(shared_memory + i) = {0, 0, 0, 0};
        publish_operands();
    }

    MOEPACK_DEVICE u8* at() const {
        return shared_memory + stage * STAGE;
    }

    // The cells that a block makes itself.
    MOEPACK_DEVICE u8* own_cells() const {
        return shared_memory + depth * STAGE;
    }

    MOEPACK_DEVICE void advance() {
        if (++stage == depth) stage = 0, parity ^= 1;
    }
};

// Bytes of a chunk of a row block: codes and parameters, which come as one piece or two.
struct Pieces {
    int first_at, first, second_at, second;

    MOEPACK_DEVICE Pieces(const Groupwise::Matrix& matrix, int chunk) {
        using G = Groupwise;
        int bytes = int(matrix.block_bytes);
        if (G::WHOLE) {
            first_at = chunk * G::STAGE, first = least(G::STAGE, bytes - first_at), second_at = second = 0;
        } else {
            int unit = chunk * G::UNITS, record = GROUP == 0 ? 0 : unit / most(G::RECORD_UNITS, 1);
            int in_record = unit - record * G::RECORD_UNITS;
            int group = GROUP == 0 ? 0 : in_record * G::UNIT / most(GROUP, 1);
            first_at = record * G::RECORD + group * G::GROUP_BYTES, first = G::REGISTER;
            second_at = record * G::RECORD + G::PARAMETERS + in_record * G::UNIT_BYTES;
            second = least(G::UNITS * G::UNIT_BYTES, bytes - second_at);
        }
    }
};

// Keeps the ring full, by four warps: lanes 0 to 3 copy the codes of a row block each, lane 4 of the first the cells.
template <int N>
struct Producer {
    static constexpr int LANES = TILE_BLOCKS / 4;
    const Linear& linear;
    Ring<N> ring;
    int tile, chunk, row_block, lane;
    const u8* codes;  // of this lane's row block of the tile
    u64 policy;

    MOEPACK_DEVICE Producer(const Linear& linear, const Ring<N>& ring, int item)
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
        Pieces pieces(linear.matrix, chunk);
        Shared barrier = ring.full + 8 * ring.stage;
        int cells = linear.own ? 0 : Ring<N>::CELLS;
        if (row_block == 0) arrive_expecting(barrier, TILE_BLOCKS * (pieces.first + pieces.second) + cells);
        Shared to = shared_address(ring.at() + row_block * Groupwise::STAGE);
        copy_bulk(to, codes + pieces.first_at, pieces.first, barrier, policy);
        if (pieces.second) copy_bulk(to + pieces.first, codes + pieces.second_at, pieces.second, barrier, policy);
    }

    MOEPACK_DEVICE void copy_cells() {
        if (linear.own || threadIdx.x != TILE_BLOCKS * WARP + LANES) return;
        const u8* from = linear.cells + i64(chunk) * Ring<N>::CELLS;
        copy_bulk(shared_address(ring.at() + Ring<N>::CODES), from, Ring<N>::CELLS, ring.full + 8 * ring.stage, KEEP);
    }

    // Copies so many items.
    MOEPACK_DEVICE void run(int count) {
        int ahead = least(least(linear.ahead, ring.depth), count);
        Producer late = *this;
        for (int i = 0; i < ahead; ++i) copy_codes(), advance();
        wait_for_launch_before();
        if (linear.own) __syncthreads();  // all are made: nothing waits behind codes
        for (int i = 0; i < ahead; ++i) late.copy_cells(), late.advance();
        for (int i = ahead; i < count; ++i) {
            // A stage that has not been used is empty: the phase before the first has parity 1.
            wait_for_phase(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            copy_codes(), copy_cells();
            advance();
        }
    }
};

// Multiplies a row block of each item, in steps of 32 or 64 columns. The products of a step run while the one before is
// scaled and the one behind decoded; with 64 tokens, whose sums leave no registers for it, other warps run meanwhile.
template <int N>
struct Consumer {
    using Decoder = Groupwise::Decoder;
    static constexpr int UNITS = Groupwise::WIDTH >= 64 ? 2 : 1, COLUMNS = UNITS * Groupwise::UNIT;  // of a step
    static constexpr int STEPS = CHUNK / COLUMNS, PRODUCTS = COLUMNS / 16, QUADS = Groupwise::QUADS;
    static constexpr int PARTS = PRODUCTS / QUADS;  // that the decoder makes of a step
    static constexpr bool AHEAD = N < 8;

    const Linear& linear;
    Ring<N> ring;
    int warp;
    Groupwise::Lane lane;
    u32 words[Decoder::WORDS];  // where in a unit they are
    const float* scales;        // of the tokens
    const u8* cells;            // of the item
    float sum[AHEAD ? 2 : 1][N][4], out[N][4];
    u32 quads[2][PARTS][2][QUADS][2];

    MOEPACK_DEVICE Consumer(const Linear& linear, const Ring<N>& ring, const float* scales)
        : linear(linear), ring(ring), scales(scales), warp(__shfl_sync(~0u, threadIdx.x / WARP, 0)),
          lane(threadIdx.x % WARP) {
#pragma unroll
        for (int i = 0; i < Decoder::WORDS; ++i) {
            words[i] = warp * Groupwise::STAGE + Decoder::word(lane.lane, i) * Groupwise::REGISTER + lane.lane / 4 * 8;
            hold(words[i]);
        }
    }

    // Decodes a step.
    MOEPACK_DEVICE void decode(const u8* stage, int step) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            u32 first[Decoder::WORDS], second[Decoder::WORDS];
            int unit = step * UNITS + part * Decoder::UNITS;
#pragma unroll
            for (int i = 0; i < Decoder::WORDS; ++i) {
                Pair pair = *reinterpret_cast<const Pair*>(stage + words[i] + Groupwise::unit_at(unit));
                first[i] = pair.x, second[i] = pair.y;
            }
            lane.decoder.decode(first, quads[step % 2][part][0]);
            lane.decoder.decode(second, quads[step % 2][part][1]);
        }
    }

    // out += the sums of products up to a column times their group's scale, and, where the group ends there, sums of
    // activations times its offset.
    MOEPACK_DEVICE void scale(const u8* stage, int column, const float (&sum)[N][4]) {
        int group = (column - 1) / Groupwise::WIDTH;
        const u8* at = stage + warp * Groupwise::STAGE + Groupwise::parameters_at(group) + lane.lane / 4 * 4;
        float2 scales = Groupwise::parameters(at);
#pragma unroll
        for (int i = 0; i < 4 * N; ++i) out[i / 4][i % 4] += (i % 4 < 2 ? scales.x : scales.y) * sum[i / 4][i % 4];
        if (Groupwise::SUMS == 0 || column % Groupwise::WIDTH != 0) return;
        float2 offsets = Groupwise::parameters(at + 32);
        const u8* sums = cells + 8 * N * (VALUE_BYTES + 4 * group) + lane.lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float2 x = *reinterpret_cast<const float2*>(sums + 32 * i);
            out[i][0] += offsets.x * x.x, out[i][1] += offsets.x * x.y;
            out[i][2] += offsets.y * x.x, out[i][3] += offsets.y * x.y;
        }
    }

    // Begins the products of a step; those of a group that ends inside it are done.
    MOEPACK_DEVICE void begin(const u8* stage, int step) {
        Described b(cells, 8 * N);
        float(&c)[N][4] = sum[AHEAD ? step % 2 : 0];
        u32(&operands)[4 * PRODUCTS] = reinterpret_cast<u32(&)[4 * PRODUCTS]>(quads[step % 2]);
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) {
            int column = step * COLUMNS + j * 16;
            bool begins = j == 0 || column % Groupwise::WIDTH == 0;
            if (begins && j > 0) wait_products(c), scale(stage, column, c);
            if (begins) begin_products(operands, c);
            const u32(&a)[2][QUADS][2] = quads[step % 2][j / QUADS];
            multiply_add(c, a[0][j % QUADS][0], a[1][j % QUADS][0], a[0][j % QUADS][1], a[1][j % QUADS][1],
                         b.after(column * 8 * N * 2), !begins);
        }
        end_products();
    }

    // Multiplies an item from a step on, and decodes the first step of what the ring is at. No product may run from one
    // item to the next: the compiler would make all of them wait.
    template <int STEP = 0>
    MOEPACK_DEVICE void multiply(const u8* stage) {
        constexpr bool LAST = STEP + 1 == STEPS;
        begin(stage, STEP);
        if constexpr (AHEAD && STEP > 0) {
            float(&done)[N][4] = sum[(STEP + 1) % 2];
            wait_products_before(done), scale(stage, STEP * COLUMNS, done);
        }
        if (LAST) wait_for_phase(ring.full + 8 * ring.stage, ring.parity);
        decode(LAST ? ring.at() : stage, (STEP + 1) % STEPS);
        if constexpr (LAST || !AHEAD) {
            float(&done)[N][4] = sum[AHEAD ? STEP % 2 : 0];
            wait_products(done), scale(stage, (STEP + 1) * COLUMNS, done);
        }
        if constexpr (!LAST) multiply<STEP + 1>(stage);
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
        int row = tile * TILE_ROWS + warp * BLOCK_ROWS + lane.lane / 4 * 2;
        bool together = linear.rows % 2 == 0;
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            int token = i / 2 * 8 + lane.lane % 4 * 2 + i % 2;
            if (token >= linear.tokens || row >= linear.rows) continue;
            float scale = scales[token], low = out[i / 2][i % 2] * scale, high = out[i / 2][2 + i % 2] * scale;
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
        decode(ring.at(), 0);
        for (; item < last; ++item) {
            const u8* stage = ring.at();
            cells = N <= 2 && linear.own ? ring.own_cells() + own * Ring<N>::CELLS : stage + Ring<N>::CODES;
            if (++own == linear.chunks) own = 0;
            Shared empty = ring.empty + 8 * ring.stage;
            // Behind the last item its own codes are decoded again: a branch would make products wait.
            if (item + 1 < last) ring.advance();
            multiply(stage);
            __syncwarp();
            if (lane.lane == 0) arrive(empty);
            if (++chunk == linear.chunks || item + 1 == last) store(tile), clear(), ++tile, chunk = 0;
        }
    }
};

template <int N>
MOEPACK_DEVICE void multiply_linear(const Linear& linear) {
    __shared__ u64 barriers[2 * MOST_STAGES];
    __shared__ float scales[TILE_BLOCKS];
    Ring<N> ring(barriers, linear.own);
    ring.clear(linear.matrix.block_bytes);
    __syncthreads();
    int first = linear.first_item(blockIdx.x), last = linear.first_item(blockIdx.x + 1);
    if (threadIdx.x >= TILE_BLOCKS * WARP) {
        if (N >= 4) leave_registers<COPYING_REGISTERS>();
        Producer<N>(linear, ring, first).run(last - first);
    } else {
        if (N >= 4) take_registers<MULTIPLYING_REGISTERS>();
        enter_launch();
        if (N <= 2 && linear.own) {
            make_own_cells(linear, {ring.own_cells(), first % linear.chunks, least(last - first, linear.own)}, scales);
            publish_operands();
            __syncthreads();
        }
        Consumer<N>(linear, ring, N <= 2 && linear.own ? scales : linear.scales).run(first, last);
    }
}
#elif defined(__CUDACC__)
template <int N>
MOEPACK_DEVICE void multiply_linear(const Linear&) {}
#endif

}  // namespace moepack

#if defined(__CUDACC__)
using namespace moepack;

// A grid of shares of a row by tokens.
extern "C" __global__ void __launch_bounds__(256) prepare(Linear linear) {
    enter_launch();
    prepare_token(linear, blockIdx.y);
}

#define MOEPACK_LINEAR(COLUMNS)                                                                      \
    extern "C" __global__ void __launch_bounds__(LINEAR_THREADS, 1) linear_##COLUMNS(Linear linear) { \
        multiply_linear<COLUMNS / 8>(linear);                                                        \
    }

MOEPACK_LINEAR(8)
MOEPACK_LINEAR(16)
MOEPACK_LINEAR(32)
MOEPACK_LINEAR(64)

// Adds the parts of tiles that several blocks have summed; a grid of tiles by tokens, a thread a row.
extern "C" __global__ void __launch_bounds__(TILE_ROWS) add(Linear linear) {
    enter_launch();
    Segments segments(linear, blockIdx.x);
    int row = blockIdx.x * TILE_ROWS + threadIdx.x;
    if (segments.count == 1 || row >= linear.rows) return;
    i64 at = i64(blockIdx.y) * linear.rows + row, size = i64(linear.tokens) * linear.rows;
    float sum = linear.parts[at];
#pragma unroll 4
    for (int i = 1; i < segments.count; ++i) sum += linear.parts[i * size + at];
    linear.out[at] = sum;
}
#endif
