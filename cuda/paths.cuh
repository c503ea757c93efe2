// Paths of dependent codes (docs/format.md, section 9), without a serial chain of states: the trellis is linear.
//
// Let odd[t] be whether a lane is in an odd state at step t, and parity[t] whether its index there is odd. For every
// state and all parities
//
//   odd[t] = odd[t - 4] ^ parity[t - 2] ^ parity[t - 3].
//
// A record that starts a segment therefore stores odd[0] to odd[3] of each lane, as if all later indices were even, and
// words of two lanes by two steps are advanced by exclusive or.
#pragma once
#include "common/ptx.cuh"

namespace moepack {

constexpr int PATHS_BYTES = WARP;  // in a record that starts a segment: one byte per thread

// The state after an index with a given parity.
MOEPACK_BOTH u32 next_state(u32 state, u32 parity) {
    return (0x73426150u >> 4 * state & 7) ^ 2 * parity;
}

// A thread's byte of a record, from the states of its two lanes: bit 2 t of the first and 2 t + 1 of the second are
// odd[t].
MOEPACK_BOTH u32 path_byte(u32 first, u32 second) {
    constexpr u64 ODD = 0x5544415011140500;  // by state
    return u32(ODD >> 8 * first & 255) | u32(ODD >> 8 * second & 255) << 1;
}

// The paths of a thread's two lanes. Words hold a bit in the highest of each byte: the first lane, the second, and both
// one step later; lower bits are undefined.
struct Paths {
    u32 early, late;  // odd of the next two steps, and the known part of odd of the two after them
    u32 last;         // parities of the last two steps

    MOEPACK_BOTH void enter(u32 byte) {
        constexpr u32 SPREAD = 0x10204080;  // bit i to bit 8 i + 7, with other bits elsewhere
        early = (byte & 15) * SPREAD & 0x80808080, late = (byte >> 4) * SPREAD & 0x80808080, last = 0;
    }

    // The last step of a word and the first step of the next one.
    static MOEPACK_BOTH u32 between(u32 word, u32 behind) {
        return permute(word, behind, 0x5432);
    }

    // Advances by four steps. `a` is operand A with table entries: halves for even states, and parities (bit 7). It is
    // replaced by halves: 127 minus the entry in odd states.
    MOEPACK_BOTH void mirror(u32 (&a)[4]) {
        u32 first = a[1] * 256 + a[0], second = a[3] * 256 + a[2];
        late ^= first ^ between(last, first);
        a[0] = (a[0] ^ signs(early, early, 0x2200)) & 0x007f007f;
        a[1] = (a[1] ^ signs(early, early, 0x3311)) & 0x007f007f;
        a[2] = (a[2] ^ signs(late, late, 0x2200)) & 0x007f007f;
        a[3] = (a[3] ^ signs(late, late, 0x3311)) & 0x007f007f;
        early ^= second ^ between(first, second);
        last = second;
    }
};

}  // namespace moepack
