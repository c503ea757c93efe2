// Tiles of rows of decoded integers (coded_halves.cuh) for products of warpgroups (common/tiles.cuh).
#pragma once
#include "coded_halves.cuh"
#include "common/tiles.cuh"

namespace moepack {

struct CodedTiles {
    static constexpr int STAGE = CHUNK / HALVES_COLUMNS * HALVES_GROUP, SUMS = 0, WIDTH = 0, SECOND = 1;
    static constexpr int PARTS = 2, QUADS = 2, COLUMNS = PARTS * QUADS * HALVES_COLUMNS;
    static constexpr bool FETCHES = false, STRIDED = true;

    struct Matrix {
        const u8* data;  // the first row block
        i64 block_bytes;
    };

    MOEPACK_BOTH static constexpr int quad(int product, int lane) {
        return product * 4 + lane;
    }

    // Data after the end of rows is multiplied by zeros, so it must be finite.
    MOEPACK_BOTH static constexpr bool clears(i64 block_bytes) {
        return (block_bytes - HALVES_HEADER) % STAGE != 0;
    }

    struct Pieces {
        int first_at, first;
        static constexpr int second_at = 0, second = 0;

        MOEPACK_DEVICE Pieces(const Matrix& matrix, int chunk)
            : first_at(HALVES_HEADER + chunk * STAGE), first(least(STAGE, int(matrix.block_bytes) - first_at)) {}
    };

    struct Operands {
        int row;
        u32 at;  // the offset of this lane's codes in a stage
        Pair asked;
        float2 scale;

        MOEPACK_DEVICE Operands(int warp, int lane) : row(lane / 4 * 2), at(warp * STAGE + lane * 16) {
            hold(at);
        }

        // Starts to load the scales of a row block.
        MOEPACK_DEVICE void ask(const Matrix& matrix, i64 block) {
            asked = load_pair(matrix.data + block * matrix.block_bytes + 4 * row);
        }

        MOEPACK_DEVICE void enter() {
            scale = {__uint_as_float(asked.x), __uint_as_float(asked.y)};
        }

        MOEPACK_DEVICE void decode(const u8* stage, int step, u32 (&quads)[PARTS][2][QUADS][2]) const {
#pragma unroll
            for (int i = 0; i < PARTS * QUADS; ++i) {
                const u8* from = stage + at + (step * PARTS * QUADS + i) * HALVES_GROUP;
                Quad codes = *reinterpret_cast<const Quad*>(from);
                u32(&part)[2][QUADS][2] = quads[i / QUADS];
                part[0][i % QUADS][0] = codes.x, part[0][i % QUADS][1] = codes.y;
                part[1][i % QUADS][0] = codes.z, part[1][i % QUADS][1] = codes.w;
            }
        }

        MOEPACK_DEVICE float2 row_scales() const {
            return scale;
        }
    };
};

}  // namespace moepack
