// Sorts the tokens of a layer by expert once, in a launch of its own whose schedule the other launches read.
// routing.cuh sorts fewer tokens, in every block of every launch.
//
// A *slot* is a pair of a token and one of its experts; a *tile* is up to `columns` slots of one expert. The columns of
// all tiles are *places*.
#pragma once
#include "common/types.cuh"

namespace moepack {

constexpr int COUNTED_EXPERTS = 2048;  // that `route` counts in shared memory
constexpr int ROUTE_THREADS = 1024;    // of its only block

// The schedule that `route` writes.
struct Routes {
    int* count;   // the number of tiles of tokens
    int* expert;  // [tiles]
    int* tokens;  // [tiles], at most `columns`
    int* slot;    // [tiles * columns], the slot of a place
    int* place;   // [slots], the place of a slot; -1 if its expert does not exist
};

#if defined(__CUDACC__)
// Counts in shared memory become the sums of all counts before them; called by a whole block.
MOEPACK_DEVICE void sum_before(int (&count)[COUNTED_EXPERTS]) {
    constexpr int EACH = COUNTED_EXPERTS / ROUTE_THREADS;
    __shared__ int sums[2][ROUTE_THREADS];
    int own[EACH], sum = 0, from = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) own[i] = count[threadIdx.x * EACH + i], sum += own[i];
    sums[0][threadIdx.x] = sum;
    for (int distance = 1; distance < ROUTE_THREADS; distance *= 2, from ^= 1) {
        __syncthreads();
        int before = int(threadIdx.x) >= distance ? sums[from][threadIdx.x - distance] : 0;
        sums[from ^ 1][threadIdx.x] = sums[from][threadIdx.x] + before;
    }
    __syncthreads();
    int total = sums[from][threadIdx.x] - sum;
#pragma unroll
    for (int i = 0; i < EACH; ++i) count[threadIdx.x * EACH + i] = total, total += own[i];
}

// Calls use(slot, expert) for the slots whose experts exist, with all threads of a block.
template <class Use>
MOEPACK_DEVICE void for_each_slot(const i64* index, int slots, int experts, Use use) {
    constexpr int BATCH = 8;
    for (int first = threadIdx.x; first < slots; first += ROUTE_THREADS * BATCH) {
        i64 expert[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            int slot = first + i * ROUTE_THREADS;
            expert[i] = slot < slots ? index[slot] : -1;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i * ROUTE_THREADS < slots)
                use(first + i * ROUTE_THREADS, expert[i] < experts ? int(expert[i]) : -1);
    }
}

// Places are numbered by atomic counters, whose order varies. Outputs do not depend on it: the columns of a product are
// independent.
MOEPACK_DEVICE void route_slots(const Routes& routes, const i64* index, int slots, int experts, int columns) {
    __shared__ int counts[COUNTED_EXPERTS], tiles[COUNTED_EXPERTS];
    for (int i = threadIdx.x; i < COUNTED_EXPERTS; i += ROUTE_THREADS) counts[i] = 0;
    __syncthreads();
    for_each_slot(index, slots, experts, [&](int, int expert) {
        if (expert >= 0) atomicAdd(&counts[expert], 1);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < COUNTED_EXPERTS; i += ROUTE_THREADS) tiles[i] = ceil_div(counts[i], columns);
    __syncthreads();
    sum_before(tiles);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += ROUTE_THREADS) {
        int of_expert = ceil_div(counts[e], columns);
        for (int i = 0; i < of_expert; ++i) {
            routes.expert[tiles[e] + i] = e;
            routes.tokens[tiles[e] + i] = least(columns, counts[e] - i * columns);
        }
        if (e == experts - 1) *routes.count = tiles[e] + of_expert;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COUNTED_EXPERTS; i += ROUTE_THREADS) counts[i] = 0;
    __syncthreads();
    for_each_slot(index, slots, experts, [&](int slot, int expert) {
        int place = expert < 0 ? -1 : tiles[expert] * columns + atomicAdd(&counts[expert], 1);
        routes.place[slot] = place;
        if (place >= 0) routes.slot[place] = slot;
    });
}
#endif

}  // namespace moepack
