// Coded integers as decoded by a thread: two lanes of a row block, each a chain of symbols (docs/format.md, section 9).
//
// A state is 256 high + low, with a one in its third byte. The table entry for slot `low` has the bytes 0, frequency,
// slot - start, symbol. One byte dot product therefore performs the whole step, and another computes the entry's
// address: tables are stored in interleaved copies, and lanes read different ones. If the state falls below 256, it
// takes a byte of its lane from a window of four bytes, which is refilled every four symbols.
//
// For dependent codes, the symbol's byte is instead the half of the code that its index has in even states, 2 index +
// 64, with the parity of the index in bit 7. Tables of plain codes work as well: they are paths through state 0.
//
// Instructions per symbol: 6, about 2 to refill windows, 0.5 to convert the symbol to f16, 1.75 to follow paths.
#pragma once
#include "paths.cuh"

namespace moepack {

constexpr u32 ONE = 0x10000;           // the third byte of a state
constexpr u32 FULL = ONE + 256;        // a state below this takes a byte
constexpr u32 TAKE = 0x3204;           // selector of {state, window} that shifts in the window's first byte
constexpr int CODED_BLOCK = 16;        // rows of a row block
constexpr int CODED_LANES = 64;        // per row block
constexpr int CODED_CHUNK = 256;       // columns per chunk
constexpr int CODED_GROUP = 16;        // columns per product
constexpr int STATES_BYTES = 2 * CODED_LANES;
constexpr int SLOTS = 256;

MOEPACK_BOTH u32 load_shared(Shared from) {
    u32 word;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
#else
    std::memcpy(&word, from, 4);
#endif
    return word;
}

// The copy of a table that a lane reads: its first entry, and the stride between entries in bytes.
struct Copies {
    Shared first;
    u32 stride;

    MOEPACK_BOTH u32 entry(u32 state) const {
#if defined(__CUDA_ARCH__)
        return load_shared(dot4(state, stride, first));
#else
        return load_shared(first + (state & 255) * stride);
#endif
    }
};

// A lane. `bits` is the position of the window in {low, high}, modulo 32; its higher bits are arbitrary.
struct Chain {
    u32 state, window, low, high, bits;
    Shared next;  // the word after `high`

    // Starts at byte `offset` of a word.
    MOEPACK_BOTH void enter(Shared word, u32 offset) {
        low = load_shared(word), high = load_shared(word + 4);
        next = word + 8, bits = 8 * offset;
        window = slide(bits);
    }

    MOEPACK_BOTH u32 slide(u32 by) const {
#if defined(__CUDA_ARCH__)
        return __funnelshift_r(low, high, by);
#else
        return u32((u64(high) << 32 | low) >> (by % 32));
#endif
    }

    // Decodes a symbol; `taken` is TAKE plus the bytes taken since the window was filled. `one` is 1 but unknown to the
    // compiler, so that multiplications by it keep work off the integer pipe.
    MOEPACK_BOTH void step(u32 entry, u32& taken, u32 one) {
        state = dot4(state, entry, ONE);
#if defined(__CUDA_ARCH__)
        asm("{.reg .pred p; setp.lt.u32 p, %0, %3; @p prmt.b32 %0, %0, %2, %1; @p mad.lo.u32 %1, %4, %4, %1;}"
            : "+r"(state), "+r"(taken)
            : "r"(window), "n"(FULL), "r"(one));
#else
        if (state < FULL) state = permute(state, window, taken), taken += one;
#endif
    }

