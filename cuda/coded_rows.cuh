// The values of coded rows: notes and scales of row blocks, and what `dequantize` writes.
#pragma once
#include "coded_block.cuh"

namespace moepack {

#if defined(__CUDACC__)
// The layout's entry for a row block.
struct BlockNote {
    u32 word;

    MOEPACK_DEVICE int table() const {
        return word & 63;
    }

    // The code of symbol 0, or of half 0.
    MOEPACK_DEVICE int lowest() const {
        return int(word << 16) >> 24;
    }

    MOEPACK_DEVICE bool dependent() const {
        return DEPENDENT && word >> 16 & 1;
    }

    // The factor from symbols or halves to codes.
    MOEPACK_DEVICE int factor() const {
        return dependent() ? 2 : 1;
    }
};

MOEPACK_DEVICE float scale_of_row(const CodedMatrix& matrix, int expert, int rows, int row) {
    return matrix.scales[matrix.row_scales ? i64(expert) * rows + row : 0];
}

// Column scales, either shared by all experts or separate for each.
struct ColumnScales {
    const float* first;  // null if there are none
    int stride;          // between experts; 0 if shared

    MOEPACK_DEVICE const float* of(i64 expert) const {
        return first ? first + expert * stride : nullptr;
    }
};

// The output positions of a thread's two rows of a row block.
struct Rows {
    i64 to[2];  // negative: the row does not exist
    float scale[2];
    const float* scales;  // column scales, or null
    int columns, wide;
    BlockNote note;
    void* out;

    // `out` starts with the first row of expert `first`.
    MOEPACK_DEVICE Rows(const CodedProblem& problem, const CodedMatrix& matrix, const ColumnScales& of_columns,
                        i64 block, i64 first, int columns, int wide, void* out)
        : columns(columns), wide(wide), note{matrix.blocks[block]}, out(out) {
        int expert = int(block / problem.blocks.by), line = int(block % problem.blocks.by) * CODED_BLOCK;
        scales = of_columns.of(expert);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int row = line + threadIdx.x % WARP / 4 + 8 * i;
            to[i] = row < problem.rows ? ((expert - first) * problem.rows + row) * columns : -1;
            scale[i] = scale_of_row(matrix, expert, problem.rows, least(row, problem.rows - 1));
        }
    }

    // The scale of a column in range.
    MOEPACK_DEVICE float scale_of_column(int column) const {
        return scales ? __ldg(scales + column) : 1.0f;
    }

    // Writes the symbols of 16 columns as returned by `Lanes::decode`. The four lanes of a row exchange values, so that
    // each writes four neighboring ones.
    MOEPACK_DEVICE void put(const u32 (&a)[4], int column) const {
        int t = threadIdx.x % 4, factor = note.factor(), lowest = note.lowest();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float value[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 symbol = a[i + j / 2 * 2] >> j % 2 * 16 & 0xffff;
                value[j] = scale[i] * float(int(symbol) * factor + lowest);
                if (scales) value[j] *= scale_of_column(least(column + 4 * j + t, columns - 1));
            }
            turn<2>(value, t), turn<1>(value, t);
            store_four(i, column + 4 * t, value);
        }
    }

    // A step of the transposition of four lanes' values: exchanges those whose lane and index differ in bit DISTANCE.
    template <int DISTANCE>
    static MOEPACK_DEVICE void turn(float (&value)[4], int t) {
        bool upper = t & DISTANCE;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j & DISTANCE) continue;
            float low = value[j], high = value[j + DISTANCE];
            float received = __shfl_xor_sync(~0u, upper ? low : high, DISTANCE);
            value[j] = upper ? received : low, value[j + DISTANCE] = upper ? high : received;
        }
    }

    MOEPACK_DEVICE void store_four(int i, int column, const float (&value)[4]) const {
        if (to[i] < 0) return;
        i64 at = to[i] + column;
        if (columns % 4 == 0 && column < columns && wide) {
            *reinterpret_cast<float4*>(static_cast<float*>(out) + at) = {value[0], value[1], value[2], value[3]};
        } else if (columns % 4 == 0 && column < columns) {
            Pair pair = {to_bf16x2(value[0], value[1]), to_bf16x2(value[2], value[3])};
            *reinterpret_cast<Pair*>(static_cast<u16*>(out) + at) = pair;
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (column + j < columns) store_value(out, at + j, value[j], wide);
        }
    }

    // Applies corrections: f16 holds a code's symbol exactly, and bf16 is precise enough to recover it.
    MOEPACK_DEVICE void correct(const u32* corrections, u32 at, u32 end, int first) const {
        for (; at < end; ++at) {
            u32 correction = corrections[at], place = correction & 0xffff;
            int column = first + (place & 0xfff);
            i64 at_row = place >> 15 ? to[1] : to[0];
            float step = place >> 15 ? scale[1] : scale[0], more = scale_of_column(column);
            if (int(place >> 12 & 7) != threadIdx.x % WARP / 4 || column % 4 != threadIdx.x % 4) continue;
            // The value is zero for any code, so the code cannot be recovered.
            if (at_row < 0 || step == 0 || more == 0) continue;
            float old = wide ? static_cast<const float*>(out)[at_row + column]
                             : bf16_value(static_cast<const u16*>(out)[at_row + column]);
            float code = rintf(old / step / more);
            for (; at < end && (corrections[at] & 0xffff) == place; ++at)
                code += half_value(u16(corrections[at] >> 16)) * (note.factor() * 16777216.0f);
            --at;
            store_value(out, at_row + column, step * code * more, wide);
        }
    }
};
#endif

}  // namespace moepack
