// Attention of prompts: rows of one or several sequences attend to their own token and all earlier ones of the sequence.
//
// Rows lie in tiles of ROWS; a tile belongs to one sequence, in order, and its last rows may have no token. A block has a
// tile and up to HEADS heads that share keys and values. A warp has 16 rows of a head. Keys and values of 64 tokens are
// in shared memory, those of the next 64 on their way (cp.async). Each warp keeps the largest score, the sum of
// exponentials and the weighted values of its rows, as in FlashAttention-2 (Dao 2023).
//
// All sizes that depend on sequences are read from `Rooms`, so that one recording of the launch serves any of them.
//
// Keys and values in 8 bits are copied as they are, 16 bytes at once, because 64 tokens of a head begin at a multiple of 16
// bytes (capacities are multiples of 4). All warps widen them to operands in shared memory.
//
// Arithmetic: as in attention.cu.
//
// Definitions: HALF (1: f16, 0: bf16), NARROW (1: rooms of 8 bits), WIDTH: columns of a head, 64 or 128; HEADS: of a
// block, 1 to 8; PARTS: warps per head, which have 16 rows each.
#include "common/layer.cuh"
#include "common/narrow.cuh"
#include "common/rooms.cuh"

namespace moepack {

// Queries and results are [rows, groups * group, WIDTH].
struct Prompt {
    const u16* queries;
    const u16* sinks;  // [groups * group], scores that take part in the sums only, or null
    u16* out;
    Rooms rooms;
    int groups, group;
    float scale;
};

#if defined(__CUDACC__)
namespace prompt {

constexpr int WARPS = HEADS * PARTS;
constexpr int ROWS = 16 * PARTS;
constexpr int KEYS = 64;            // tokens in shared memory
constexpr int STRIDE = WIDTH + 8;   // between their rows: no two of eight rows begin in the same banks
constexpr int STAGE = KEYS * STRIDE;
constexpr int ROW = NARROW ? WIDTH + NARROW_SCALE : 2 * WIDTH;  // bytes of a token in memory
constexpr int CODES = KEYS * ROW;   // bytes of 64 tokens of codes
constexpr int STEPS = WIDTH / 16;   // products per score
constexpr int TILES = KEYS / 8;     // of eight tokens
constexpr float NONE = -3.0e38f;    // less than any score

MOEPACK_DEVICE float value_of(u16 bits) {
    return HALF ? half_value(bits) : bf16_value(bits);
}

MOEPACK_DEVICE u32 pair_of(float low, float high) {
    return HALF ? to_half2(low, high) : to_bf16x2(low, high);
}

template <bool IS_HALF>
MOEPACK_DEVICE void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (IS_HALF) multiply_add(c, a[0], a[1], a[2], a[3], b0, b1);
    else multiply_add_bf16(c, a[0], a[1], a[2], a[3], b0, b1);
}

constexpr bool HALF_VALUES = HALF && !NARROW;  // the type of exponentials and values in products

// The tile of a block.
struct Tile {
    const u8 *keys, *values;
    int first, count, begin, end;  // place of the first row, rows with tokens, and tokens that are read

    MOEPACK_DEVICE Tile(const Prompt& p, int tile, int group) {
        const i64* place = p.rooms.place + i64(tile) * ROWS;
        first = int(place[0]), count = 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) count += place[i] >= 0;
        i64 sequence = p.rooms.sequence[i64(tile) * ROWS], head = i64(group) * p.rooms.capacity[sequence] * ROW;
        keys = reinterpret_cast<const u8*>(p.rooms.keys[sequence]) + head;
        values = reinterpret_cast<const u8*>(p.rooms.values[sequence]) + head;
        end = count ? first + count : 0;
        int window = p.rooms.window;
        begin = window && first >= window ? (first - window + 1) / KEYS * KEYS : 0;
    }
};

