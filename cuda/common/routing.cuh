// Sorts tokens by expert: each block sorts the slots of a launch in its own shared memory.
//
// Slot t * k + j is token t's j-th expert, index[t * k + j] (int64). Slots with out-of-range experts are dropped. The
// others are ordered by expert and then by index, and cut into *tiles*: at most MOST tokens of one expert, which are
// the columns of one product. The order depends only on the routing. Without an index, every slot belongs to expert 0
// (a linear layer).
//
// Sorting takes a comparison with each slot of the same warp, and a binary search in the slots of each other warp.
#pragma once
#include "common/types.cuh"

namespace moepack {

constexpr int MOST_EXPERTS = 1 << 16;

struct Tile {
    u16 expert;
    u16 start;  // first of its slots in Routing::order
    u16 tokens;
};

struct Routing {
    u16 order[MOST_SLOTS];   // slots by expert
    u16 expert[MOST_SLOTS];  // by position in `order`
    u16 at[MOST_SLOTS];      // the tile of each position
    Tile tile[MOST_SLOTS];
    int slots;  // slots with a valid expert
    int tiles;
    bool repeats;  // whether a token chose an expert twice
};

#if defined(__CUDACC__)
// The number of 32 sorted keys that are less than `key`.
MOEPACK_DEVICE int count_less(const u32* sorted, u32 key) {
    int count = 0;
#pragma unroll
    for (int half = WARP / 2; half; half /= 2)
        if (sorted[count + half - 1] < key) count += half;
    return count + (sorted[count] < key);
}

// Fills `order`, `expert` and `slots`: each warp sorts 32 slots; their final places are the numbers of smaller keys.
MOEPACK_DEVICE void sort_slots(Routing& routing, const i64* index, int slots, int experts) {
    u32* keys = reinterpret_cast<u32*>(routing.tile);  // expert * MOST_SLOTS + slot; tiles are written later
    int lane = threadIdx.x % WARP, total = 0;
    for (int base = 0; base < slots; base += blockDim.x) {
        int slot = base + threadIdx.x;
        i64 expert = slot < slots ? index[slot] : -1;
        bool exists = expert >= 0 && expert < experts;
        u32 key = u32(exists ? expert : MOST_EXPERTS) * MOST_SLOTS + u32(slot % MOST_SLOTS);
        int place = 0;
#pragma unroll 8
        for (int other = 0; other < WARP; ++other) place += __shfl_sync(~0u, key, other) < key;
        if (slot < MOST_SLOTS) keys[slot - lane + place] = key;
        total += __syncthreads_count(exists);
    }
    for (int at = threadIdx.x; at < slots; at += blockDim.x) {
        u32 key = keys[at];
        int place = 0;
#pragma unroll 1
        for (int run = 0; run < slots; run += WARP) place += count_less(keys + run, key);
        if (key >= MOST_EXPERTS * MOST_SLOTS) continue;
        routing.order[place] = u16(key % MOST_SLOTS);
        routing.expert[place] = u16(key / MOST_SLOTS);
    }
    if (threadIdx.x == 0) routing.slots = total;
    __syncthreads();
}

// The first place of an expert, or of the next one that has slots.
MOEPACK_DEVICE int first_place(const Routing& routing, int expert) {
    int first = 0;
    for (int half = MOST_SLOTS / 2; half; half /= 2)
        if (first + half <= routing.slots && routing.expert[first + half - 1] < expert) first += half;
    return first + (first < routing.slots && routing.expert[first] < expert);
}

// Cuts the sorted slots into tiles.
template <int MOST>
MOEPACK_DEVICE void cut_tiles(Routing& routing, int top_k) {
    __shared__ int begun[WARP];  // tiles that start in each warp's places
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, tiles = 0;
    bool repeats = false;
    for (int base = 0; base < routing.slots; base += blockDim.x) {
        int place = base + threadIdx.x;
        bool exists = place < routing.slots;
        int expert = exists ? routing.expert[place] : 0, in_expert = exists ? place - first_place(routing, expert) : 0;
        bool begins = exists && in_expert % MOST == 0;
        if (exists && in_expert > 0) repeats |= routing.order[place] / top_k == routing.order[place - 1] / top_k;
        u32 beginnings = __ballot_sync(~0u, begins);
        if (lane == 0) begun[warp] = __popc(beginnings);
        __syncthreads();
        int number = tiles + __popc(beginnings & ((2u << lane) - 1)) - 1;
        for (int i = 0; i < int(blockDim.x) / WARP; ++i) {
            if (i < warp) number += begun[i];
            tiles += begun[i];
        }
        if (exists) routing.at[place] = u16(number);
        if (begins) {
            int end = least(place + MOST, first_place(routing, expert + 1));
            routing.tile[number] = {u16(expert), u16(place), u16(end - place)};
        }
        __syncthreads();
    }
    repeats = __syncthreads_or(repeats);
    if (threadIdx.x == 0) routing.tiles = tiles, routing.repeats = repeats;
}

// The routing of a linear layer: slots in order.
template <int MOST>
MOEPACK_DEVICE void list_slots(Routing& routing, int slots) {
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        routing.order[slot] = u16(slot);
        routing.at[slot] = u16(slot / MOST);
        if (slot % MOST == 0) routing.tile[slot / MOST] = {0, u16(slot), u16(least(MOST, slots - slot))};
    }
    if (threadIdx.x == 0) routing.slots = slots, routing.tiles = ceil_div(slots, MOST), routing.repeats = false;
}

