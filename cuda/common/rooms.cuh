// Where sequences keep their keys and values, for launches over tokens of several sequences.
#pragma once
#include "common/types.cuh"

namespace moepack {

// Each sequence has buffers of its own, [groups, capacity, width] of 16-bit values or, if `narrow`, rows of 8-bit codes
// (common/narrow.cuh). `keys` and `values` are their addresses. A row of a launch is the token `place` of a sequence's
// buffers; a negative place means that it is none. Without rooms, `keys` is null.
struct Rooms {
    const i64 *keys, *values, *capacity;  // [sequences]
    const i64 *sequence, *place;          // [rows]
    int narrow;
    int window;  // tokens that a token attends to, itself included; 0: all
};

}  // namespace moepack
