// Row blocks of coded integers decoded to f16 codes in the order of operand A, which cuda/coded_grouped.cu multiplies.
//
// Layout of a row block: the scales of its 16 rows, f32, then 512 bytes for every 16 columns. In these, lane 4 g + t of
// a warp has 16 bytes: the codes of columns t, 4 + t, 8 + t and 12 + t of row 2 g, then of row 2 g + 1.
//
// Codes are exact up to 2,048, and rounded to 11 bits above.
#pragma once
#include "common/ptx.cuh"

namespace moepack {

constexpr int HALVES_ROWS = 16, HALVES_COLUMNS = 16;
constexpr int HALVES_HEADER = HALVES_ROWS * 4, HALVES_GROUP = HALVES_ROWS * HALVES_COLUMNS * 2;

// Where the codes of column t and its three successors start in 16 columns.
MOEPACK_BOTH int halves_at(int row, int t) {
    return (row / 2 * 4 + t) * 16 + row % 2 * 8;
}

// The f16 codes of two symbols or halves, each the low byte of a half word: the factor, which is 1 or 2, times the
// symbol, plus the lowest code. All are given as f16 in both halves.
MOEPACK_BOTH u32 codes_of(u32 symbols, u32 factor, u32 lowest) {
    constexpr u32 EXPONENT = half2_integer(1024), NEGATIVE = half2_integer(-1024);
    return half2_fma(half2_add(symbols | EXPONENT, NEGATIVE), factor, lowest);
}

}  // namespace moepack
