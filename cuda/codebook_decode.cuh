// Decoding of codebook weights to values. Definitions: BITS, PLANES.
#pragma once
#include "codebook.cuh"
#include "common/layer.cuh"

namespace moepack {

#if defined(__CUDACC__)
constexpr int ENTRIES = 1 << BITS;

// A row of a matrix, numbered over all experts.
template <class Matrix>
struct CodebookRow {
    const Matrix& matrix;
    const u8* panel;
    int place;

    MOEPACK_DEVICE CodebookRow(const Matrix& matrix, int rows, i64 row) : matrix(matrix) {
        i64 expert = row / rows;
        int in_expert = int(row - expert * rows);
        panel = matrix.data + (expert * ceil_div(rows, PANEL) + in_expert / PANEL) * matrix.panel_bytes;
        place = in_expert % PANEL;
    }

    MOEPACK_DEVICE float value(int column) const {
        int chunk = column / CHUNK, block = matrix.block_of(chunk);
        const u8 *codes = panel + matrix.codes_at(chunk), *books = panel + matrix.block_at(block);
        u32 code = code_of<BITS>(codes, place, column % CHUNK);
        int centroid = static_cast<signed char>(books[place * ENTRIES + code]) * 256;
        if (PLANES == 2) centroid += static_cast<signed char>(books[(PANEL + place) * ENTRIES + code]);
        const float* scales = reinterpret_cast<const float*>(books + PLANES * PANEL * ENTRIES);
        return __fmul_rn(scales[place], float(centroid));
    }
};

// Writes the 32 columns of a chunk that lane t of four multiplies, four neighboring columns at a time.
template <class Matrix>
MOEPACK_DEVICE void store_codes(const CodebookRow<Matrix>& row, int chunk, int t, int columns, int wide, i64 at, void* out) {
    const u8* books = row.panel + row.matrix.block_at(row.matrix.block_of(chunk));
    const u8 *high = books + row.place * ENTRIES, *low = high + PANEL * ENTRIES;
    float scale = reinterpret_cast<const float*>(books + PLANES * PANEL * ENTRIES)[row.place];
    u32 step[4];
    codes_of<BITS>(row.panel + row.matrix.codes_at(chunk), row.place, t, step);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int column = chunk * CHUNK + (BITS == 2 ? t * 32 + i * 4 : i * 16 + t * 4);
        float value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 code = step[i / 2] >> (8 * j + i % 2 * 4) & (ENTRIES - 1);
            int centroid = static_cast<signed char>(high[code]) * 256;
            if (PLANES == 2) centroid += static_cast<signed char>(low[code]);
            value[j] = __fmul_rn(scale, float(centroid));
        }
        if (columns % 4 == 0 && column < columns && wide) {
            *reinterpret_cast<float4*>(static_cast<float*>(out) + at + column) = {value[0], value[1], value[2], value[3]};
        } else if (columns % 4 == 0 && column < columns) {
            Pair pair = {to_bf16x2(value[0], value[1]), to_bf16x2(value[2], value[3])};
            *reinterpret_cast<Pair*>(static_cast<u16*>(out) + at + column) = pair;
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (column + j < columns) store_value(out, at + column + j, value[j], wide);
        }
    }
}
#endif

}  // namespace moepack
