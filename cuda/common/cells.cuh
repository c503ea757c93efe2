// Lays out activations as cells (common/tokens.cuh): for a round of a block, or for all slots of a launch.
#pragma once
#include "common/schedule.cuh"
#include "common/tokens.cuh"

namespace moepack {

#if defined(__CUDACC__)
// Whether a Format's products have a contribution in addition to chunks (`CORRECTS`).
template <class Format, class = void>
struct Corrects {
    static constexpr bool value = false;
};

template <class Format>
struct Corrects<Format, decltype(void(Format::CORRECTS))> {
    static constexpr bool value = Format::CORRECTS;
};

// The cells of the places of the routing from `start` on, for `width` chunks from `chunk` on.
struct Cells {
    int start, places, chunk;
    Divisor width;
};

// Iterates over cells (place, chunk) from `first` on, with all chunks of a place in sequence.
template <Mode MODE>
struct Walk {
    const Problem& problem;
    const Routing& routing;
    const Cells& cells;
    int place, k;
    int row, token, tokens, before;  // of the place; tokens of its tile, and of preceding tiles
    float weight;

    MOEPACK_DEVICE Walk(const Problem& problem, const Routing& routing, const Cells& cells, int first)
        : problem(problem), routing(routing), cells(cells), place(cells.width.quotient(first)),
          k(first - place * int(cells.width.by)) {
        enter();
    }

    // Reads the routing of the place; places after the end repeat the last one.
    MOEPACK_DEVICE void enter() {
        int at = cells.start + least(place, cells.places - 1), slot = routing.order[at];
        const Tile& tile = routing.tile[routing.at[at]];
        token = at - tile.start, tokens = tile.tokens, before = tile.start - cells.start;
        row = MODE == Mode::combine ? slot : problem.top_k.quotient(slot);
        weight = MODE == Mode::combine && problem.weights ? problem.weights[slot] : 1.0f;
    }

    MOEPACK_DEVICE void next() {
        if (++k == int(cells.width.by)) k = 0, ++place, enter();
    }

    MOEPACK_DEVICE void load(u32 (&word)[8]) const {
        load_eight(problem.x, row, (cells.chunk + k) * CHUNK + threadIdx.x % 16 * 8, word);
    }

    template <class Format>
    MOEPACK_DEVICE void write(u8* to, const u32 (&word)[8], bool exists) const {
        float value[8];
        to_floats(problem.x.type, word, value);
        to += (before * int(cells.width.by) + tokens * k) * (VALUE_BYTES + 4 * Format::NOTES);
        write_cell<Format>(to, token, tokens, value, weight, exists);
    }
};

// Lays out cells: group `number` of `of` groups of sixteen lanes processes its share. `meanwhile` runs after the last
// values were requested, so that they do not queue behind weights.
template <class Format, Mode MODE, class Meanwhile>
MOEPACK_DEVICE void make_cells(const Problem& problem, const Routing& routing, const Cells& cells, u8* to, int number,
                               int of, Meanwhile meanwhile) {
    // Cells that are loaded before the first one is written, limited by registers.
    constexpr int BATCH = MODE == Mode::combine && !Corrects<Format>::value && !Format::TOGETHER ? 4 : 2;
    int items = cells.places * int(cells.width.by), share = ceil_div(items, of), left = items - number * share;
    Walk<MODE> loading(problem, routing, cells, most(0, least(number * share, items - 1))), writing = loading;
    // Two groups of sixteen lanes shuffle together, although one may have fewer cells.
    for (;; share -= BATCH, left -= BATCH) {
        u32 word[BATCH][8];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (i < left) loading.load(word[i]), loading.next();
        if (share <= BATCH) meanwhile();
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (i < share) writing.template write<Format>(to, word[i], i < left), writing.next();
        if (share <= BATCH) return;
    }
}

// A cell of a tile for warpgroups; this lane of four holds the quads of eight products.
template <class Format, Mode MODE, Type TYPE>
struct TileCell {
    int at, k, slot;
    Stored<TYPE> quad[8];

    // Loads a cell; places vary fastest. Indices after the end repeat the last cell.
    MOEPACK_DEVICE void load(const Problem& problem, const Routing& routing, const Cells& cells, const Divisor& places,
                             int item) {
        item = least(item, cells.places * int(cells.width.by) - 1);
        k = places.quotient(item), at = cells.start + item - k * cells.places, slot = routing.order[at];
        int row = MODE == Mode::combine ? slot : problem.top_k.quotient(slot), first = (cells.chunk + k) * CHUNK;
#pragma unroll
        for (int i = 0; i < 8; ++i) quad[i].load(problem.x, row, first + Format::quad(i, threadIdx.x % 4) * 4);
    }

    MOEPACK_DEVICE void write(const Problem& problem, const Routing& routing, const Cells& cells, u8* to) const {
        const Tile& tile = routing.tile[routing.at[at]];
        float weight = MODE == Mode::combine && problem.weights ? problem.weights[slot] : 1.0f;
        int before = (tile.start - cells.start) * int(cells.width.by) + tile.tokens * k;
        to += before * (VALUE_BYTES + 4 * Format::NOTES);
        write_tile<Format>(to, at - tile.start, tile.tokens, quad, weight);
    }
};

// Lays out many cells for warpgroups, with a warp writing the words of eight tokens side by side. `meanwhile` as above.
template <class Format, Mode MODE, Type TYPE, class Meanwhile>
MOEPACK_DEVICE void make_tiles(const Problem& problem, const Routing& routing, const Cells& cells, u8* to,
                               Meanwhile meanwhile) {
    constexpr int BATCH = TYPE == Type::f32 ? 1 : 2, STRIDE = THREADS / 4;
    int items = cells.places * int(cells.width.by);
    Divisor places = {u32(cells.places), ~0u / u32(cells.places)};
    for (int first = threadIdx.x / 4;; first += BATCH * STRIDE) {
        TileCell<Format, MODE, TYPE> cell[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) cell[i].load(problem, routing, cells, places, first + i * STRIDE);
        bool last = first - int(threadIdx.x) / 4 + BATCH * STRIDE >= items;
        if (last) meanwhile();
#pragma unroll
        for (int i = 0; i < BATCH; ++i) cell[i].write(problem, routing, cells, to);
        if (last) return;
    }
}

template <class Format, Mode MODE, class Meanwhile>
MOEPACK_DEVICE void make_tiles(const Problem& problem, const Routing& routing, const Cells& cells, u8* to,
                               Meanwhile meanwhile) {
    if (problem.x.type == Type::f32) make_tiles<Format, MODE, Type::f32>(problem, routing, cells, to, meanwhile);
    else if (problem.x.type == Type::f16) make_tiles<Format, MODE, Type::f16>(problem, routing, cells, to, meanwhile);
    else make_tiles<Format, MODE, Type::bf16>(problem, routing, cells, to, meanwhile);
}

// Lays out the cells of all slots in global memory, with all blocks of a launch.
template <class Format, Mode MODE>
MOEPACK_DEVICE void lay_out(const Problem& problem, const Routing& routing) {
    Cells cells = {0, routing.slots, 0, problem.chunks};
    int groups = THREADS / 16, number = blockIdx.x * groups + threadIdx.x / 16;
    if (routing.slots > 0)
        make_cells<Format, MODE>(problem, routing, cells, problem.cells, number, gridDim.x * groups, [] {});
}
#endif

}  // namespace moepack
