// Products of warpgroups (wgmma, sm_90a): four warps with 16 rows of operand A each, in registers in the layout of
// m16n8k16, and a shared operand B in shared memory. They run asynchronously: between `begin_products` and
// `wait_products`, the sums must not be accessed, B must not be written, and all four warps must take the same path.
#pragma once
#include "common/ptx.cuh"

namespace moepack {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool HAS_WARPGROUPS = true;
#else
constexpr bool HAS_WARPGROUPS = false;
#endif

#if defined(__CUDACC__)
// The location of operand B: rows of 16 bytes, eight values of K of a column, with columns side by side; first K 0 to 7
// of all columns and then 8 to 15. Columns after the last read the bytes that follow.
struct Described {
    u64 bits;  // strides of eight columns and of the halves of K, address: all in units of 16 bytes

    MOEPACK_DEVICE Described(const void* first, int columns)
        : bits(u64(128 >> 4) << 32 | u64(columns) << 16 | (shared_address(first) & 0x3ffff) >> 4) {}

    // Operand B of the product at an offset of `bytes`.
    MOEPACK_DEVICE u64 after(int bytes) const {
        return bits + (bytes >> 4);
    }
};

// c = a b, or c += a b if `adds`: a 64x16 f16, b 16x8N f16, c 64x8N f32; each warp and eight columns have the layout of
// m16n8k16. The strings are the numbers of the asm's operands.
#define MOEPACK_PRODUCT(COLUMNS, C, A, B, ADDS)                                          \
    "{.reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n" COLUMNS \
    "k16.f32.f16.f16 {" C "}, {" A "}, " B ", p, 1, 1, 0;}"
#define MOEPACK_SUMS(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define MOEPACK_OPERANDS "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(adds))

MOEPACK_DEVICE void multiply_add(float (&c)[1][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool adds) {
    asm volatile(MOEPACK_PRODUCT("8", "%0, %1, %2, %3", "%4, %5, %6, %7", "%8", "%9")
                 : MOEPACK_SUMS(c[0])
                 : MOEPACK_OPERANDS);
}

MOEPACK_DEVICE void multiply_add(float (&c)[2][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool adds) {
    asm volatile(MOEPACK_PRODUCT("16", "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9, %10, %11", "%12", "%13")
                 : MOEPACK_SUMS(c[0]), MOEPACK_SUMS(c[1])
                 : MOEPACK_OPERANDS);
}

MOEPACK_DEVICE void multiply_add(float (&c)[4][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool adds) {
    asm volatile(MOEPACK_PRODUCT("32", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                                 "%16, %17, %18, %19", "%20", "%21")
                 : MOEPACK_SUMS(c[0]), MOEPACK_SUMS(c[1]), MOEPACK_SUMS(c[2]), MOEPACK_SUMS(c[3])
                 : MOEPACK_OPERANDS);
}

MOEPACK_DEVICE void multiply_add(float (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool adds) {
    asm volatile(MOEPACK_PRODUCT("64",
                                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                                 "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                                 "%32, %33, %34, %35", "%36", "%37")
                 : MOEPACK_SUMS(c[0]), MOEPACK_SUMS(c[1]), MOEPACK_SUMS(c[2]), MOEPACK_SUMS(c[3]), MOEPACK_SUMS(c[4]),
                   MOEPACK_SUMS(c[5]), MOEPACK_SUMS(c[6]), MOEPACK_SUMS(c[7])
                 : MOEPACK_OPERANDS);
}

MOEPACK_DEVICE void multiply_add(float (&c)[12][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool adds) {
    asm volatile(MOEPACK_PRODUCT("96",
                                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
                                 "%47",
                                 "%48, %49, %50, %51", "%52", "%53")
                 : MOEPACK_SUMS(c[0]), MOEPACK_SUMS(c[1]), MOEPACK_SUMS(c[2]), MOEPACK_SUMS(c[3]), MOEPACK_SUMS(c[4]),
                   MOEPACK_SUMS(c[5]), MOEPACK_SUMS(c[6]), MOEPACK_SUMS(c[7]), MOEPACK_SUMS(c[8]), MOEPACK_SUMS(c[9]),
                   MOEPACK_SUMS(c[10]), MOEPACK_SUMS(c[11])
                 : MOEPACK_OPERANDS);
}

#undef MOEPACK_PRODUCT
#undef MOEPACK_SUMS
#undef MOEPACK_OPERANDS

// Orders registers before the next products, whose operands A must be computed before this point: writes between
// products make the compiler serialize them.
template <int COUNT, int N>
MOEPACK_DEVICE void begin_products(u32 (&a)[COUNT], float (&c)[N][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(a[i])::"memory");
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Waits for the products of this warpgroup.
template <int N>
MOEPACK_DEVICE void wait_products(float (&c)[N][4]) {
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Release registers of a warpgroup, and acquire registers that others have released.
template <int LEFT>
MOEPACK_DEVICE void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LEFT));
}

template <int WANTED>
MOEPACK_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WANTED));
}
#endif

// Closes the group of products that `wait_products_before` treats as the latest.
MOEPACK_DEVICE void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all products of this warpgroup except the latest.
template <int N>
MOEPACK_DEVICE void wait_products_before(float (&c)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
}

// Makes this thread's writes to shared memory visible to products of warpgroups after the next barrier.
MOEPACK_DEVICE void publish_operands() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
#endif

}  // namespace moepack
