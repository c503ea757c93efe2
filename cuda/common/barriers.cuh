// Bulk copies that one thread issues and others wait for (cp.async.bulk, Hopper and newer): a barrier in shared memory
// (mbarrier) counts arrivals and bytes, and its phase ends when all have arrived. Phases have parities, 0 for the
// first.
#pragma once
#include "common/ptx.cuh"

namespace moepack {

#if defined(__CUDA_ARCH__)
// Waits for the other warp of a pair (0 to 14) of warps of a block, and for its writes to shared memory.
MOEPACK_DEVICE void meet(int pair) {
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
}
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Initializes a barrier with a number of arrivals per phase; others may use it after `publish_barriers` and a block
// barrier.
MOEPACK_DEVICE void make_barrier(Shared barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

MOEPACK_DEVICE void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

MOEPACK_DEVICE void arrive(Shared barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and extends the phase until `bytes` bytes have been copied as well.
MOEPACK_DEVICE void arrive_expecting(Shared barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits with a whole warp for the end of the phase with a parity; returns at once if it has ended.
MOEPACK_DEVICE void wait_for_phase(Shared barrier, int parity) {
    asm volatile("{.reg .pred p;\n"
                 "TRY: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE;\n"
                 "bra TRY;\n"
                 "DONE:}" ::"r"(barrier), "r"(parity)
                 : "memory");
    __syncwarp();
}

// Starts to copy bytes; the size and both addresses are multiples of 16.
MOEPACK_DEVICE void copy_bulk(Shared to, const void* from, int bytes, Shared barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}
#endif

}  // namespace moepack
