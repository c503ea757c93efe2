// Integers of 2, 3, 4 or 8 bits with a scale, and optionally an offset, per group of columns (docs/format.md, section
// 6).
//
// Layout: the bytes on disk. A block of 16 rows is a sequence of records: parameters of one or two groups, then 64-byte
// registers that hold word w of each row. Rows 2 g and 2 g + 1 are rows g and g + 8 of operand A of m16n8k16, so a lane
// loads its words of both with one 8-byte load. Columns are permuted so that these words hold the lane's own columns
// (common/integers.cuh).
//
// Decoding: a code placed under the exponent of 1024 is the f16 number 1024 + code 2^position; one addition, or one
// fused multiply-add, converts it exactly to the integer. Sums of a group are multiplied by its scale in f32, offsets
// by sums of activations. Weights are therefore exact, and f32 only rounds sums. Decoding instructions per weight: 2
// bits 1.25, 3 bits 1.38 (groups of 64 and more) or 2.1, 4 bits 1.13, 8 bits 1.
//
// Definitions: BITS, GROUP (columns; 0: the whole row), SYMMETRIC (0, 1), HALVES (parameters are f16, otherwise bf16),
// TOKENS (most per tile: 8, 32 or 64), RANK_BITS (of the values of low-rank factors; 0: there are none).
#pragma once
#include "common/factors.cuh"
#include "common/integers.cuh"
#include "common/layer.cuh"
#include "common/warpgroups.cuh"

namespace moepack {

struct Groupwise {
    // Columns of a chunk that share parameters, and groups per chunk.
    static constexpr int WIDTH = GROUP == 0 || GROUP > CHUNK ? CHUNK : GROUP, GROUPS = CHUNK / WIDTH;
    static constexpr int REGISTER = 64, UNIT = 32, UNITS = CHUNK / UNIT, UNIT_BYTES = BITS * REGISTER;
    // A record (docs/format.md): its groups, the bytes of the parameters of one group and of all, and its units.
    static constexpr int RECORD_GROUPS = GROUP != 0 && (SYMMETRIC || GROUP < UNIT) ? 2 : 1;
    static constexpr int GROUP_BYTES = SYMMETRIC ? 32 : 64;
    static constexpr int PARAMETERS = ceil_div(RECORD_GROUPS * GROUP_BYTES, REGISTER) * REGISTER;
    static constexpr int RECORD_UNITS = GROUP == 0 ? 0 : RECORD_GROUPS * GROUP / UNIT;
    static constexpr int RECORD = PARAMETERS + RECORD_UNITS * UNIT_BYTES;
    // Whether a chunk consists of whole records; otherwise it has one group's parameters and a part of its codes.
    static constexpr bool WHOLE = GROUP != 0 && RECORD_UNITS <= UNITS;

    static constexpr int STAGE = WHOLE ? UNITS / most(RECORD_UNITS, 1) * RECORD : REGISTER + UNITS * UNIT_BYTES;
    static constexpr int DEPTH = most(3, (TOKENS == 8 ? 4608 : 3328) / STAGE);
    static constexpr int SUMS = SYMMETRIC ? 0 : GROUPS, NOTES = ceil_div(1 + SUMS, 4) * 4;
    static constexpr int MIDDLE = SYMMETRIC ? 1 << (BITS - 1) : 0;
    using Decoder = Codes<BITS, BITS == 3 ? (WIDTH >= 64) : (WIDTH >= 32)>;
    static constexpr int QUADS = Decoder::UNITS * 2;
    static constexpr bool TOGETHER = TOKENS > 8 && HAS_WARPGROUPS;
    static constexpr bool MAKES_CELLS = TOKENS == 8 || TOGETHER;  // others lack the registers

    struct Matrix {
        const u8* data;  // the first block
        i64 block_bytes;
#if RANK_BITS
        Factors factors;
#endif
    };

#if RANK_BITS
    static constexpr bool CORRECTS = true;

    template <int MOST>
    static MOEPACK_DEVICE void correct(const Matrix& matrix, const Tile& tile, const u16* order, int row, int first,
                                       int step, float (&part)[MOST]) {
        multiply_left<RANK_BITS, MOST>(matrix.factors, tile, order, row, first, step, part);
    }
#endif

    struct Lane {
        int lane;
        Decoder decoder;
        MOEPACK_DEVICE explicit Lane(int lane) : lane(lane), decoder(lane, MIDDLE) {
            decoder.hold();
        }
    };

    static MOEPACK_DEVICE constexpr Place place(int quad) {
        constexpr int QUADS = Decoder::UNITS * 8;
        Place place = Decoder::place(quad % QUADS);
        return {quad / QUADS * Decoder::UNITS + place.step, place.lane, place.half};
    }

