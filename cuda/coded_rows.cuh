// The values of coded rows: notes and scales of row blocks, and what `dequantize` and `decode_halves` write.
#pragma once
#include "coded_block.cuh"
#include "coded_halves.cuh"

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

// The outputs of a thread's two rows of a row block.
struct Rows {
    u8* to[2];  // null: the row does not exist
    float scale[2];
    float factor, offset;  // a code is the factor times ABOVE plus the symbol, plus the offset
    u32 far, near;         // selectors of the transposition
    const float* scales;   // column scales, or null; padded to whole groups
    int columns, wide;
    BlockNote note;

    // `out` starts with the first row of expert `first`.
    MOEPACK_DEVICE Rows(const CodedProblem& problem, const CodedMatrix& matrix, const ColumnScales& of_columns,
                        i64 block, i64 first, int columns, int wide, void* out)
        : columns(columns), wide(wide), note{matrix.blocks[block]} {
        int expert = int(block / problem.blocks.by), line = int(block % problem.blocks.by) * CODED_BLOCK;
        scales = of_columns.of(expert);
        factor = float(note.factor()), offset = float(note.lowest()) - ABOVE * factor;
        far = far_selector(threadIdx.x), near = near_selector(threadIdx.x);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int row = line + threadIdx.x % WARP / 4 + 8 * i;
            i64 at = ((expert - first) * problem.rows + row) * columns * (wide ? 4 : 2);
            to[i] = row < problem.rows ? static_cast<u8*>(out) + at : nullptr;
            scale[i] = scale_of_row(matrix, expert, problem.rows, least(row, problem.rows - 1));
        }
    }

    // The scale of a column in range.
    MOEPACK_DEVICE float scale_of_column(int column) const {
        return scales ? __ldg(scales + column) : 1.0f;
    }

    // Writes the symbols of 16 columns as returned by `Lanes::decode`. The four lanes of a row exchange symbols, so that
    // each writes four neighboring ones. Codes are exact. PLAIN: whether `is_plain`.
    template <bool PLAIN>
    MOEPACK_DEVICE void put(const u32 (&a)[4], int column) const {
        column += threadIdx.x % 4 * 4;
        float4 more = scales ? __ldg(reinterpret_cast<const float4*>(scales + column)) : float4{1, 1, 1, 1};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 symbols = symbols_of_row(a, i);
            symbols = permute(symbols, __shfl_xor_sync(~0u, symbols, 2), far);
            symbols = permute(symbols, __shfl_xor_sync(~0u, symbols, 1), near);
            float value[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                value[j] *= scale[i] * fmaf(__uint_as_float(bits_above(symbols, j)), factor, offset);
            }
            if (!PLAIN) {
                store_four(i, column, value);
            } else if (to[i] && column < columns) {
                uint2 pair = {to_bf16x2(value[0], value[1]), to_bf16x2(value[2], value[3])};
                __stwb(reinterpret_cast<uint2*>(to[i] + 2 * column), pair);
            }
        }
    }

    // Writes the columns of a chunk, which next(a) decodes sixteen at a time.
    template <class Next>
    MOEPACK_DEVICE void put_chunk(int first, int end, Next next) const {
        if (is_plain()) put_columns<true>(first, end, next);
        else put_columns<false>(first, end, next);
    }

    template <bool PLAIN, class Next>
    MOEPACK_DEVICE void put_columns(int first, int end, Next next) const {
        for (int column = first; column < end; column += CODED_GROUP) {
            u32 a[4];
            next(a);
            put<PLAIN>(a, column);
        }
    }

    // Whether outputs are bfloat16 and four columns lie in a word of 8 bytes.
    MOEPACK_DEVICE bool is_plain() const {
        return columns % 4 == 0 && !wide;
    }

    MOEPACK_DEVICE void store_four(int i, int column, const float (&value)[4]) const {
        if (!to[i]) return;
        if (columns % 4 == 0 && column < columns && wide) {
            *reinterpret_cast<float4*>(to[i] + 4 * column) = {value[0], value[1], value[2], value[3]};
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (column + j < columns) store_value(to[i], column + j, value[j], wide);
        }
    }

    // Applies corrections: f16 holds a code's symbol exactly, and bf16 is precise enough to recover it.
    MOEPACK_DEVICE void correct(const u32* corrections, u32 at, u32 end, int first) const {
        for (; at < end; ++at) {
            u32 correction = corrections[at], place = correction & 0xffff;
            int column = first + (place & 0xfff);
            u8* row = place >> 15 ? to[1] : to[0];
            float step = place >> 15 ? scale[1] : scale[0], more = scale_of_column(column);
            if (int(place >> 12 & 7) != threadIdx.x % WARP / 4 || column % 4 != threadIdx.x % 4) continue;
            // The value is zero for any code, so the code cannot be recovered.
            if (!row || step == 0 || more == 0) continue;
            float old = wide ? reinterpret_cast<const float*>(row)[column]
                             : bf16_value(reinterpret_cast<const u16*>(row)[column]);
            float code = rintf(old / step / more);
            for (; at < end && (corrections[at] & 0xffff) == place; ++at)
                code += half_value(u16(corrections[at] >> 16)) * (note.factor() * 16777216.0f);
            --at;
            store_value(row, column, step * code * more, wide);
        }
    }
};

