// Activations in shared memory, in the layout of operand B of m16n8k16.
//
// A *cell* is 128 columns (a chunk) of one token: 256 bytes of f16 and NOTES floats. The cells of a tile's tokens for
// one chunk are contiguous, with tokens interleaved every 32 columns (a step, two products), so that the eight tokens
// that a warp reads at once are free of bank conflicts:
//
//     step 0: token 0: 4 lanes x 16 bytes, token 1: ...; steps 1 to 3 likewise; then NOTES floats of each token
//
// The 16 bytes of a lane are two quads of neighboring columns, each in the order 0, 2, 1, 3, which is that of decoded
// integer codes. The format determines which quads these are (Codes::place).
//
// For warpgroups (a Format's TOGETHER), columns 0 and 2 of quads are separate from 1 and 3, as rows of operand B:
//
//     product 0: columns 0 and 2: token 0: 4 lanes x 4 bytes, token 1: ...; columns 1 and 3; product 1 to 7 likewise
//
// A cell is scaled by the power of two that brings its largest value to [2^14, 2^15). This preserves bfloat16 and f16
// exactly, except values 2^29 times smaller than the largest, and rounds f32 to 11 bits. Note 0 is the inverse of the
// scale times the routing weight. For formats with offsets, the other notes are sums of the values of column groups,
// times that weight.
#pragma once
#include "common/ptx.cuh"
#include "common/types.cuh"

namespace moepack {

constexpr int CHUNK = 128;       // columns of a cell
constexpr int STEP = 32;         // columns per step, 16 bytes per lane
constexpr int STEP_BYTES = 64;   // per token
constexpr int VALUE_BYTES = CHUNK * 2;

// The position of a quad of a chunk (0 to 31): the step, the lane of four, and the half of its 16 bytes.
struct Place {
    int step, lane, half;
};

#if defined(__CUDACC__)
// Loads eight neighboring values of a row in their stored form, two or one per word; columns after its end are zero.
// Rows are aligned to 16 bytes.
MOEPACK_DEVICE void load_eight(const Activations& x, i64 row, int column, u32 (&word)[8]) {
    Quad low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
    if (column < x.columns) {
        bool wide = x.type == Type::f32;
        const u8* from = static_cast<const u8*>(x.data) + (row * x.columns + column) * (wide ? 4 : 2);
        low = load_quad(from);
        if (wide) high = load_quad(from + 16);
    }
    word[0] = low.x, word[1] = low.y, word[2] = low.z, word[3] = low.w;
    word[4] = high.x, word[5] = high.y, word[6] = high.z, word[7] = high.w;
}

MOEPACK_DEVICE void to_floats(Type type, const u32 (&word)[8], float (&value)[8]) {
    if (type == Type::f32) {
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = __uint_as_float(word[i]);
    } else if (type == Type::f16) {
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = half_value(u16(word[i / 2] >> (i % 2 * 16)));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = bf16_value(u16(word[i / 2] >> (i % 2 * 16)));
    }
}

// Calls use(column, values) for every eight columns of a row, with all threads of a block.
template <class Use>
MOEPACK_DEVICE void for_each_eight(const Activations& x, i64 row, Use use) {
    constexpr int BATCH = 4;
    for (int first = threadIdx.x * 8; first < x.columns; first += blockDim.x * 8 * BATCH) {
        u32 word[BATCH][8];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) load_eight(x, row, first + i * blockDim.x * 8, word[i]);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            float value[8];
            to_floats(x.type, word[i], value);
            if (first + i * blockDim.x * 8 < x.columns) use(first + i * blockDim.x * 8, value);
        }
    }
}

// A quad in its stored form: f32 activations take twice as many words.
template <Type TYPE>
struct Stored {
    u32 word[TYPE == Type::f32 ? 4 : 2];

    // Loads part of a row, from a column on; zeros after the row's end.
    MOEPACK_DEVICE void load(const Activations& x, i64 row, int column) {
        constexpr int BYTES = TYPE == Type::f32 ? 4 : 2;
        const u8* from = static_cast<const u8*>(x.data) + (row * x.columns + column) * BYTES;
        if constexpr (TYPE == Type::f32) {
            Quad quad = column < x.columns ? load_quad(from) : Quad{0, 0, 0, 0};
            word[0] = quad.x, word[1] = quad.y, word[2] = quad.z, word[3] = quad.w;
        } else {
            Pair pair = column < x.columns ? load_pair(from) : Pair{0, 0};
            word[0] = pair.x, word[1] = pair.y;
        }
    }

