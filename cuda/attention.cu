// Attention of decoding steps: one query per head, over all keys and values of its sequence.
//
// The heads that share keys and values are read together, so that nothing is repeated: eight queries are the columns of
// the tensor cores' operand B, and sixteen tokens the rows of operand A. Keys and values go from global memory to the
// registers of a product directly. Columns are assigned to a product's k in the order in which a lane loads them: 16
// bytes of a token.
//
// Tokens are divided among the warps of several blocks (splits), tile by tile in turn. Each warp keeps the largest score,
// the sum of exponentials and the weighted values of its tokens. The warps of a block are combined in shared memory. The
// splits are combined by the block that finishes last, in order, so that results do not depend on who is last.
//
// Sequences may have buffers of their own (`Rooms`), whose sizes are read from memory, so that one recording of the launch
// serves any sequences.
//
// A mask is added to the scores. Tiles without a visible token are skipped before their keys are read. This covers padded
// sequences, free slots of the buffers and sliding windows.
//
// Arithmetic: scores and sums in f32; exponentials are rounded to the activations' type before they multiply values. Keys
// and values in 8 bits are operands as codes. Scales multiply scores, and the exponentials, which are rounded to bf16
// then, because the products with scales may be too small for f16.
//
// Definitions: HALF (1: f16, 0: bf16), NARROW (1: rooms of 8 bits), KEY_WIDTH (a multiple of 32), VALUE_WIDTH (a multiple
// of 64): columns of a head.
#include "common/layer.cuh"
#include "common/narrow.cuh"
#include "common/rooms.cuh"

namespace moepack {

// Queries and results are [sequences, groups * group, width], keys and values [sequences, groups, capacity, width].
struct Attention {
    const u16 *queries, *keys, *values;
    const u16 *mask;   // [sequences, capacity], or null
    const u16 *sinks;  // [groups * group], scores that take part in the sums only, or null
    u16 *out;
    float *stats, *parts;  // of the splits: see `Split`
    int *arrived;          // [blocks in y], 0 between launches
    int groups, group, capacity;
    Rooms rooms;  // in place of keys, values and capacity
    float scale;
};

#if defined(__CUDACC__)
namespace attention {

constexpr int WARPS = VALUE_WIDTH > 128 ? 4 : 8;
constexpr int TILE = 16;   // tokens of a product
constexpr int HEADS = 8;   // of a product
constexpr int SEGMENT = 64;  // columns of values that eight lanes load at once
constexpr float NONE = -3.0e38f;  // less than any score
constexpr int KEY_ROW = NARROW ? KEY_WIDTH + NARROW_SCALE : 2 * KEY_WIDTH;  // bytes
constexpr int VALUE_ROW = NARROW ? VALUE_WIDTH + NARROW_SCALE : 2 * VALUE_WIDTH;
constexpr int EIGHT_WORDS = NARROW ? 2 : 4;  // that hold eight columns

// The largest score and the sum of exponentials of a head.
struct Stats {
    float most, sum;
};

MOEPACK_DEVICE float value_of(u16 bits) {
    return HALF ? half_value(bits) : bf16_value(bits);
}

MOEPACK_DEVICE u32 pair_of(float low, float high) {
    return HALF ? to_half2(low, high) : to_bf16x2(low, high);
}

template <bool IS_HALF>
MOEPACK_DEVICE void product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (IS_HALF) multiply_add(c, a0, a1, a2, a3, b0, b1);
    else multiply_add_bf16(c, a0, a1, a2, a3, b0, b1);
}

// Whether an entry of a mask hides a token: the least value of the type, or less.
MOEPACK_DEVICE bool hides(float bias) {
    return bias <= (HALF ? -65504.0f : -1.0e38f);
}

MOEPACK_DEVICE void load_words(u32* word, const void* from) {
    Quad quad = load_quad(from);
    word[0] = quad.x, word[1] = quad.y, word[2] = quad.z, word[3] = quad.w;
}

// Columns of a token as they are in memory: `PIECES` times eight, which begin STEP columns apart.
template <int PIECES, int STEP>
struct Columns {
    u32 word[PIECES][EIGHT_WORDS];