// The f16 codes of a thread's two rows of a row block (coded_halves.cuh).
static_assert(HALVES_ROWS == CODED_BLOCK && HALVES_COLUMNS == CODED_GROUP);

struct Halves {
    u8* block;
    u8* to;  // codes of the first row in the first 16 columns; the second row is half a group later
    BlockNote note;
    u32 factor, lowest;

    MOEPACK_DEVICE Halves(u8* block, BlockNote note)
        : block(block), to(block + HALVES_HEADER + halves_at(threadIdx.x % WARP / 4, threadIdx.x % 4)), note(note) {
        float whole = float(note.lowest()), by = float(note.factor());
        factor = to_half2(by, by), lowest = to_half2(whole, whole);
    }

    // Writes the symbols of 16 columns as returned by `Lanes::decode`.
    MOEPACK_DEVICE void put(const u32 (&a)[4], int column) const {
        u8* at = to + column / CODED_GROUP * HALVES_GROUP;
        Pair first = {codes_of(a[0], factor, lowest), codes_of(a[2], factor, lowest)};
        Pair second = {codes_of(a[1], factor, lowest), codes_of(a[3], factor, lowest)};
        *reinterpret_cast<Pair*>(at) = first, *reinterpret_cast<Pair*>(at + HALVES_GROUP / 2) = second;
    }

    // Writes the columns of a chunk, which next(a) decodes sixteen at a time.
    template <class Next>
    MOEPACK_DEVICE void put_chunk(int first, int end, Next next) const {
        for (int column = first; column < end; column += CODED_GROUP) {
            u32 a[4];
            next(a);
            put(a, column);
        }
    }

    // Writes the scales of the rows that exist; called by a warp.
    MOEPACK_DEVICE void scale(const CodedMatrix& matrix, int expert, int rows, int line) const {
        int row = threadIdx.x % WARP;
        bool exists = line + row < rows;
        if (row >= CODED_BLOCK) return;
        reinterpret_cast<float*>(block)[row] = exists ? scale_of_row(matrix, expert, rows, line + row) : 0.0f;
    }

    // Adds the corrections of a segment that starts at a column. Each is of another code.
    MOEPACK_DEVICE void correct(const u32* corrections, u32 at, u32 end, int first) const {
        for (at += threadIdx.x % WARP; at < end; at += WARP) {
            u32 correction = corrections[at];
            int row = correction >> 12 & 15, column = first + int(correction & 0xfff), within = column % CODED_GROUP;
            u8* group = block + HALVES_HEADER + column / CODED_GROUP * HALVES_GROUP;
            u16* code = reinterpret_cast<u16*>(group + halves_at(row, within % 4)) + within / 4;
            float more = half_value(u16(correction >> 16)) * (note.factor() * 16777216.0f);
            *code = u16(to_half2(half_value(*code) + more, 0));
        }
    }
};
#endif

}  // namespace moepack
