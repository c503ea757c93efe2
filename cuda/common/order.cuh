// Numbers that order like floats.
#pragma once
#include "common/types.cuh"

namespace moepack {

#if defined(__CUDACC__)
// A number that orders like a float; more than 0.
MOEPACK_DEVICE u32 order_of(float value) {
    u32 bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

MOEPACK_DEVICE float float_of(u32 order) {
    return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}
#endif

}  // namespace moepack
