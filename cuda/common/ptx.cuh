// Single instructions as functions. Those used in decoding also have bit-identical versions for a host compiler. A host
// program that checks a warp's product defines `multiply_add` and `copy_async` itself.
#pragma once
#include "common/types.cuh"

namespace moepack {

// Clusters of blocks that read each other's shared memory: Hopper and newer.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool HAS_CLUSTERS = true;
#else
constexpr bool HAS_CLUSTERS = false;
#endif

// Makes the compiler keep a value in its register instead of recomputing it at each use.
MOEPACK_BOTH void hold(u32& value) {
#if defined(__CUDA_ARCH__)
    asm("" : "+r"(value));
#endif
}

// (a & b) | c in one instruction.
MOEPACK_BOTH u32 and_or(u32 a, u32 b, u32 c) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    return (a & b) | c;
#endif
}

// Four of the eight bytes of (a, b), selected by the nibbles of the selector.
MOEPACK_BOTH u32 permute(u32 a, u32 b, u32 selector) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(a, b, selector);
#else
    u64 bytes = (u64(b) << 32) | a;
    u32 d = 0;
    for (int i = 0; i < 4; ++i) d |= u32(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return d;
#endif
}

// For each nibble of the selector (0 to 7), a byte: all ones if that byte of (a, b) is negative, otherwise zero.
MOEPACK_BOTH u32 signs(u32 a, u32 b, u32 selector) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector | 0x8888));
    return d;
#else
    return (permute(a, b, selector) >> 7 & 0x01010101) * 255;
#endif
}

// c plus the dot product of the bytes of a and b.
MOEPACK_BOTH u32 dot4(u32 a, u32 b, u32 c) {
#if defined(__CUDA_ARCH__)
    return __dp4a(a, b, c);
#else
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
    return c;
#endif
}

#if !defined(__CUDA_ARCH__)
inline float half_value(u16 bits) {
    int exponent = (bits >> 10) & 31;
    float mantissa = float(bits & 1023);
    float magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    if (exponent == 31) magnitude = mantissa > 0 ? NAN : INFINITY;
    return bits >> 15 ? -magnitude : magnitude;
}

inline float bf16_value(u16 bits) {
    u32 word = u32(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

// The bits of a value that is exactly a finite f16, as decoded weights are.
inline u16 half_bits(float value) {
    u32 low = 0, high = 0x7c00;
    while (high - low > 1) (half_value(u16((low + high) / 2)) <= std::fabs(value) ? low : high) = (low + high) / 2;
    return half_value(u16(low)) == std::fabs(value) ? u16(low | (value < 0 ? 0x8000 : 0)) : 0x7e00;
}

void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
void copy_async(Shared to, const void* from, int bytes, u64 policy);
#endif

// The f16 bits of an integer from -2048 to 2048, in both halves of a word.
MOEPACK_BOTH constexpr u32 half2_integer(int value) {
    int size = value < 0 ? -value : value, exponent = 0;
    while (size >> (exponent + 1)) ++exponent;
    u32 bits = size == 0 ? 0 : u32(15 + exponent) << 10 | (u32(size) << 10 >> exponent & 1023);
    return (bits | (value < 0 ? 0x8000u : 0u)) * 0x10001u;
}

// 2^-power as f16, in both halves of a word.
MOEPACK_BOTH constexpr u32 half2_fraction(int power) {
    return (u32(15 - power) << 10) * 0x10001u;
}

// a * b + c on two f16.
MOEPACK_BOTH u32 half2_fma(u32 a, u32 b, u32 c) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    u32 low = half_bits(half_value(u16(a)) * half_value(u16(b)) + half_value(u16(c)));
    u32 high = half_bits(half_value(u16(a >> 16)) * half_value(u16(b >> 16)) + half_value(u16(c >> 16)));
    return high << 16 | low;
#endif
}

// a + b on two f16.
MOEPACK_BOTH u32 half2_add(u32 a, u32 b) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return half2_fma(a, 0x3c003c00, b);
#endif
}

#if defined(__CUDACC__)
MOEPACK_DEVICE float half_value(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

MOEPACK_DEVICE float bf16_value(u16 bits) {
    return __uint_as_float(u32(bits) << 16);
}

// Two floats rounded to f16, the first in the low half.
MOEPACK_DEVICE u32 to_half2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

MOEPACK_DEVICE u32 to_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Writes a value as bfloat16 or, if `wide`, float32.
MOEPACK_DEVICE void store_value(void* out, i64 at, float value, bool wide) {
    if (wide) static_cast<float*>(out)[at] = value;
    else static_cast<u16*>(out)[at] = u16(to_bf16x2(value, 0.0f));
}

// Writes `count` of eight neighboring values as bfloat16 or, if `wide`, float32; `aligned`: all eight, 16-byte aligned.
MOEPACK_DEVICE void store_eight(void* out, i64 at, const float (&value)[8], int count, bool wide, bool aligned) {
    const float(&v)[8] = value;
    if (aligned && wide) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(out) + at);
        to[0] = {v[0], v[1], v[2], v[3]}, to[1] = {v[4], v[5], v[6], v[7]};
    } else if (aligned) {
        Quad* to = reinterpret_cast<Quad*>(static_cast<u16*>(out) + at);
        *to = {to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]), to_bf16x2(v[4], v[5]), to_bf16x2(v[6], v[7])};
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < count) store_value(out, at + i, v[i], wide);
    }
}

