// Products of tiles of 256 rows with up to 64 tokens on warpgroups (sm_90a): the code shared by linear layers
// (common/linear.cuh) and layers of experts with many tokens (common/grouped.cuh).
//
// Cells: the tokens of a chunk of 128 columns in the layout of `Described`: for each product, 16 bytes per token with
// the first pair of columns of four quads, then the second pair. For formats with offsets, the f32 sums of each group
// follow. All values of a row are scaled by the power of two that brings the largest one, or that of a block's part of
// the row, to [2^14, 2^15). This preserves bfloat16 and f16 exactly, except values 2^29 times smaller than the largest;
// f32 keeps 11 bits.
//
// An *item* is a chunk of a tile of rows. Four warps fill a ring of items by bulk copies; each of sixteen others
// multiplies a block of 16 rows.
//
// A Format has
// - Matrix, with `data`, the first row block, and `block_bytes`;
// - STAGE, the most bytes of a chunk of a row block; Pieces(matrix, chunk), their locations; and clears(block_bytes),
//   whether bytes of a stage that are not copied must be zero;
// - quad(product, lane), the quad of a chunk that a lane of four has in a product, or if STRIDED, one column of each of
//   the four; and SECOND, the column of these that forms a pair with the first: 1 or 2;
// - COLUMNS per step, decoded at once, in PARTS of QUADS products each; FETCHES, whether its codes are loaded a step
//   ahead;
// - WIDTH, columns of a chunk that share a scale, or 0 if whole rows do; SUMS, groups of a chunk that have an offset;
// - Operands, a lane's state for decoding operands A: ask(matrix, block) loads what a row block needs in addition to
//   its stages, enter() is called when the warp reaches it, decode(stage, step, quads), or fetch(stage, step) and
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

// Bytes of the cells of a chunk.
template <class Format>
MOEPACK_BOTH constexpr int cell_bytes(int columns) {
    return columns * (VALUE_BYTES + 4 * Format::SUMS);
}

#if defined(__CUDACC__)
// The values of a token that a product reads: sixteen columns of a chunk.
template <Type TYPE, class Format>
struct Columns {
    Stored<TYPE> quad[4];

    MOEPACK_DEVICE void load(const Activations& x, i64 row, int chunk, int product) {
#pragma unroll
        for (int i = 0; i < 4; ++i) quad[i].load(x, row, chunk * CHUNK + Format::quad(product, i) * 4);
    }

    MOEPACK_DEVICE float largest() const {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(quad[i / 4].value(i % 4)));
        return largest;
    }

    // Writes them to the chunk's cells of `columns` tokens. Called by the lanes of its eight products, which are
    // DISTANCE apart.
    template <int DISTANCE>
    MOEPACK_DEVICE void write(u8* cells, int columns, int token, int product, float factor, bool exists) const {
        u32 first[4], second[4];
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            constexpr int SECOND = Format::SECOND, THIRD = 3 - SECOND;
            auto value = [&](int j) { return (Format::STRIDED ? quad[j].value(i) : quad[i].value(j)) * factor; };
            Pair pair = {to_half2(value(0), value(SECOND)), to_half2(value(THIRD), value(3))};
            first[i] = pair.x, second[i] = pair.y, sum += sum_of(pair);
        }
        Quad* to = reinterpret_cast<Quad*>(cells) + product * 2 * columns + token;
        if (exists) to[0] = {first[0], first[1], first[2], first[3]};
        if (exists) to[columns] = {second[0], second[1], second[2], second[3]};
        if constexpr (Format::SUMS > 0) {
            constexpr int PRODUCTS = 8 / most(Format::SUMS, 1);
#pragma unroll
            for (int i = PRODUCTS / 2; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i * DISTANCE);
            float* sums = reinterpret_cast<float*>(cells + columns * VALUE_BYTES);
            if (exists && product % PRODUCTS == 0) sums[product / PRODUCTS * columns + token] = sum;
        }
    }
};

// The largest value of eight lanes that are four apart.
MOEPACK_DEVICE float largest_of_products(float value) {
#pragma unroll
    for (int distance = 4; distance < WARP; distance *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A ring of items in shared memory: the codes of sixteen row blocks and the cells of a chunk.
template <class Format, int N>
struct Ring {
    static constexpr int CODES = TILE_BLOCKS * Format::STAGE, CELLS = cell_bytes<Format>(8 * N);
    static constexpr int STAGE = ceil_div(CODES + CELLS, 128) * 128;
    Shared full, empty;  // barriers of the stages
    int depth;
    int stage = 0, parity = 0;

    // Leaves some bytes of shared memory after the ring.
    MOEPACK_DEVICE Ring(u64* barriers, int reserved)
        : full(shared_address(barriers)), empty(full + 8 * MOST_STAGES),
          depth(least((int(shared_size()) - reserved) / STAGE, MOST_STAGES)) {
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

    // The bytes after the ring.
    MOEPACK_DEVICE u8* after() const {
        return shared_memory + depth * STAGE;
    }

    MOEPACK_DEVICE void advance() {
        if (++stage == depth) stage = 0, parity ^= 1;
    }
};

// Multiplies a row block of each item, step by step. The products of a step run while the previous one is scaled and
// the next one decoded. With 64 tokens and groups, sums leave no registers for this, and other warps run in the
// meantime.
template <class Format, int N>
struct Multiplier {
    static constexpr int COLUMNS = Format::COLUMNS, STEPS = CHUNK / COLUMNS, PRODUCTS = COLUMNS / 16;
    static constexpr int QUADS = Format::QUADS, PARTS = Format::PARTS;
    static constexpr bool GROUPS = Format::WIDTH != 0, AHEAD = N < 8 || !GROUPS;
    // Whether these warps take over registers: sums of few tokens with groups do not need them, and need not wait.
    static constexpr bool TAKES = N >= 4 || !GROUPS;
    static constexpr int WIDTH = GROUPS ? Format::WIDTH : CHUNK;
    static_assert(PARTS * QUADS == PRODUCTS);

    Ring<Format, N> ring;
    int warp, lane;
    typename Format::Operands operands;
    const u8* cells;      // cells of the item
    float sum[AHEAD ? 2 : 1][N][4], out[N][4];
    u32 quads[2][PARTS][2][QUADS][2];

    MOEPACK_DEVICE explicit Multiplier(const Ring<Format, N>& ring)
        : ring(ring), warp(__shfl_sync(~0u, threadIdx.x / WARP, 0)), lane(threadIdx.x % WARP), operands(warp, lane) {}

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

    // Starts the products of a step, and completes the groups that end inside it.
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

    MOEPACK_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < 4 * N; ++i) out[i / 4][i % 4] = 0;
    }
};
#endif

}  // namespace moepack
