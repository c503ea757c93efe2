// Activations in shared memory, as the B operand of m16n8k16 reads them.
//
// A *cell* is 128 columns (a chunk) of one token: 256 bytes of f16 and NOTES floats. The cells of a tile's tokens for
// one chunk lie together, tokens running inside 32 columns (a step, two products), so that the eight tokens that a warp
// reads at a time never meet in a bank:
//
//     step 0: token 0: 4 lanes x 16 bytes, token 1: ...; steps 1 to 3 likewise; then NOTES floats of each token
//
// The 16 bytes of a lane are two quads of neighbouring columns, each in the order 0, 2, 1, 3, in which integer codes
// leave their words; which quads is the format's choice (Codes::place).
//
// For warpgroups (a Format's TOGETHER) columns 0 and 2 of quads, and 1 and 3, are apart, as rows of operand B:
//
//     product 0: columns 0 and 2: token 0: 4 lanes x 4 bytes, token 1: ...; columns 1 and 3; product 1 to 7 likewise
//
// A cell is scaled by the power of two that brings its largest value to [2^14, 2^15): bfloat16 and f16 survive exactly,
// but for values 2^29 times smaller than the largest, and f32 is rounded to 11 bits. Note 0 is what undoes it, times
// the routing weight; the others are sums of the values of groups of columns, times that weight, for formats with
// offsets.
#pragma once
#include "common/ptx.cuh"
#include "common/types.cuh"

namespace moepack {

constexpr int CHUNK = 128;       // columns of a cell
constexpr int STEP = 32;         // columns of 16 bytes a lane
constexpr int STEP_BYTES = 64;   // of one token
constexpr int VALUE_BYTES = CHUNK * 2;

// Where a quad of a chunk (0 to 31) lies: the step, the lane of four and which half of its 16 bytes.
struct Place {
    int step, lane, half;
};

#if defined(__CUDACC__)
// Eight neighbouring values of a row as they are stored, two a word or one; columns behind its end are zero. Rows begin
// at multiples of 16 bytes.
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

// The power of two that scales values of up to `largest` to [2^14, 2^15), and its inverse.
struct Scale {
    float factor, inverse;
};

MOEPACK_DEVICE Scale scale_of(float largest) {
    u32 exponent = most(15u, __float_as_uint(largest) >> 23);
    return {__uint_as_float((268u - exponent) << 23), __uint_as_float((exponent - 14u) << 23)};
}

// Writes four of a cell's values.
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

// Writes a cell; sixteen lanes call it, each with eight columns of the chunk, both halves of a warp together.
// Format: place(quad), TOGETHER, NOTES, and SUMS, the groups of a chunk whose sums are noted (0: none).
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
        // Of the rounded values, which weights with an offset are multiplied by.
        sum += half_value(u16(pair.x)) + half_value(u16(pair.x >> 16));
        sum += half_value(u16(pair.y)) + half_value(u16(pair.y >> 16));
    }
    if (exists && lane == 0) notes[0] = scale.inverse * weight;
    if constexpr (Format::SUMS > 0) {
        constexpr int LANES = 16 / Format::SUMS;
#pragma unroll
        for (int distance = LANES / 2; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (exists && lane % LANES == 0) notes[1 + lane / LANES] = sum * scale.inverse * weight;
    }
}
#endif

}  // namespace moepack