    // Refills the window. 8 TAKE is 32 more than a multiple of 64, so bit 5 flips unless a word was used up.
    MOEPACK_BOTH void fill(u32 taken, u32 one) {
        static_assert(8 * TAKE % 64 == 32, "see above");
#if defined(__CUDA_ARCH__)
        asm volatile("{.reg .pred p; .reg .u32 n, t; mad.lo.u32 n, %4, 8, %0; xor.b32 t, n, %0; and.b32 t, t, 32;"
                     "setp.eq.u32 p, t, 0; @p mad.lo.u32 %1, %2, %5, 0; @p ld.shared.u32 %2, [%3];"
                     "@p mad.lo.u32 %3, %5, 4, %3; mov.b32 %0, n;}"
                     : "+r"(bits), "+r"(low), "+r"(high), "+r"(next)
                     : "r"(taken), "r"(one)
                     : "memory");
#else
        u32 now = bits + 8 * taken;
        if (((now ^ bits) & 32) == 0) low = high, high = load_shared(next), next += 4 * one;
        bits = now;
#endif
        window = slide(bits);
    }
};

// The two lanes of a thread: rows g and g + 8 of a row block, column t of every four, for thread 4 g + t.
template <bool DEPENDENT_CODES>
struct Lanes {
    Chain chain[2];
    Paths paths;  // only used for dependent codes

    // Starts a chunk; `before` are the bytes of the preceding lanes, and `bytes` is a multiple of 16.
    MOEPACK_BOTH void enter(Shared bytes, const u32 (&before)[2]) {
        for (int i = 0; i < 2; ++i) chain[i].enter(bytes + (before[i] & ~3u), before[i] & 3);
    }

    // Decodes the symbols or halves of the next 16 columns to f16 values of 2^-24 symbol: operand A of m16n8k16.
    MOEPACK_BOTH void decode(const Copies& copies, u32 one, u32 (&a)[4]) {
        u32 entry[2][4], taken[2] = {TAKE, TAKE};
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (int step = 0; step < 4; ++step) {
            entry[0][step] = copies.entry(chain[0].state);
            entry[1][step] = copies.entry(chain[1].state);
            chain[0].step(entry[0][step], taken[0], one);
            chain[1].step(entry[1][step], taken[1], one);
        }
        chain[0].fill(taken[0], one);
        chain[1].fill(taken[1], one);
        // The symbols of two entries, each above a zero byte: bytes 0 3 4 7; the selector is 4 7 0 3 from the top.
        a[0] = permute(entry[0][0], entry[0][1], 0x4703), a[1] = permute(entry[1][0], entry[1][1], 0x4703);
        a[2] = permute(entry[0][2], entry[0][3], 0x4703), a[3] = permute(entry[1][2], entry[1][3], 0x4703);
        if (DEPENDENT_CODES) paths.mirror(a);
    }
};

// A row's symbols of a thread as bytes, in columns t, 4 + t, 8 + t and 12 + t.
MOEPACK_BOTH u32 symbols_of_row(const u32 (&a)[4], int row) {
    return permute(a[row], a[row + 2], 0x6420);
}

// The transposition of the bytes of four neighboring threads, so that thread t gets columns 4 t to 4 t + 3: it permutes
// its word and that of the thread at distance 2, then at distance 1, by these selectors.
MOEPACK_BOTH u32 far_selector(int thread) {
    return thread & 2 ? 0x3276 : 0x5410;
}

MOEPACK_BOTH u32 near_selector(int thread) {
    return thread & 1 ? 0x3715 : 0x6240;
}

// The bits of the f32 value 2^15 plus byte j of a word: the byte follows an exponent of 15.
MOEPACK_BOTH u32 bits_above(u32 word, int j) {
    return permute(word, 0x47000000, 0x7504 | j << 4);
}

constexpr float ABOVE = 32768;

// The corrections of a segment (16 bits f16, 4 row, 12 column) as operand A: a thread's four values of sixteen.
MOEPACK_BOTH void correction_operand(const u32 (&correction)[4], int row, u32 (&a)[4]) {
    for (int i = 0; i < 4; ++i) {
        // Registers 0 and 2 are row g, 1 and 3 are row g + 8; 0 and 1 hold the first two of the four.
        int mine = row + i % 2 * 8;
        u32 first = correction[i / 2 * 2], second = correction[i / 2 * 2 + 1];
        a[i] = int(first >> 12 & 15) == mine ? first >> 16 : 0;
        a[i] |= int(second >> 12 & 15) == mine ? second & 0xffff0000 : 0;
    }
}

}  // namespace moepack
