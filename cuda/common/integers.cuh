// Integer codes of a unit (32 columns of a row, one word per bit of a code, docs/format.md, section 6) as operand A of
// m16n8k16.
//
// A product takes a *quad*, four neighboring columns, from each of the four lanes of a row. Codes<bits, WIDE> defines
// which words a lane reads, how it decodes them, and which quads they contain. `place` is the inverse mapping for
// activations, and `quad` gives the quad of a product and a lane. WIDE needs fewer instructions; the others keep each
// product within one group of 16 columns.
//
//     bits   a lane t's words of UNITS units         its quads, in product order
//     2      0, 1                                    t, 4 + t
//     3      t / 2, then 2, 2, 0, 1, then 2          t, 4 + t
//     3 WIDE of unit t / 2: t % 2, 2                 of t % 2 = 0: 0, 1, 4, 6; of 1: 2, 3, 5, 7
//     4      t / 2, 2 + t / 2                        t, 4 + t
//     4 WIDE t                                       2 t, 2 t + 1
//     8      t, 4 + t                                t, 4 + t
//
// A quad is two words of two f16 each: columns 0 and 2, then 1 and 3.
#pragma once
#include "common/ptx.cuh"
#include "common/tokens.cuh"

namespace moepack {

constexpr u32 EXPONENT = 0x64006400;  // 1024 as f16; its mantissa has units of one

// A code in some bits of each half of a word: extracts it, and removes its position and the middle of the codes.
struct Field {
    u32 mask, factor, addend;

    MOEPACK_BOTH constexpr Field(int position, int width, int middle)
        : mask((((1u << width) - 1) << position) * 0x10001u), factor(half2_fraction(position)),
          addend(half2_integer(-(1024 >> position) - middle)) {}

    MOEPACK_BOTH u32 value(u32 word) const {
        return half2_fma(and_or(word, mask, EXPONENT), factor, addend);
    }

    MOEPACK_BOTH void hold() {
        moepack::hold(mask), moepack::hold(factor), moepack::hold(addend);
    }

    // The same for position 0, where the factor is one.
    MOEPACK_BOTH u32 lowest(u32 word) const {
        return half2_add(and_or(word, mask, EXPONENT), addend);
    }

    // The quad of a word whose codes are in separate bytes.
    MOEPACK_BOTH void quad(u32 word, u32 (&pair)[2]) const {
        pair[0] = value(word);
        pair[1] = value(word >> 8);
    }
};

template <int WIDTH, bool WIDE>
struct Codes;

template <bool WIDE>
struct Codes<2, WIDE> {
    static constexpr int UNITS = 1, WORDS = 2;
    Field field;

    MOEPACK_BOTH Codes(int lane, int middle)
        : field(lane % 4 < 2 ? (lane % 2 ? Field(2, 2, middle) : Field(0, 2, middle))
                             : (lane % 2 ? Field(6, 2, middle) : Field(4, 2, middle))) {}

    MOEPACK_BOTH void hold() {
        field.hold();
    }

    MOEPACK_BOTH static constexpr int word(int, int i) {
        return i;
    }

    MOEPACK_BOTH static constexpr Place place(int quad) {
        return {0, quad % 4, quad / 4};
    }

    MOEPACK_BOTH static constexpr int quad(int product, int lane) {
        return product * 4 + lane;
    }

    MOEPACK_BOTH void decode(const u32 (&word)[WORDS], u32 (&quad)[2][2]) const {
        field.quad(word[0], quad[0]);
        field.quad(word[1], quad[1]);
    }
};

template <>
struct Codes<3, false> {
    static constexpr int UNITS = 1, WORDS = 3;
    Field first, second, high;  // quad t; quad 4 + t except the highest bit of quads 6 and 7, which is in word 2

    MOEPACK_BOTH Codes(int lane, int middle)
        : first(lane % 2 ? Field(3, 3, middle) : Field(0, 3, middle)),
          second(lane % 4 < 2 ? first : Field(6, 2, middle)), high(lane % 2 ? Field(5, 3, 0) : Field(4, 3, 0)) {
        high.mask = lane % 4 < 2 ? 0 : lane % 2 ? 0x800080 : 0x400040;
    }

    MOEPACK_BOTH void hold() {
        first.hold(), second.hold(), high.hold();
    }

    MOEPACK_BOTH static constexpr int word(int lane, int i) {
        return i == 0 ? lane % 4 / 2 : i == 1 && lane % 4 >= 2 ? lane % 4 - 2 : 2;
    }

    MOEPACK_BOTH static constexpr Place place(int quad) {
        return {0, quad % 4, quad / 4};
    }

    MOEPACK_BOTH static constexpr int quad(int product, int lane) {
        return product * 4 + lane;
    }

    MOEPACK_BOTH void decode(const u32 (&word)[WORDS], u32 (&quad)[2][2]) const {
        first.quad(word[0], quad[0]);
        second.quad(word[1], quad[1]);
        u32 upper[2];
        high.quad(word[2], upper);
        quad[1][0] = half2_add(quad[1][0], upper[0]);
        quad[1][1] = half2_add(quad[1][1], upper[1]);
    }
};

template <>
struct Codes<3, true> {
    static constexpr int UNITS = 2, WORDS = 2;
    Field first, second, third, low, high;

