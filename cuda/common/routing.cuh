// Which tokens each expert multiplies: a block sorts the slots of a launch in its own shared memory.
//
// Slot t * k + j is token t's j-th expert, index[t * k + j] (int64). Slots whose expert does not exist are left out; the
// others are ordered by expert and then by number, and cut into *tiles*: at most MOST tokens of one expert, the columns of
// one product. The order depends on the routing alone. Without an index every slot belongs to expert 0 (a linear layer).
//
// Costs n / threads passes over n slots: under 1 us for 128, 3 us for 512.
#pragma once
#include "common/types.cuh"

namespace moepack {

struct Tile {
    u16 expert;
    u16 start;  // of its slots in Routing::order
    u16 tokens;
};

struct Routing {
    u16 order[MOST_SLOTS];   // slots by expert
    u16 expert[MOST_SLOTS];  // by position in `order`
    u16 at[MOST_SLOTS];      // the tile of each position
    Tile tile[MOST_SLOTS];
    int slots;  // whose expert exists
    int tiles;
};

#if defined(__CUDACC__)
// Fills `order`, `expert` and `slots`: the place of a slot is the number of those that come before it.
MOEPACK_DEVICE void sort_slots(Routing& routing, const i64* index, int slots, int experts) {
    __shared__ u16 chosen[MOST_SLOTS];
    constexpr u16 NONE = 0xffff;
    if (threadIdx.x == 0) routing.slots = 0;
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        i64 expert = index[slot];
        chosen[slot] = expert >= 0 && expert < experts ? u16(expert) : NONE;
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
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
}

// Cuts the sorted slots into tiles; one warp does.
template <int MOST>
MOEPACK_DEVICE void cut_tiles(Routing& routing) {
    int tiles = 0;
    for (int base = 0; base < routing.slots; base += WARP) {
        int place = base + threadIdx.x, first = place;
        bool exists = place < routing.slots;
        while (exists && first > 0 && routing.expert[first - 1] == routing.expert[place]) --first;
        bool begins = exists && (place - first) % MOST == 0;
        u32 beginnings = __ballot_sync(~0u, begins);
        int number = tiles + __popc(beginnings & (2u << threadIdx.x) - 1) - 1;
        if (exists) routing.at[place] = u16(number);
        if (begins) {
            int end = place + 1;
            while (end < routing.slots && end < place + MOST && routing.expert[end] == routing.expert[place]) ++end;
            routing.tile[number] = {routing.expert[place], u16(place), u16(end - place)};
        }
        tiles += __popc(beginnings);
    }
    if (threadIdx.x == 0) routing.tiles = tiles;
}

// The routing of a linear layer: slots in their order.
template <int MOST>
MOEPACK_DEVICE void list_slots(Routing& routing, int slots) {
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        routing.order[slot] = u16(slot);
        routing.at[slot] = u16(slot / MOST);
        if (slot % MOST == 0) routing.tile[slot / MOST] = {0, u16(slot), u16(least(MOST, slots - slot))};
    }
    if (threadIdx.x == 0) routing.slots = slots, routing.tiles = ceil_div(slots, MOST);
}

// Builds the routing; all threads of the block call it, and may read it when it returns.
template <int MOST>
MOEPACK_DEVICE void build_routing(Routing& routing, const i64* index, int slots, int experts) {
    if (index) {
        sort_slots(routing, index, slots, experts);
        if (threadIdx.x < WARP) cut_tiles<MOST>(routing);
    } else {
        list_slots<MOST>(routing, slots);
    }
    __syncthreads();
}
#endif

}  // namespace moepack