    // The quad of a chunk that a lane of four holds in a product.
    static MOEPACK_DEVICE constexpr int quad(int product, int lane) {
        constexpr int PRODUCTS = Decoder::UNITS * 2;
        return product / PRODUCTS * Decoder::UNITS * 8 + Decoder::quad(product % PRODUCTS, lane);
    }

    // Iterates over the chunks of a block of rows, starting at one.
    struct Source {
        const u8* data;  // WHOLE: this lane's piece of the next chunk; otherwise the block
        int left;        // bytes of the block after that
        int chunk, lane;

        MOEPACK_DEVICE Source() {}

        MOEPACK_DEVICE Source(const Matrix& matrix, i64 block, int chunk, int lane) : chunk(chunk), lane(lane) {
            i64 at = WHOLE ? i64(chunk) * STAGE + lane * 16 : 0;
            data = matrix.data + block * matrix.block_bytes + at;
            left = int(matrix.block_bytes - at);
        }

        // The offset of a piece of the next chunk from `data`.
        MOEPACK_DEVICE int distance(int piece) const {
            if (WHOLE) return piece * (WARP * 16);
            int unit = chunk * UNITS, record = GROUP == 0 ? 0 : unit / most(RECORD_UNITS, 1);
            int in_record = unit - record * RECORD_UNITS, at = piece * WARP + lane;
            int group = GROUP == 0 ? 0 : in_record * UNIT / most(GROUP, 1);
            if (at < REGISTER / 16) return record * RECORD + group * GROUP_BYTES + at * 16;
            return record * RECORD + PARAMETERS + in_record * UNIT_BYTES + at * 16 - REGISTER;
        }

        MOEPACK_DEVICE void fetch(Shared to, u64 policy) {
#pragma unroll
            for (int i = 0; i < ceil_div(STAGE / 16, WARP); ++i) {
                if (i * WARP + lane >= STAGE / 16) break;
                int from = distance(i);
                copy_async(to + (i * WARP + lane) * 16, data + from, from < left ? 16 : 0, policy);
            }
            if (WHOLE) data += STAGE, left -= STAGE;
            ++chunk;
        }
    };

    // The offsets of a unit's registers, and of a group's parameters, in a stage.
    static MOEPACK_DEVICE constexpr int unit_at(int unit) {
        if (!WHOLE) return REGISTER + unit * UNIT_BYTES;
        constexpr int PER = most(RECORD_UNITS, 1);
        return unit / PER * RECORD + PARAMETERS + unit % PER * UNIT_BYTES;
    }

    static MOEPACK_DEVICE constexpr int parameters_at(int group) {
        return WHOLE ? group / RECORD_GROUPS * RECORD + group % RECORD_GROUPS * GROUP_BYTES : 0;
    }

    // The parameters of rows 2 g and 2 g + 1.
    static MOEPACK_DEVICE float2 parameters(const u8* at) {
        u32 pair = *reinterpret_cast<const u32*>(at);
        if (HALVES) return {half_value(u16(pair)), half_value(u16(pair >> 16))};
        return {bf16_value(u16(pair)), bf16_value(u16(pair >> 16))};
    }

    // part = scale times a group's sum of codes times activations, added to the result of earlier groups.
    template <int N>
    static MOEPACK_DEVICE void scale(const u8* stage, int group, int lane, const float (*sum)[4], float (*part)[4]) {
        float2 scales = parameters(stage + parameters_at(group) + lane / 4 * 4);
#pragma unroll
        for (int i = 0; i < 4 * N; ++i) {
            float product = (i % 4 < 2 ? scales.x : scales.y) * sum[i / 4][i % 4];
            part[i / 4][i % 4] = group == 0 ? product : part[i / 4][i % 4] + product;
        }
    }

    // out += a chunk's part in each token's unit, plus offsets times sums of activations.
    template <int N>
    static MOEPACK_DEVICE void finish(const u8* stage, int lane, const float* notes, const float (&part)[N][4],
                                      float (*out)[4]) {
        notes += lane % 4 * 2 * NOTES;
#pragma unroll
        for (int i = 0; i < 4 * N; ++i)
            out[i / 4][i % 4] += notes[(i / 4 * 8 + i % 2) * NOTES] * part[i / 4][i % 4];
#pragma unroll
        for (int group = 0; group < SUMS; ++group) {
            float2 offsets = parameters(stage + parameters_at(group) + 32 + lane / 4 * 4);
#pragma unroll
            for (int i = 0; i < 4 * N; ++i)
                out[i / 4][i % 4] +=
                    (i % 4 < 2 ? offsets.x : offsets.y) * notes[(i / 4 * 8 + i % 2) * NOTES + 1 + group];
        }
    }

