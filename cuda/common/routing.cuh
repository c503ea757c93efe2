// Which tokens each expert multiplies: a block sorts the slots of a launch in its own shared memory.
//
// Slot t * k + j is token t's j-th expert, index[t * k + j] (int64). Slots whose expert does not exist are left out; the
// others are ordered by expert and then by number, and cut into *tiles*: at most MOST tokens of one expert, the columns of
// one product. The order depends on the routing alone. Without an index every slot belongs to expert 0 (a linear layer).
//
// Costs: n^2 comparisons of n slots, n / threads in a row: under 1 us to 128 slots, 3 us for 512.
#pragma once
#include "common/types.cuh"

namespace moepack {

struct Tile {
    u16 expert;
    u16 start;  // of its slots in Routing::order
    u16 tokens;
};

struct Routing {
    u16 order[MOST_SLOTS];     // slots by expert
    u16 expert[MOST_SLOTS];    // by position in `order`
    Tile tile[MOST_SLOTS];
    int slots;                 // whose expert exists
    int tiles;
};

#if defined(__CUDACC__)
// Builds the routing of `slots` slots; all threads of the block call it, and may use it when it returns.
template <int MOST>
MOEPACK_DEVICE void build_routing(Routing& routing, const i64* index, int slots, int experts) {
    __shared__ u16 chosen[MOST_SLOTS];
    constexpr u16 NONE = 0xffff;
    int threads = blockDim.x;
    for (int slot = threadIdx.x; slot < slots; slot += threads) {
        i64 expert = index ? index[slot] : 0;
        chosen[slot] = expert >= 0 && expert < experts ? u16(expert) : NONE;
    }
    if (threadIdx.x == 0) routing.slots = routing.tiles = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += threads) {
        u16 mine = chosen[slot];
        if (mine == NONE) continue;
        int place = 0;
        for (int other = 0; other < slots; ++other)
            place += chosen[other] < mine || (chosen[other] == mine && other < slot);
        routing.order[place] = u16(slot);
        routing.expert[place] = mine;
        atomicAdd(&routing.slots, 1);
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        int tiles = 0;
        for (int base = 0; base < routing.slots; base += WARP) {
            int at = base + threadIdx.x, first = at;
            bool exists = at < routing.slots;
            while (exists && first > 0 && routing.expert[first - 1] == routing.expert[at]) --first;
            bool begins = exists && (at - first) % MOST == 0;
            u32 all = __ballot_sync(~0u, begins);
            if (begins) {
                int end = at + 1;
                while (end < routing.slots && end < at + MOST && routing.expert[end] == routing.expert[at]) ++end;
                int number = tiles + __popc(all & ((1u << threadIdx.x) - 1));
                routing.tile[number] = {routing.expert[at], u16(at), u16(end - at)};
            }
            tiles += __popc(all);
        }
        if (threadIdx.x == 0) routing.tiles = tiles;
    }
    __syncthreads();
}
#endif

}  // namespace moepack
