// Fixed-width types and qualifiers for kernels that NVRTC compiles without headers, and for a host compiler, which
// builds the same decoding functions to compare them with the reference.
#pragma once

#if defined(__CUDACC__)
#define MOEPACK_BOTH __host__ __device__ __forceinline__
#define MOEPACK_DEVICE __device__ __forceinline__
#else
#include <cmath>
#include <cstring>
#define MOEPACK_BOTH inline
#define MOEPACK_DEVICE inline
struct float2 {
    float x, y;
};
#endif

namespace moepack {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// An address in shared memory.
#if defined(__CUDACC__)
using Shared = u32;
#else
using Shared = u8*;
#endif

constexpr int WARP = 32;
// The most slots (pairs of a token and one of its experts) per launch, limited by a block's shared memory.
constexpr int MOST_SLOTS = 512;

// The type of activations, as passed to a launch.
enum class Type : int { bf16 = 0, f16 = 1, f32 = 2 };

// Rows of activations: x of the tokens, or `hidden` of the slots.
struct Activations {
    const void* data;
    Type type;
    int columns;  // per row in memory, a multiple of 8; columns after the matrix's last are zero
};

struct alignas(16) Quad {
    u32 x, y, z, w;
};

struct alignas(8) Pair {
    u32 x, y;
};

template <class Number>
MOEPACK_BOTH constexpr Number ceil_div(Number a, Number b) {
    return (a + b - 1) / b;
}

template <class Number>
MOEPACK_BOTH constexpr Number least(Number a, Number b) {
    return a < b ? a : b;
}

template <class Number>
MOEPACK_BOTH constexpr Number most(Number a, Number b) {
    return a > b ? a : b;
}

}  // namespace moepack
