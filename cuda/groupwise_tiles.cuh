// Tiles of rows of group-wise integers (groupwise.cuh) for products of warpgroups (common/tiles.cuh).
//
// The definitions are the same as for groupwise.cuh.
#pragma once
#include "common/tiles.cuh"
#include "groupwise.cuh"

namespace moepack {

struct GroupwiseLinear : Groupwise {
    static constexpr int SECOND = 2;
    // Steps of 32 or 64 columns.
    static constexpr int STEP_UNITS = WIDTH >= 64 ? 2 : 1, COLUMNS = STEP_UNITS * UNIT;
    static constexpr int PARTS = COLUMNS / 16 / QUADS;
    static constexpr bool FETCHES = false, STRIDED = false;

    // Data after the end of rows is multiplied by zeros, so its scales must be finite.
    MOEPACK_BOTH static constexpr bool clears(i64 block_bytes) {
        return WHOLE && block_bytes % STAGE != 0;
    }

    // The byte ranges of a chunk of a row block: codes and parameters, in one piece or two.
    struct Pieces {
        int first_at, first, second_at, second;

        MOEPACK_DEVICE Pieces(const Matrix& matrix, int chunk) {
            int bytes = int(matrix.block_bytes);
            if (WHOLE) {
                first_at = chunk * STAGE, first = least(STAGE, bytes - first_at), second_at = second = 0;
            } else {
                int unit = chunk * UNITS, record = GROUP == 0 ? 0 : unit / most(RECORD_UNITS, 1);
                int in_record = unit - record * RECORD_UNITS;
                int group = GROUP == 0 ? 0 : in_record * UNIT / most(GROUP, 1);
                first_at = record * RECORD + group * GROUP_BYTES, first = REGISTER;
                second_at = record * RECORD + PARAMETERS + in_record * UNIT_BYTES;
                second = least(UNITS * UNIT_BYTES, bytes - second_at);
            }
        }
    };

    struct Operands {
        int block;  // the offset of this lane's rows in a stage
        Lane lane;
        u32 words[Decoder::WORDS];  // their offsets in a unit

        MOEPACK_DEVICE Operands(int warp, int lane) : block(warp * STAGE + lane / 4 * 4), lane(lane) {
#pragma unroll
            for (int i = 0; i < Decoder::WORDS; ++i) {
                words[i] = warp * STAGE + Decoder::word(lane, i) * REGISTER + lane / 4 * 8;
                hold(words[i]);
            }
        }

        MOEPACK_DEVICE void ask(const Matrix&, i64) {}
        MOEPACK_DEVICE void enter() {}

        MOEPACK_DEVICE void decode(const u8* stage, int step, u32 (&quads)[PARTS][2][QUADS][2]) const {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                u32 first[Decoder::WORDS], second[Decoder::WORDS];
                int unit = step * STEP_UNITS + part * Decoder::UNITS;
#pragma unroll
                for (int i = 0; i < Decoder::WORDS; ++i) {
                    Pair pair = *reinterpret_cast<const Pair*>(stage + words[i] + unit_at(unit));
                    first[i] = pair.x, second[i] = pair.y;
                }
                lane.decoder.decode(first, quads[part][0]);
                lane.decoder.decode(second, quads[part][1]);
            }
        }

        MOEPACK_DEVICE float2 scales(const u8* stage, int group) const {
            return parameters(stage + block + parameters_at(group));
        }

        MOEPACK_DEVICE float2 offsets(const u8* stage, int group) const {
            return parameters(stage + block + parameters_at(group) + 32);
        }
    };
};

}  // namespace moepack