// Starts to copy the keys and values of 64 tokens; those behind the last one become zeros.
MOEPACK_DEVICE void fetch(const Tile& tile, int token, u8* keys, u8* values) {
    constexpr int PIECES = ROW / 16;  // of a token; codes are copied across tokens
    int left = (tile.end - token) * ROW;
    for (int item = threadIdx.x; item < (NARROW ? CODES / 16 : KEYS * PIECES); item += WARPS * WARP) {
        int at = NARROW ? item * 16 : item / PIECES * STRIDE * 2 + item % PIECES * 16, from = item * 16;
        int bytes = least(16, most(0, left - from));
        i64 first = bytes ? i64(token) * ROW + from : i64(tile.begin) * ROW;
        copy_async(shared_address(keys + at), tile.keys + first, bytes);
        copy_async(shared_address(values + at), tile.values + first, bytes);
    }
    commit_copies();
}

// The scale of a row of codes in shared memory.
MOEPACK_DEVICE float scale_of(const u8* codes, int row) {
    return *reinterpret_cast<const float*>(codes + row * ROW + WIDTH);
}

// Widens 64 tokens of codes to operands.
template <bool IS_HALF>
MOEPACK_DEVICE void widen_rows(const u8* codes, u16* rows) {
    constexpr int PIECES = WIDTH / 8;
    for (int item = threadIdx.x; item < KEYS * PIECES; item += WARPS * WARP) {
        int row = item / PIECES, column = item % PIECES * 8;
        const u32* from = reinterpret_cast<const u32*>(codes + row * ROW + column);
        Quad quad;
        widen<IS_HALF>(from[0], quad.x, quad.y), widen<IS_HALF>(from[1], quad.z, quad.w);
        *reinterpret_cast<Quad*>(rows + row * STRIDE + column) = quad;
    }
}

// What the rows of a warp have seen: lane (g, t) = (lane / 4, lane % 4) has the rows g and g + 8.
struct Seen {
    float most[2] = {NONE, NONE}, total[2] = {0, 0}, sum[WIDTH / 8][4] = {};

    // Adds 64 tokens with their scores: tokens 8 i + 2 t and the next one of row g in score[i][0, 1], of g + 8 in [2, 3].
    // `codes` are the values in 8 bits, which `values` has as operands.
    MOEPACK_DEVICE void add(float (&score)[TILES][4], const u16* values, const u8* codes) {
        int lane = threadIdx.x % WARP;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = most[h];
#pragma unroll
            for (int i = 0; i < TILES; ++i) largest = fmaxf(largest, fmaxf(score[i][2 * h], score[i][2 * h + 1]));
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
            float keep = __expf(most[h] - largest), all = 0;
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                float& weight = score[i / 2][2 * h + i % 2];
                weight = weight > NONE ? __expf(weight - largest) : 0.0f;
                all += weight;
            }
            total[h] = total[h] * keep + all, most[h] = largest;
#pragma unroll
            for (int i = 0; i < WIDTH / 8; ++i) sum[i][2 * h] *= keep, sum[i][2 * h + 1] *= keep;
        }
        if (NARROW) {
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                float scale = scale_of(codes, i / 2 * 8 + lane % 4 * 2 + i % 2);
                score[i / 2][i % 2] *= scale, score[i / 2][2 + i % 2] *= scale;
            }
        }
        auto pair = [](float low, float high) { return HALF_VALUES ? to_half2(low, high) : to_bf16x2(low, high); };
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            auto &low = score[2 * k], &high = score[2 * k + 1];
            u32 weight[4] = {pair(low[0], low[1]), pair(low[2], low[3]), pair(high[0], high[1]), pair(high[2], high[3])};
            const u16* rows = values + (k * 16 + lane % 16) * STRIDE + lane / 16 * 8;
#pragma unroll
            for (int i = 0; i < WIDTH / 16; ++i) {
                u32 value[4];
                load_matrices<true>(value, shared_address(rows + i * 16));
                product<HALF_VALUES>(sum[2 * i], weight, value[0], value[1]);
                product<HALF_VALUES>(sum[2 * i + 1], weight, value[2], value[3]);
            }
        }
    }
};