    // sum += a quad of rows 2 g and 2 g + 1 each, times a quad of tokens.
    static MOEPACK_DEVICE void multiply_quads(float (&sum)[4], const u32 (&first)[2], const u32 (&second)[2], u32 low,
                                              u32 high) {
        multiply_add(sum, first[0], second[0], first[1], second[1], low, high);
    }

    template <int N>
    static MOEPACK_DEVICE void multiply(const Lane& lane, const u8* stage, const u8* cells, int tokens,
                                        float (*out)[4]) {
        float part[N][4];
#if defined(__CUDACC__)
        if constexpr (TOGETHER) multiply_together<N>(lane, stage, cells, tokens, part);
        else
#endif
            multiply_alone<N>(lane, stage, cells, tokens, part);
        finish<N>(stage, lane.lane, reinterpret_cast<const float*>(cells + tokens * VALUE_BYTES), part, out);
    }

    template <int N>
    static MOEPACK_DEVICE void multiply_alone(const Lane& lane, const u8* stage, const u8* cells, int tokens,
                                              float (&part)[N][4]) {
        // Tokens that do not exist produce arbitrary values in their own columns.
        const u8* x = cells + lane.lane * 16;
        float sum[N][4] = {};
#pragma unroll
        for (int unit = 0; unit < UNITS; unit += Decoder::UNITS) {
            u32 quad[2][QUADS][2];
            decode(lane, stage + unit_at(unit), quad);
#pragma unroll
            for (int j = 0; j < QUADS; j += 2) {
                const u8* from = x + (unit + j / 2) * tokens * STEP_BYTES;
                int columns = unit * UNIT + (j + 1) * 16;
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    Quad b = *reinterpret_cast<const Quad*>(from + 8 * i * STEP_BYTES);
                    multiply_quads(sum[i], quad[0][j], quad[1][j], b.x, b.y);
                    if (WIDTH == 16) take<1>(stage, columns / WIDTH - 1, lane.lane, sum + i, part + i);
                    multiply_quads(sum[i], quad[0][j + 1], quad[1][j + 1], b.z, b.w);
                }
                columns += 16;
                if (columns % WIDTH == 0) take<N>(stage, columns / WIDTH - 1, lane.lane, sum, part);
            }
        }
    }

    // Applies `scale` and clears the sums.
    template <int N>
    static MOEPACK_DEVICE void take(const u8* stage, int group, int lane, float (*sum)[4], float (*part)[4]) {
        scale<N>(stage, group, lane, sum, part);
#pragma unroll
        for (int i = 0; i < 4 * N; ++i) sum[i / 4][i % 4] = 0;
    }

#if defined(__CUDACC__)
    // Multiplies a stage with a warpgroup. Tensor cores multiply while the next codes are decoded.
    template <int N>
    static MOEPACK_DEVICE void multiply_together(const Lane& lane, const u8* stage, const u8* cells, int tokens,
                                                 float (&part)[N][4]) {
        constexpr int OF_GROUP = WIDTH / 16;  // products
        Described b(cells, tokens);
        float sum[N][4] = {};
#pragma unroll
        for (int unit = 0; unit < UNITS; unit += Decoder::UNITS) {
            u32 quad[2][QUADS][2];
            decode(lane, stage + unit_at(unit), quad);
            u32(&operands)[4 * QUADS] = reinterpret_cast<u32(&)[4 * QUADS]>(quad);
#pragma unroll
            for (int j = 0; j < QUADS; ++j) {
                int product = unit * 2 + j;
                bool begins = product % OF_GROUP == 0;
                if (begins && product > 0) {
                    wait_products(sum);
                    scale<N>(stage, product / OF_GROUP - 1, lane.lane, sum, part);
                }
                if (begins || j == 0) begin_products(operands, sum);
                multiply_add(sum, quad[0][j][0], quad[1][j][0], quad[0][j][1], quad[1][j][1],
                             b.after(product * tokens * STEP_BYTES / 2), !begins);
            }
        }
        wait_products(sum);
        scale<N>(stage, GROUPS - 1, lane.lane, sum, part);
    }
#endif

    // Decodes the quads of rows 2 g and 2 g + 1.
    static MOEPACK_DEVICE void decode(const Lane& lane, const u8* units, u32 (&quad)[2][QUADS][2]) {
        u32 first[Decoder::WORDS], second[Decoder::WORDS];
#pragma unroll
        for (int i = 0; i < Decoder::WORDS; ++i) {
            const u8* at = units + Decoder::word(lane.lane, i) * REGISTER + lane.lane / 4 * 8;
            Pair words = *reinterpret_cast<const Pair*>(at);
            first[i] = words.x, second[i] = words.y;
        }
        lane.decoder.decode(first, quad[0]);
        lane.decoder.decode(second, quad[1]);
    }
};

}  // namespace moepack
