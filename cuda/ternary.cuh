// The codes of ternary rows, eight at once: the decoding by a single lane of a kernel, or by a host compiler.
//
// A *word* is the string of weights that a code represents. A table has an entry for each:
//
//   two slots:    position 1 :8 | position 2 :8               | length :8 | kind 1 :2 at 30, kind 2 :2 at 28
//   three slots:  position 1 :5, kind 1 :2 at 6 | the same of 2 | length :8 | the same of 3
//
// A kind is the upper two bits of a float: 0 is 0.0 (unused), 1 is 2.0 (symbol 2), 3 is -2.0 (symbol 1). A mask
// therefore converts it to a factor, and a weight is `factor * (odd + factor * even)` with odd = (second - first) / 4
// and even = (first + second) / 8 of the row's levels. Positions and lengths are bytes, because dp4a multiplies one by
// the bytes per column and adds it to an address.
//
// The entry of an FSV8 code has the index `code << 3 | previous code >> 5`: in a little-endian stream these are 11
// consecutive bits. Tables with two class bits store each entry twice.
#pragma once
#include "common/ptx.cuh"

namespace moepack {

constexpr int CODES = 8;           // decoded by a lane at once
constexpr int CHUNK = 32;          // codes per stored column
constexpr u32 TABLE_BYTES = 8192;  // per FSV8 dictionary

MOEPACK_BOTH float float_of(u32 bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
#endif
}

// The entry in the table at byte `table` of `memory` whose index is in bits `at` + 2 and up of `stream`.
MOEPACK_BOTH u32 entry_of(const u8* memory, u32 table, u32 stream, int at) {
    return *reinterpret_cast<const u32*>(memory + and_or(stream >> at, TABLE_BYTES - 4, table));
}

// The entries of eight FSV8 codes, in two words, after the code `previous`. A table is aligned to its size.
MOEPACK_BOTH void look_up(const u8* memory, u32 table, Pair codes, u32 previous, u32 (&entry)[CODES]) {
    u32 stream[3] = {codes.x << 8 | previous, permute(codes.x, codes.y, 0x5432), codes.y >> 8};
    for (int i = 0; i < CODES; ++i) entry[i] = entry_of(memory, table, stream[i / 3], 3 + 8 * (i % 3));
}

// `at` plus the length of a word times `step`.
MOEPACK_BOTH u32 behind(u32 entry, u32 step, u32 at) {
    return dot4(entry, step << 16, at);
}

struct Levels {
    float odd, even;
};

MOEPACK_BOTH Levels levels(float first, float second) {
    return {(second - first) * 0.25f, (first + second) * 0.125f};
}

// The weight for a kind, given in the upper two bits.
MOEPACK_BOTH float weight(u32 kind, Levels levels) {
    float factor = float_of(kind & 0xc0000000u);
#if defined(__CUDA_ARCH__)
    return factor * fmaf(factor, levels.even, levels.odd);
#else
    return factor * (levels.odd + factor * levels.even);
#endif
}

// Calls add(address, kind) for each slot of a word whose first weight has address `at`, with `step` bytes per column.
template <int SLOTS, class Add>
MOEPACK_BOTH void each_slot(u32 entry, u32 step, u32 at, Add add) {
    if (SLOTS == 2) {
        add(dot4(entry, step, at), entry);
        add(dot4(entry, step << 8, at), entry << 2);
    } else {
        u32 positions = entry & 0x1f001f1f;
        add(dot4(positions, step, at), entry << 24);
        add(dot4(positions, step << 8, at), entry << 16);
        add(dot4(positions, step << 24, at), entry);
    }
}

}  // namespace moepack
