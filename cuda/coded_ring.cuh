// Records of coded integers in transfer to shared memory: a warp has two stages and copies one record ahead of the one
// being decoded. On Hopper and newer, a record is a single bulk copy whose completion is signaled by a barrier of the
// stage. On other GPUs, all lanes copy pieces of it.
#pragma once
#include "coded_block.cuh"

namespace moepack {

#if defined(__CUDACC__)
struct Ring {
    u8* rings;               // stages of all warps
    int stage;               // bytes per stage
    u32 turn = 0;            // records fetched
    u32 start = 0, end = 0;  // of the next record, in units of 16 bytes; loads are pending until it is fetched

    MOEPACK_DEVICE Ring(u8* rings, int stage) : rings(rings), stage(stage) {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x % WARP == 0)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; mbarrier.init.shared::cta.b64 [%0 + 8], 1;"
                         "fence.proxy.async.shared::cta;" ::"r"(arrived(0))
                         : "memory");
        __syncwarp();
#endif
    }

    // The stage of a record, by record number.
    MOEPACK_DEVICE u8* at(u32 number) const {
        return rings + (threadIdx.x / WARP * 2 + number % 2) * stage;
    }

    // The barrier of its stage.
    static MOEPACK_DEVICE Shared arrived(u32 number) {
        __shared__ u64 barriers[MOST_WARPS][2];
        return shared_address(&barriers[threadIdx.x / WARP][number % 2]);
    }

    // Loads the range of a chunk's record; chunks are numbered over all row blocks.
    MOEPACK_DEVICE void look_up(const u32* starts, u32 chunk) {
        start = __ldg(starts + chunk), end = __ldg(starts + chunk + 1);
    }

    // Starts to copy it to the stage decoded before the current one, which all lanes have left.
    MOEPACK_DEVICE void fetch(const u8* records) {
        const u8* from = records + i64(start) * 16;
        Shared to = shared_address(at(turn));
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x % WARP == 0 && end > start)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                         "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0];"
                         ::"r"(arrived(turn)), "r"((end - start) * 16), "r"(to), "l"(from)
                         : "memory");
#else
        from += threadIdx.x % WARP * 16, to += threadIdx.x % WARP * 16;
#pragma unroll 1
        for (int left = int(end - start) - int(threadIdx.x % WARP); left > 0; left -= WARP) {
            copy_async(to, from, 16, KEEP);
            to += WARP * 16, from += WARP * 16;
        }
        commit_copies();
#endif
        ++turn;
    }

    // Waits for the record that was fetched LATER (0 or 1) records before the last.
    template <int LATER>
    MOEPACK_DEVICE const u8* wait() const {
        u32 number = turn - 1 - LATER;
#if __CUDA_ARCH__ >= 900
        asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
                     "@!done bra again;}" ::"r"(arrived(number)),
                     "r"(number / 2 % 2)
                     : "memory");
#else
        wait_copies<LATER>();
        __syncwarp();
#endif
        return at(number);
    }
};
#endif

}  // namespace moepack
