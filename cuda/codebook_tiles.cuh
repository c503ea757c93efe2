// Tiles of rows of 4-bit codes into codebooks of whole rows (codebook.cuh) for products of warpgroups
// (common/tiles.cuh).
//
// Arithmetic: f16 products and f32 sums. 16-bit centroids are rounded to f16, by at most 2^-11 each. 8-bit centroids
// are exact, as are bfloat16 and f16 activations, and activations rounded to 8 bits, which are multiplied as codes.
// Scales are applied in f32 at the end.
//
// Decoding: a lane keeps the codebooks of its two rows in registers, as a plane of the high bytes of f16 and one of the
// low bytes. Three byte permutations look up four codes in a plane, and two more assemble f16 values. 8-bit centroids
// have one plane with an offset of 128, so that a byte under the exponent of 1024 is a number.
//
// Definitions: PLANES (bytes of a centroid), BITS (4).
#pragma once
#include "codebook.cuh"
#include "common/integers.cuh"
#include "common/tiles.cuh"

namespace moepack {

struct CodebookLinear {
    static constexpr int ENTRIES = 1 << BITS;
    static constexpr int PARAMETERS = PANEL * (4 + PLANES * (ENTRIES + 4));
    static constexpr int STAGE = PANEL * CHUNK / 8 * BITS, SUMS = 0, WIDTH = 0, SECOND = 1;
    static constexpr int STEP_BYTES = PANEL * STEP / 8 * BITS;
    // With one plane, steps of 64 columns are faster by a twentieth for up to 8 tokens; with two, they are slower.
    static constexpr int PARTS = PLANES == 1 ? 2 : 1, COLUMNS = PARTS * STEP, QUADS = 2;
    static constexpr bool FETCHES = true, STRIDED = false;
    static_assert(BITS == 4);

    struct Matrix {
        const u8* data;  // the first panel
        i64 block_bytes;
    };

    MOEPACK_BOTH static constexpr int quad(int product, int lane) {
        return product * 4 + lane;
    }

    // Data after the end of rows decodes to valid codes, which are multiplied by zeros.
    MOEPACK_BOTH static constexpr bool clears(i64) {
        return false;
    }

    struct Pieces {
        int first_at, first;
        static constexpr int second_at = 0, second = 0;

        MOEPACK_DEVICE Pieces(const Matrix& matrix, int chunk)
            : first_at(PARAMETERS + chunk * STAGE), first(least(STAGE, int(matrix.block_bytes) - first_at)) {}
    };

    struct Operands {
        int row, t;
        u32 at;  // the offset of this lane's codes in a stage
        Table<BITS> tables[PLANES][2];
        float2 scale;
        u32 asked[PLANES][2];  // for the next panel
        Pair asked_scale;
        u32 codes[PARTS][2];

        MOEPACK_DEVICE Operands(int warp, int lane)
            : row(lane / 4 * 2), t(lane % 4), at(warp * STAGE + row * 16 + t * 4) {
            hold(at);
        }

        // Starts to load the codebooks of a panel.
        MOEPACK_DEVICE void ask(const Matrix& matrix, i64 panel) {
            const u8* parameters = matrix.data + panel * matrix.block_bytes;
#pragma unroll
            for (int i = 0; i < 2 * PLANES; ++i)
                asked[i / 2][i % 2] = load_word(parameters + ((i / 2 * PANEL + row + i % 2) * 4 + t) * 4);
            asked_scale = load_pair(parameters + PLANES * PANEL * ENTRIES + 4 * row);
        }

        // Switches to the panel requested by `ask`. Each lane builds a quarter of each table.
        MOEPACK_DEVICE void enter() {
            scale = {__uint_as_float(asked_scale.x), __uint_as_float(asked_scale.y)};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 word[2];
                if (PLANES == 1) word[0] = asked[0][i] ^ 0x80808080;
                else to_planes(asked[0][i], asked[PLANES - 1][i], word[0], word[1]);
#pragma unroll
                for (int j = 0; j < 4 * PLANES; ++j)
                    tables[j / 4][i].word[j % 4] = __shfl_sync(~0u, word[j / 4], row / 2 * 4 + j % 4);
            }
        }

        // Converts planes of centroid bytes to planes of f16 bytes, four centroids at once.
        static MOEPACK_DEVICE void to_planes(u32 high, u32 low, u32& high_of, u32& low_of) {
            float value[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int shift = 24 - 8 * i;
                value[i] = float((int(high << shift) >> 24) * 256 + (int(low << shift) >> 24));
            }
            u32 first = to_half2(value[0], value[1]), second = to_half2(value[2], value[3]);
            high_of = permute(first, second, 0x7531), low_of = permute(first, second, 0x6420);
        }

        MOEPACK_DEVICE void fetch(const u8* stage, int step) {
#pragma unroll
            for (int i = 0; i < 2 * PARTS; ++i) {
                const u8* from = stage + at + (step * PARTS + i / 2) * STEP_BYTES + 16 * (i % 2);
                codes[i / 2][i % 2] = *reinterpret_cast<const u32*>(from);
            }
        }

        MOEPACK_DEVICE void decode(u32 (&quads)[PARTS][2][QUADS][2]) const {
#pragma unroll
            for (int i = 0; i < 2 * PARTS; ++i)
                decode(codes[i / 2][i % 2], tables[0][i % 2], tables[PLANES - 1][i % 2], quads[i / 2][i % 2]);
        }

        // The quads of a row: codes alternate between columns c and c + 16.
        static MOEPACK_DEVICE void decode(u32 codes, const Table<BITS>& high, const Table<BITS>& low,
                                          u32 (&quads)[QUADS][2]) {
            Selector<BITS> selector(codes);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                u32 bytes = selector.bytes(high, pair);
                if (PLANES == 2) {
                    u32 lower = selector.bytes(low, pair);
                    quads[0][pair] = permute(lower, bytes, 0x6240), quads[1][pair] = permute(lower, bytes, 0x7351);
                } else {
                    constexpr u32 ZERO = half2_integer(-1024 - 128);
                    quads[0][pair] = half2_add(permute(bytes, EXPONENT, 0x5250), ZERO);
                    quads[1][pair] = half2_add(permute(bytes, EXPONENT, 0x5351), ZERO);
                }
            }
        }

        // Scales for the values made by `decode`: high bytes count 256.
        MOEPACK_DEVICE float2 row_scales() const {
            float unit = PLANES == 1 ? 256 : 1;
            return {scale.x * unit, scale.y * unit};
        }
    };
};

}  // namespace moepack