    // `low` also removes what remains of `high`'s exponent.
    MOEPACK_BOTH Codes(int lane, int middle)
        : first(0, 3, middle), second(3, 3, middle), third(lane % 2 ? second : first), low(6, 2, middle),
          high(lane % 2 ? Field(5, 3, 0) : Field(4, 3, 0)) {
        high.mask = lane % 2 ? 0x800080 : 0x400040;
        low.addend = lane % 2 ? half2_integer(-48 - middle) : half2_integer(-80 - middle);
    }

    MOEPACK_BOTH void hold() {
        third.hold(), moepack::hold(low.addend), moepack::hold(high.mask), moepack::hold(high.factor);
    }

    MOEPACK_BOTH static constexpr int word(int lane, int i) {
        return lane % 4 / 2 * 3 + (i == 0 ? lane % 2 : 2);
    }

    MOEPACK_BOTH static constexpr Place place(int quad) {
        int in_unit = quad % 8, pair = in_unit < 4 ? in_unit / 2 : in_unit % 2;
        int product = in_unit < 4 ? in_unit % 2 : in_unit / 2;
        return {product / 2, quad / 8 * 2 + pair, product % 2};
    }

    MOEPACK_BOTH static constexpr int quad(int product, int lane) {
        return lane / 2 * 8 + (product < 2 ? lane % 2 * 2 + product : product * 2 + lane % 2);
    }

    MOEPACK_BOTH void decode(const u32 (&word)[WORDS], u32 (&quad)[4][2]) const {
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (int i = 0; i < 2; ++i) {
            u32 own = word[0] >> (8 * i), shared = word[1] >> (8 * i);
            quad[0][i] = first.lowest(own);
            quad[1][i] = second.value(own);
            quad[2][i] = third.value(shared);
            quad[3][i] = half2_fma(and_or(shared, high.mask, EXPONENT), high.factor, low.value(own));
        }
    }
};

template <>
struct Codes<4, false> {
    static constexpr int UNITS = 1, WORDS = 2;
    Field field;

    MOEPACK_BOTH Codes(int lane, int middle) : field(lane % 2 ? Field(4, 4, middle) : Field(0, 4, middle)) {}

    MOEPACK_BOTH void hold() {
        field.hold();
    }

    MOEPACK_BOTH static constexpr int word(int lane, int i) {
        return 2 * i + lane % 4 / 2;
    }

    MOEPACK_BOTH static constexpr Place place(int quad) {
        return {0, quad % 4, quad / 4};
    }

    MOEPACK_BOTH static constexpr int quad(int product, int lane) {
        return product * 4 + lane;
    }

    MOEPACK_BOTH void decode(const u32 (&word)[WORDS], u32 (&quad)[2][2]) const {
        field.quad(word[0], quad[0]);
        field.quad(word[1], quad[1]);
    }
};

template <>
struct Codes<4, true> {
    static constexpr int UNITS = 1, WORDS = 1;
    Field low, high;

    MOEPACK_BOTH Codes(int, int middle) : low(0, 4, middle), high(4, 4, middle) {}

    MOEPACK_BOTH void hold() {}

    MOEPACK_BOTH static constexpr int word(int lane, int) {
        return lane % 4;
    }

    MOEPACK_BOTH static constexpr Place place(int quad) {
        return {0, quad / 2, quad % 2};
    }

    MOEPACK_BOTH static constexpr int quad(int product, int lane) {
        return lane * 2 + product;
    }

    MOEPACK_BOTH void decode(const u32 (&word)[WORDS], u32 (&quad)[2][2]) const {
        u32 later = word[0] >> 8;
        quad[0][0] = low.lowest(word[0]);
        quad[0][1] = low.lowest(later);
        quad[1][0] = high.value(word[0]);
        quad[1][1] = high.value(later);
    }
};

template <bool WIDE>
struct Codes<8, WIDE> {
    static constexpr int UNITS = 1, WORDS = 2;
    u32 addend;

    MOEPACK_BOTH Codes(int, int middle) : addend(half2_integer(-1024 - middle)) {}

    MOEPACK_BOTH void hold() {}

    MOEPACK_BOTH static constexpr int word(int lane, int i) {
        return 4 * i + lane % 4;
    }

    MOEPACK_BOTH static constexpr Place place(int quad) {
        return {0, quad % 4, quad / 4};
    }

    MOEPACK_BOTH static constexpr int quad(int product, int lane) {
        return product * 4 + lane;
    }

    MOEPACK_BOTH void decode(const u32 (&word)[WORDS], u32 (&quad)[2][2]) const {
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (int i = 0; i < 2; ++i) {
            quad[i][0] = half2_add(permute(word[i], EXPONENT, 0x5250), addend);
            quad[i][1] = half2_add(permute(word[i], EXPONENT, 0x5351), addend);
        }
    }
};

template <class Decoder>
MOEPACK_BOTH constexpr bool inverts_place() {
    for (int i = 0; i < Decoder::UNITS * 8; ++i) {
        Place place = Decoder::place(Decoder::quad(i / 4, i % 4));
        if (place.step * 2 + place.half != i / 4 || place.lane != i % 4) return false;
    }
    return true;
}
static_assert(inverts_place<Codes<2, true>>() && inverts_place<Codes<3, false>>() && inverts_place<Codes<3, true>>() &&
              inverts_place<Codes<4, false>>() && inverts_place<Codes<4, true>>() && inverts_place<Codes<8, true>>());

}  // namespace moepack