    MOEPACK_DEVICE void load(const u8* token, int column) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const u8* from = token + (column + i * STEP) * (NARROW ? 1 : 2);
            if (NARROW) word[i][0] = load_word(from), word[i][1] = load_word(from + 4);
            else load_words(word[i], from);
        }
    }

    // The columns of a piece as operands.
    template <bool IS_HALF>
    MOEPACK_DEVICE void widen_to(int piece, u32 (&to)[4]) const {
        const u32(&from)[EIGHT_WORDS] = word[piece];
        if (NARROW) {
            widen<IS_HALF>(from[0], to[0], to[1]), widen<IS_HALF>(from[1], to[2], to[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = from[i % EIGHT_WORDS];
        }
    }
};

using Keys = Columns<KEY_WIDTH / 32, 32>;
using Values = Columns<VALUE_WIDTH / SEGMENT, SEGMENT>;
constexpr bool HALF_VALUES = HALF && !NARROW;  // the type of exponentials and values in products

// The scale of a row of codes of some width.
MOEPACK_DEVICE float scale_of(const u8* token, int width) {
    return NARROW ? __uint_as_float(load_word(token + width)) : 1.0f;
}

// What a warp has seen. Lane (g, t) = (lane / 4, lane % 4) has the heads 2t and 2t + 1: columns segment * 64 + 8 g + 2 i
// in sum[4 segment + i][head], the next ones in sum[4 segment + i][2 + head].
struct Seen {
    float most[2] = {NONE, NONE}, total[2] = {0, 0}, sum[VALUE_WIDTH / 16][4] = {};

    // Adds the products of a tile with the weights of two heads and two tokens per lane, [token * 2 + head]; `scale` is
    // that of the values of the two tokens.
    MOEPACK_DEVICE void add(const float (&score)[4], const float (&scale)[2], const Values (&values)[4]) {
        float weight[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = fmaxf(fmaxf(score[h], score[2 + h]), most[h]);
#pragma unroll
            for (int distance = 4; distance < WARP; distance *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
            float keep = __expf(most[h] - largest);
            weight[h] = score[h] > NONE ? __expf(score[h] - largest) : 0.0f;
            weight[2 + h] = score[2 + h] > NONE ? __expf(score[2 + h] - largest) : 0.0f;
            total[h] = total[h] * keep + weight[h] + weight[2 + h];
            most[h] = largest;
#pragma unroll
            for (int i = 0; i < VALUE_WIDTH / 16; ++i) sum[i][h] *= keep, sum[i][2 + h] *= keep;
        }
        if (NARROW) weight[0] *= scale[0], weight[1] *= scale[0], weight[2] *= scale[1], weight[3] *= scale[1];
        auto pair = [](float low, float high) { return HALF_VALUES ? to_half2(low, high) : to_bf16x2(low, high); };
        u32 b0 = transpose(pair(weight[0], weight[1])), b1 = transpose(pair(weight[2], weight[3]));
#pragma unroll
        for (int s = 0; s < VALUE_WIDTH / SEGMENT; ++s) {
            u32 value[4][4];
#pragma unroll
            for (int token = 0; token < 4; ++token) values[token].template widen_to<HALF_VALUES>(s, value[token]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                product<HALF_VALUES>(
                    sum[4 * s + i], permute(value[0][i], value[1][i], 0x5410), permute(value[0][i], value[1][i], 0x7632),
                    permute(value[2][i], value[3][i], 0x5410), permute(value[2][i], value[3][i], 0x7632), b0, b1);
        }
    }
};

// The heads of a block, in the order of `queries`, and their keys and values.
struct Heads {
    int first, count;  // heads
    const u8 *keys, *values;
    const u16* mask;
    int begin, end;  // tokens
    int splits;      // blocks that have tokens; at least one

    MOEPACK_DEVICE Heads(const Attention& a, int block) {
        int parts = ceil_div(a.group, HEADS), part = block % parts, row = block / parts, sequence = row / a.groups;
        first = row * a.group + part * HEADS;
        count = least(HEADS, a.group - part * HEADS);
        i64 capacity = a.capacity, of_keys = row;
        keys = reinterpret_cast<const u8*>(a.keys), values = reinterpret_cast<const u8*>(a.values), end = a.capacity;
        if (a.rooms.keys) {
            i64 room = a.rooms.sequence[sequence];
            keys = reinterpret_cast<const u8*>(a.rooms.keys[room]);
            values = reinterpret_cast<const u8*>(a.rooms.values[room]);
            capacity = a.rooms.capacity[room], of_keys = row % a.groups, end = int(a.rooms.place[sequence]) + 1;
        }
        keys += of_keys * capacity * KEY_ROW, values += of_keys * capacity * VALUE_ROW;
        mask = a.mask ? a.mask + i64(sequence) * a.capacity : nullptr;
        begin = a.rooms.window && end > a.rooms.window ? end - a.rooms.window : 0;
        splits = least(int(gridDim.x), most(1, ceil_div(end - begin / TILE * TILE, WARPS * TILE)));
    }
};

// Attends to every (splits * WARPS)th tile of the sequence.
MOEPACK_DEVICE void attend_to_tiles(const Attention& a, const Heads& heads, Seen& seen) {
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    u32 query[KEY_WIDTH / 32][4];
#pragma unroll
    for (int c = 0; c < KEY_WIDTH / 32; ++c) {
        query[c][0] = query[c][1] = query[c][2] = query[c][3] = 0;
        if (g < heads.count) load_words(query[c], a.queries + i64(heads.first + g) * KEY_WIDTH + c * 32 + t * 8);
    }
    const u16* mask = heads.mask;
    int step = heads.splits * WARPS * TILE, first = heads.begin / TILE * TILE;
    for (int tile = first + (blockIdx.x * WARPS + threadIdx.x / WARP) * TILE; tile < heads.end; tile += step) {
        float bias[2];
        bool visible[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int token = tile + g + 8 * i;
            visible[i] = token >= heads.begin && token < heads.end;
            bias[i] = visible[i] && mask ? value_of(mask[token]) : 0.0f;
            visible[i] = visible[i] && !hides(bias[i]);
        }
        if (!__any_sync(~0u, visible[0] || visible[1])) continue;
        Keys keys[2];
        Values values[4];
        float key_scale[2], value_scale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            i64 token = least(tile + g + 8 * i, heads.end - 1);
            const u8* from = heads.keys + token * KEY_ROW;
            keys[i].load(from, t * 8);
            key_scale[i] = scale_of(from, KEY_WIDTH);
            value_scale[i] = scale_of(heads.values + token * VALUE_ROW, VALUE_WIDTH);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            i64 token = least(tile + 2 * t + i % 2 + i / 2 * 8, heads.end - 1);
            values[i].load(heads.values + token * VALUE_ROW, g * 8);
        }
        float score[4] = {0, 0, 0, 0};
#pragma unroll
        for (int c = 0; c < KEY_WIDTH / 32; ++c) {
            u32 key[2][4];
            keys[0].template widen_to<HALF>(c, key[0]), keys[1].template widen_to<HALF>(c, key[1]);
#pragma unroll
            for (int j = 0; j < 4; j += 2)
                product<HALF>(score, key[0][j], key[1][j], key[0][j + 1], key[1][j + 1], query[c][j], query[c][j + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float by = NARROW ? a.scale * key_scale[i / 2] : a.scale;
            score[i] = visible[i / 2] ? score[i] * by + bias[i / 2] : NONE;
        }
        seen.add(score, value_scale, values);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2)
            seen.total[h] += __shfl_xor_sync(~0u, seen.total[h], distance);
}

// Four columns of a head as the sum over parts, which have their own largest scores.
struct Combined {
    float most = NONE, total = 0, value[4] = {};

    template <class StatsOf>
    MOEPACK_DEVICE void find_most(int parts, StatsOf stats) {
#pragma unroll 8
        for (int i = 0; i < parts; ++i) most = fmaxf(most, stats(i).most);
    }

    MOEPACK_DEVICE void add(Stats part, float4 v) {
        float factor = __expf(part.most - most);
        total += part.sum * factor;
        value[0] += v.x * factor, value[1] += v.y * factor, value[2] += v.z * factor, value[3] += v.w * factor;
    }

    // Writes the result of a head.
    MOEPACK_DEVICE void finish(const Attention& a, int head, int column) {
        if (a.sinks) {
            float sink = value_of(a.sinks[head % (a.groups * a.group)]), largest = fmaxf(most, sink);
            float factor = __expf(most - largest);
            total = total * factor + __expf(sink - largest);
#pragma unroll
            for (int i = 0; i < 4; ++i) value[i] *= factor;
        }
        float by = total > 0 ? 1.0f / total : 0.0f;
        Pair* to = reinterpret_cast<Pair*>(a.out + i64(head) * VALUE_WIDTH + column);
        *to = {pair_of(value[0] * by, value[1] * by), pair_of(value[2] * by, value[3] * by)};
    }
};

constexpr int PARTS = VALUE_WIDTH / 4;  // of a head, four columns each

// Combines the splits of a block row; the caller is the last of its blocks.
MOEPACK_DEVICE void combine_splits(const Attention& a, const Heads& heads) {
    int splits = heads.splits;
    i64 first = i64(blockIdx.y) * gridDim.x * HEADS;
    for (int item = threadIdx.x; item < heads.count * PARTS; item += WARPS * WARP) {
        int head = item / PARTS, column = item % PARTS * 4;
        const float2* stats = reinterpret_cast<const float2*>(a.stats) + first + head;
        const float4* parts = reinterpret_cast<const float4*>(a.parts + (first + head) * VALUE_WIDTH + column);
        auto stats_of = [&](int split) {
            float2 both = load_shared_by_blocks(stats + i64(split) * HEADS);
            return Stats{both.x, both.y};
        };
        Combined combined;
        combined.find_most(splits, stats_of);
#pragma unroll 8
        for (int split = 0; split < splits; ++split)
            combined.add(stats_of(split), load_shared_by_blocks(parts + i64(split) * HEADS * PARTS));
        combined.finish(a, heads.first + head, column);
    }
}

MOEPACK_DEVICE void attend(const Attention& a) {
    __shared__ float4 values[WARPS][HEADS][VALUE_WIDTH / 4];
    __shared__ Stats stats[WARPS][HEADS];
    __shared__ bool is_last;
    Heads heads(a, blockIdx.y);
    if (int(blockIdx.x) >= heads.splits) return;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    Seen seen;
    attend_to_tiles(a, heads, seen);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (g == 0) stats[warp][2 * t + h] = {seen.most[h], seen.total[h]};
#pragma unroll
        for (int s = 0; s < VALUE_WIDTH / SEGMENT; ++s) {
            float4* to = values[warp][2 * t + h] + s * (SEGMENT / 4) + g * 2;
            auto& sum = seen.sum;
            to[0] = {sum[4 * s][h], sum[4 * s][2 + h], sum[4 * s + 1][h], sum[4 * s + 1][2 + h]};
            to[1] = {sum[4 * s + 2][h], sum[4 * s + 2][2 + h], sum[4 * s + 3][h], sum[4 * s + 3][2 + h]};
        }
    }
    __syncthreads();
    bool alone = heads.splits == 1;
    i64 first = (i64(blockIdx.y) * gridDim.x + blockIdx.x) * HEADS;
    for (int item = threadIdx.x; item < heads.count * PARTS; item += WARPS * WARP) {
        int head = item / PARTS, part = item % PARTS;
        Combined combined;
        combined.find_most(WARPS, [&](int i) { return stats[i][head]; });
        for (int i = 0; i < WARPS; ++i) combined.add(stats[i][head], values[i][head][part]);
        if (alone) {
            combined.finish(a, heads.first + head, part * 4);
            continue;
        }
        const float(&v)[4] = combined.value;
        reinterpret_cast<float4*>(a.parts + (first + head) * VALUE_WIDTH)[part] = {v[0], v[1], v[2], v[3]};
        if (part == 0) reinterpret_cast<float2*>(a.stats)[first + head] = {combined.most, combined.total};
    }
    if (alone) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(a.arrived + blockIdx.y, 1) == heads.splits - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    combine_splits(a, heads);
    if (threadIdx.x == 0) a.arrived[blockIdx.y] = 0;
}

}  // namespace attention
#endif

}  // namespace moepack

#if defined(__CUDACC__)
// Grid: splits, and sequences * groups * ceil(group / 8).
extern "C" __global__ void __launch_bounds__(moepack::attention::WARPS* moepack::WARP, VALUE_WIDTH > 128 ? 1 : 2)
attend(moepack::Attention attention) {
    moepack::enter_launch();
    moepack::attention::attend(attention);
}
#endif
