// Keys and values in 8 bits (`moepack.decoding.narrow`): a row is int8 codes and the f32 scale by which they are
// multiplied, NARROW_SCALE bytes more than codes. Rows begin at multiples of 4 bytes.
//
// Codes are exact in f16 and bf16, so products take them as operands. Scales of keys multiply scores; scales of values
// multiply weights.
#pragma once
#include "common/ptx.cuh"

namespace moepack {

constexpr int NARROW_SCALE = 4;

// a - b on two bf16, whose differences are exact.
MOEPACK_BOTH u32 bf16_difference(u32 a, u32 b) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3f803f80), "r"(b ^ 0x80008000));
    return d;
#else
    u32 word = 0;
    for (int i = 0; i < 32; i += 16) {
        float value = bf16_value(u16(a >> i)) - bf16_value(u16(b >> i));
        u32 bits;
        std::memcpy(&bits, &value, sizeof bits);
        word |= bits >> 16 << i;
    }
    return word;
#endif
}

// Four int8 codes as bf16, or as f16 if IS_HALF.
template <bool IS_HALF>
MOEPACK_BOTH void widen(u32 codes, u32& first, u32& second) {
    u32 pair[2] = {permute(codes, 0, 0x4140), permute(codes, 0, 0x4342)};
    for (u32& word : pair) {
        // f16: 1024 + (code + 128), minus 1152. bf16: 128 + the low seven bits, minus 128, or 256 for negative codes.
        if (IS_HALF) word = half2_add((word ^ 0x00800080) | 0x64006400, 0xe480e480);
        else word = bf16_difference(and_or(word, 0x007f007f, 0x43004300), and_or(word, 0x00800080, 0x43004300));
    }
    first = pair[0], second = pair[1];
}

}  // namespace moepack