    MOEPACK_DEVICE float value(int i) const {
        if constexpr (TYPE == Type::f32) return __uint_as_float(word[i]);
        else if constexpr (TYPE == Type::f16) return half_value(u16(word[i / 2] >> (i % 2 * 16)));
        else return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000 : word[i / 2] << 16);
    }
};

// The power of two that scales values of up to `largest` to [2^14, 2^15), and its inverse.
struct Scale {
    float factor, inverse;
};

MOEPACK_DEVICE Scale scale_of(float largest) {
    u32 exponent = most(15u, __float_as_uint(largest) >> 23);
    return {__uint_as_float((268u - exponent) << 23), __uint_as_float((exponent - 14u) << 23)};
}

// Writes four values of a cell.
template <bool TOGETHER>
MOEPACK_DEVICE void write_quad(u8* cells, int token, int tokens, Place place, Pair pair) {
    if (TOGETHER) {
        u8* to = cells + ((place.step * 2 + place.half) * 2 * tokens + token) * 16 + place.lane * 4;
        *reinterpret_cast<u32*>(to) = pair.x, *reinterpret_cast<u32*>(to + tokens * 16) = pair.y;
    } else {
        u8* to = cells + (place.step * tokens + token) * STEP_BYTES + place.lane * 16 + place.half * 8;
        *reinterpret_cast<Pair*>(to) = pair;
    }
}

// The sum of four rounded values, which offsets are multiplied by.
MOEPACK_DEVICE float sum_of(Pair pair) {
    return half_value(u16(pair.x)) + half_value(u16(pair.x >> 16)) + half_value(u16(pair.y)) +
           half_value(u16(pair.y >> 16));
}

// Writes a cell; called by sixteen lanes with eight columns of the chunk each, both halves of a warp together.
// Format: place(quad), TOGETHER, NOTES, and SUMS, the number of groups whose sums are noted per chunk (0: none).
template <class Format>
MOEPACK_DEVICE void write_cell(u8* cells, int token, int tokens, const float (&value)[8], float weight, bool exists) {
    int lane = threadIdx.x & 15;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(value[i]));
#pragma unroll
    for (int distance = 8; distance; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    Scale scale = scale_of(largest);
    float* notes = reinterpret_cast<float*>(cells + tokens * VALUE_BYTES) + token * Format::NOTES;
    float sum = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* v = value + 4 * half;
        Place place = Format::place(2 * lane + half);
        float f = scale.factor;
        Pair pair = {to_half2(v[0] * f, v[2] * f), to_half2(v[1] * f, v[3] * f)};
        if (exists) write_quad<Format::TOGETHER>(cells, token, tokens, place, pair);
        sum += sum_of(pair);
    }
    if (exists && lane == 0) notes[0] = scale.inverse * weight;
    if constexpr (Format::SUMS > 0) {
        constexpr int LANES = 16 / Format::SUMS;
#pragma unroll
        for (int distance = LANES / 2; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (exists && lane % LANES == 0) notes[1 + lane / LANES] = sum * scale.inverse * weight;
    }
}

// Writes a cell for warpgroups; called by four lanes, whole warps together, each with its quads of eight products.
template <class Format, Type TYPE>
MOEPACK_DEVICE void write_tile(u8* cells, int token, int tokens, const Stored<TYPE> (&quad)[8], float weight) {
    int lane = threadIdx.x % 4;
    float largest = 0, sum[most(Format::SUMS, 1)] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) largest = fmaxf(largest, fabsf(quad[i / 4].value(i % 4)));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    Scale scale = scale_of(largest);
#pragma unroll
    for (int product = 0; product < 8; ++product) {
        const Stored<TYPE>& q = quad[product];
        float f = scale.factor;
        Pair pair = {to_half2(q.value(0) * f, q.value(2) * f), to_half2(q.value(1) * f, q.value(3) * f)};
        write_quad<true>(cells, token, tokens, {product / 2, lane, product % 2}, pair);
        if constexpr (Format::SUMS > 0) sum[product * Format::SUMS / 8] += sum_of(pair);
    }
    float* notes = reinterpret_cast<float*>(cells + tokens * VALUE_BYTES) + token * Format::NOTES;
    if (lane == 0) notes[0] = scale.inverse * weight;
#pragma unroll
    for (int group = 0; group < Format::SUMS; ++group) {
        sum[group] += __shfl_xor_sync(~0u, sum[group], 1);
        sum[group] += __shfl_xor_sync(~0u, sum[group], 2);
        if (lane == 0) notes[1 + group] = sum[group] * scale.inverse * weight;
    }
}
#endif

}  // namespace moepack
