// Codes into codebooks as operand A of m16n8k32: two table lookups by byte permutation for every four codes.
//
// A lane (g, t) has rows 2 g and 2 g + 1 of a panel. In each step of 32 columns it takes eight codes per row, one
// nibble each. The nibbles of a word select bytes of a table of eight; for 16 entries, bit 3 selects one of two tables.
// Codes alternate between two runs of four neighboring columns, whose activations are stored in that order (`Place`):
//
//     bits  chunk                         step s of lane t: columns
//     4     4 steps of 256 bytes          32 s + 4 t + 0 to 3 and 16 more
//     3     3 registers of 256 bytes      the same: registers A, B, C are steps 0 to 2, their spare bits step 3
//     2     8 lines of 64 bytes           line 2 t + s / 2, columns 8 (s % 2) + 0 to 3 and 4 more
#pragma once
#include "common/ptx.cuh"

namespace moepack {

constexpr int PANEL = 16;

// Four of the eight bytes of (a, b), selected by the four low nibbles of the selector, which must be less than 8;
// `permute` masks them instead.
MOEPACK_BOTH u32 choose(u32 a, u32 b, u32 selector) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
#else
    return permute(a, b, selector);
#endif
}

// Bits of b where the mask is one, otherwise bits of a.
MOEPACK_BOTH u32 blend(u32 a, u32 b, u32 mask) {
    return (a & ~mask) | (b & mask);
}

// A table of bytes, indexed by nibbles.
template <int WIDTH>
struct Table {
    static constexpr int WORDS = WIDTH == 4 ? 4 : WIDTH == 3 ? 2 : 1;
    u32 word[WORDS];
};

// Selects table bytes for eight codes.
template <int WIDTH>
struct Selector {
    u32 low, upper[2];  // indices into tables of eight; for 4 bits, masks of codes that select the second

    MOEPACK_BOTH explicit Selector(u32 codes) : low(codes), upper{0, 0} {
        if (WIDTH == 4) {
            u32 even = codes << 4;
            low = codes & 0x77777777;
            upper[0] = signs(even, codes, 0x5140), upper[1] = signs(even, codes, 0x7362);
        }
    }

    // The bytes of codes 0 to 3 (part 0) or 4 to 7 (part 1).
    MOEPACK_BOTH u32 bytes(const Table<WIDTH>& table, int part) const {
        u32 entries = low >> 16 * part;
        if (WIDTH == 2) return choose(table.word[0], 0, entries);
        u32 first = choose(table.word[0], table.word[Table<WIDTH>::WORDS > 1], entries);
        if (WIDTH == 3) return first;
        u32 second = choose(table.word[2 % Table<WIDTH>::WORDS], table.word[3 % Table<WIDTH>::WORDS], entries);
        return blend(first, second, upper[part]);
    }
};

// The code at a row and a column of a chunk.
template <int WIDTH>
MOEPACK_BOTH u32 code_of(const u8* chunk, int row, int column) {
    if (WIDTH == 4) return chunk[column / 32 * 256 + row * 16 + column % 16] >> column / 16 % 2 * 4 & 15;
    if (WIDTH == 3) {
        const u8* own = chunk + row / 4 * 192 + row % 4 * 16 + column % 16;
        int group = column / 16;
        if (group < 6) return own[group / 2 * 64] >> group % 2 * 3 & 7;
        return own[(group - 6) * 64] >> 6 | (own[128] >> (group - 2) & 4);
    }
    u32 byte = chunk[column / 16 * 64 + column % 4 * 16 + row];
    int place = column % 16 / 4;
    return (byte >> place & 1) | (byte >> (3 + place) & 2);
}

// The codes of a chunk of 128 columns that lane t takes from row `row`, as nibbles of four steps.
template <int WIDTH>
MOEPACK_BOTH void codes_of(const u8* chunk, int row, int t, u32 (&step)[4]) {
    const u32* words = reinterpret_cast<const u32*>(chunk);
    if (WIDTH == 4) {
        for (int s = 0; s < 4; ++s) step[s] = words[s * 64 + row * 4 + t];
    } else if (WIDTH == 3) {
        // Groups of four rows, each with three registers.
        const u32* own = words + row / 4 * 48 + row % 4 * 4 + t;
        u32 a = own[0], b = own[16], c = own[32], first[3] = {a, b, c};
        for (int s = 0; s < 3; ++s) step[s] = and_or(first[s] << 1, 0x70707070, first[s] & 0x07070707);
        step[3] = and_or(b >> 2, 0x30303030, a >> 6 & 0x03030303);
        step[3] |= and_or(c >> 1, 0x40404040, c >> 4 & 0x04040404);
    } else {
        const u8* line = chunk + 2 * t * 64 + row;
        for (int i = 0; i < 2; ++i, line += 64) {
            u32 codes = line[0] | line[16] << 8 | line[32] << 16 | u32(line[48]) << 24;
            for (int s = 0; s < 2; ++s, codes >>= 2)
                step[2 * i + s] = (codes & 0x21212121) | and_or(codes >> 3, 0x02020202, codes << 3 & 0x10101010);
        }
    }
}

}  // namespace moepack