MOEPACK_DEVICE void attend(const Prompt& p) {
    // Two stages of keys and two of values, or one of each, and two of codes of each behind them.
    u16* stage = reinterpret_cast<u16*>(shared_memory);
    u8* codes = shared_memory + 2 * STAGE * 2;
    auto fetch_to = [&](const Tile& tile, int token, int n) {
        if (NARROW) fetch(tile, token, codes + n * CODES, codes + (2 + n) * CODES);
        else fetch(tile, token, shared_memory + n * STAGE * 2, shared_memory + (2 + n) * STAGE * 2);
    };
    int parts = ceil_div(p.group, HEADS), group = blockIdx.y / parts;
    // The last tiles have the most tokens before them, so they begin first.
    int index = int(gridDim.x) - 1 - int(blockIdx.x);
    Tile tile(p, index, group);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int of_group = blockIdx.y % parts * HEADS + warp / PARTS, head = group * p.group + of_group;
    int row = warp % PARTS * 16, heads = p.groups * p.group, window = p.rooms.window;
    bool idle = of_group >= p.group || row >= tile.count;
    if (tile.count) fetch_to(tile, tile.begin, 0);
    u32 query[STEPS][4] = {};
    i64 rows = (i64(index) * ROWS + row) * heads + head;
    if (!idle) {
        const u16* above = p.queries + (rows + i64(g) * heads) * WIDTH + 2 * t;
        const u16* below = above + i64(8) * heads * WIDTH;
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            query[k][0] = load_word(above + k * 16), query[k][1] = load_word(below + k * 16);
            query[k][2] = load_word(above + k * 16 + 8), query[k][3] = load_word(below + k * 16 + 8);
        }
    }
    Seen seen;
    for (int token = tile.begin, n = 0; token < tile.end; token += KEYS, n ^= 1) {
        bool more = token + KEYS < tile.end;
        if (more) fetch_to(tile, token + KEYS, n ^ 1);
        if (more) wait_copies<1>();
        else wait_copies<0>();
        __syncthreads();
        const u16 *key_rows = stage + (NARROW ? 0 : n) * STAGE, *value_rows = stage + (NARROW ? 1 : 2 + n) * STAGE;
        const u8 *key_codes = codes + n * CODES, *value_codes = codes + (2 + n) * CODES;
        if (NARROW) {
            widen_rows<HALF>(key_codes, stage), widen_rows<false>(value_codes, stage + STAGE);
            __syncthreads();
        }
        int least_place = tile.first + row;  // of the warp's rows
        bool beyond = token > least_place + 15 || (window && token + KEYS <= least_place - window + 1);
        if (!idle && !beyond) {
            float score[TILES][4] = {};
            const u16* keys = key_rows + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
            for (int k = 0; k < STEPS; ++k)
#pragma unroll
                for (int i = 0; i < TILES; i += 2) {
                    u32 key[4];
                    load_matrices<false>(key, shared_address(keys + i * 8 * STRIDE + k * 16));
                    product<HALF>(score[i], query[k], key[0], key[1]);
                    product<HALF>(score[i + 1], query[k], key[2], key[3]);
                }
            bool is_whole = token + KEYS - 1 <= least_place && !window;
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    int in_stage = i * 8 + 2 * t + j % 2, key = token + in_stage, place = least_place + g + j / 2 * 8;
                    bool sees = is_whole || (key <= place && (!window || key > place - window));
                    float by = NARROW ? p.scale * scale_of(key_codes, in_stage) : p.scale;
                    score[i][j] = sees ? score[i][j] * by : NONE;
                }
            seen.add(score, value_rows, value_codes);
        }
        __syncthreads();
    }
    if (of_group >= p.group) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float total = seen.total[h], factor = 1;
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
        if (p.sinks) {
            float sink = value_of(p.sinks[head]), largest = fmaxf(seen.most[h], sink);
            factor = __expf(seen.most[h] - largest);
            total = total * factor + __expf(sink - largest);
        }
        float by = total > 0 ? factor / total : 0.0f;
        u32* to = reinterpret_cast<u32*>(p.out + (rows + i64(g + 8 * h) * heads) * WIDTH + 2 * t);
#pragma unroll
        for (int i = 0; i < WIDTH / 8; ++i) to[i * 4] = pair_of(seen.sum[i][2 * h] * by, seen.sum[i][2 * h + 1] * by);
    }
}

}  // namespace prompt
#endif

}  // namespace moepack

#if defined(__CUDACC__)
// Grid: tiles, and groups * ceil(group / HEADS).
extern "C" __global__ void __launch_bounds__(moepack::prompt::WARPS* moepack::WARP, 1)
attend(moepack::Prompt prompt) {
    moepack::enter_launch();
    moepack::prompt::attend(prompt);
}
#endif