// c += a b: a 16x16 f16 (rows lane/4 and lane/4 + 8), b 16x8 f16 (column lane/4), c 16x8 f32.
MOEPACK_DEVICE void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of bf16.
MOEPACK_DEVICE void multiply_add_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes 8x8 values of 16 bits: lane (row, pair) has two neighboring values of a row.
MOEPACK_DEVICE u32 transpose(u32 pair) {
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
    return d;
}

// Loads four 8x8 matrices of 16-bit values from shared memory. Lane i gives the place of row i % 8 of matrix i / 8, 16
// bytes, and gets the values (lane / 4, 2 (lane % 4)) and the next one of each; transposed, those below each other.
template <bool TRANSPOSED>
MOEPACK_DEVICE void load_matrices(u32 (&d)[4], Shared row) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(row)
                     : "memory");
}

// c += a b: a 16x32 s8, b 32x8 s8, c 16x8 s32.
MOEPACK_DEVICE void multiply_add(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Waits for the previous launch: a launch may start before it has ended, and must call this before reading its results.
MOEPACK_DEVICE void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next launch to start as soon as there is room. A launch that calls this has waited for the previous one,
// so waiting for it implies waiting for all earlier launches.
MOEPACK_DEVICE void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for all threads of the cluster; if WRITTEN, their earlier writes to shared memory may then be read.
template <bool WRITTEN>
MOEPACK_DEVICE void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    if (WRITTEN) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Loads four floats from the shared memory of a block of the cluster.
MOEPACK_DEVICE float4 load_of_block(Shared place, int rank) {
    float4 v = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .u32 at; mapa.shared::cluster.u32 at, %4, %5;"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(place), "r"(rank)
                 : "memory");
#endif
    return v;
}

// Loads a number from the shared memory of a block of the cluster.
MOEPACK_DEVICE u64 load_number_of_block(Shared place, int rank) {
    u64 number = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .u32 at; mapa.shared::cluster.u32 at, %1, %2; ld.shared::cluster.u64 %0, [at];}"
                 : "=l"(number)
                 : "r"(place), "r"(rank)
                 : "memory");
#endif
    return number;
}

// L2 policy for data that many blocks read: no hint.
constexpr u64 KEEP = 0x1000000000000000;

MOEPACK_DEVICE Shared shared_address(const void* pointer) {
    return Shared(__cvta_generic_to_shared(pointer));
}

// The size of the launch's dynamic shared memory in bytes.
MOEPACK_DEVICE u32 shared_size() {
    u32 size;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(size));
    return size;
}

MOEPACK_DEVICE u32 load_word(const void* from) {
    u32 word;
    asm("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}

MOEPACK_DEVICE Quad load_quad(const void* from) {
    Quad q;
    asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(from));
    return q;
}

MOEPACK_DEVICE Pair load_pair(const void* from) {
    Pair p;
    asm("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(p.x), "=r"(p.y) : "l"(from));
    return p;
}

// Loads what other blocks of this launch have written: not from the multiprocessor's own cache.
MOEPACK_DEVICE float2 load_shared_by_blocks(const float2* from) {
    return __ldcg(from);
}

MOEPACK_DEVICE float4 load_shared_by_blocks(const float4* from) {
    return __ldcg(from);
}

// L2 policy for data that is read once: evict it first, so that activations stay in the L2.
MOEPACK_DEVICE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Starts to copy `bytes` (0 to 16) to shared memory, padded with zeros to 16.
MOEPACK_DEVICE void copy_async(Shared to, const void* from, int bytes, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
                 "l"(policy)
                 : "memory");
}

// Starts to copy 16 bytes. A constant hint would be equivalent, but NVRTC 13.0 generates illegal instructions for it.
MOEPACK_DEVICE void copy_async(Shared to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Starts to copy `bytes` (0 to 16), padded with zeros to 16.
MOEPACK_DEVICE void copy_async(Shared to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

MOEPACK_DEVICE void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all copies of this thread except those of the latest groups.
template <int LATEST>
MOEPACK_DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
}
#endif

}  // namespace moepack