// The routing of at most 32 slots by one warp, which needs fewer barriers than the general sort.
template <int MOST>
MOEPACK_DEVICE void route_few(Routing& routing, const i64* index, int slots, int experts, int top_k) {
    int lane = threadIdx.x, token = lane / top_k;
    i64 chosen = lane < slots ? index[lane] : -1;
    bool exists = chosen >= 0 && chosen < experts, repeats = false;
    int expert = exists ? int(chosen) : MOST_EXPERTS;
    int place = 0, first = 0, end = 0;  // of the slot; of its expert's slots
#pragma unroll 1
    for (int other = 0; other < slots; ++other) {
        int its = __shfl_sync(~0u, expert, other), its_token = __shfl_sync(~0u, token, other);
        bool before = its == expert && other < lane;
        first += its < expert, end += its <= expert, place += its < expert || before;
        repeats |= exists && before && its_token == token;
    }
    bool begins = exists && (place - first) % MOST == 0;
    int beginning = begins ? place : MOST_SLOTS, number = -1;
#pragma unroll 1
    for (int other = 0; other < slots; ++other) number += __shfl_sync(~0u, beginning, other) <= place;
    if (exists) routing.order[place] = u16(lane), routing.expert[place] = u16(expert), routing.at[place] = u16(number);
    if (begins) routing.tile[number] = {u16(expert), u16(place), u16(least(end - place, MOST))};
    u32 existing = __ballot_sync(~0u, exists), beginnings = __ballot_sync(~0u, begins);
    repeats = __any_sync(~0u, repeats);
    if (lane == 0) routing.slots = __popc(existing), routing.tiles = __popc(beginnings), routing.repeats = repeats;
}

// Builds the routing. Called by all threads of the block, in whole warps; they may read it on return.
template <int MOST>
MOEPACK_DEVICE void build_routing(Routing& routing, const i64* index, int slots, int experts, int top_k = 1) {
    if (index && slots <= WARP) {
        if (threadIdx.x < WARP) route_few<MOST>(routing, index, slots, experts, top_k);
    } else if (index) {
        sort_slots(routing, index, slots, experts);
        cut_tiles<MOST>(routing, top_k);
    } else {
        list_slots<MOST>(routing, slots);
    }
    __syncthreads();
}
#endif

}  // namespace moepack
