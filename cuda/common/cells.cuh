// Makes cells (common/tokens.cuh) of activations: for a round of a block, or for all slots of a launch.
#pragma once
#include "common/schedule.cuh"
#include "common/tokens.cuh"

namespace moepack {

#if defined(__CUDACC__)
// Whether a Format's products have a part besides chunks (`CORRECTS`).
template <class Format, class = void>
struct Corrects {
    static constexpr bool value = false;
};

template <class Format>
struct Corrects<Format, decltype(void(Format::CORRECTS))> {
    static constexpr bool value = Format::CORRECTS;
};

// The cells of the places from `start` on in the routing, and of `width` chunks from `chunk` on.
struct Cells {
    int start, places, chunk;
    Divisor width;
};

// Walks over cells (place, chunk) from the `first` on: the chunks of a place one after the other.
template <Mode MODE>
struct Walk {
    const Problem& problem;
    const Routing& routing;
    const Cells& cells;
    int place, k;
    int row, token, tokens, before;  // of the place; tokens of its tile, and of the tiles before it
    float weight;

    MOEPACK_DEVICE Walk(const Problem& problem, const Routing& routing, const Cells& cells, int first)
        : problem(problem), routing(routing), cells(cells), place(cells.width.quotient(first)),
          k(first - place * int(cells.width.by)) {
        enter();
    }

    // Reads what the routing says of the place; the last one's behind the end.
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

// Makes cells: the `number`-th of `of` groups of sixteen lanes its share. `meanwhile` runs when the last values have
// been asked for, so that they do not queue behind weights.
template <class Format, Mode MODE, class Meanwhile>
MOEPACK_DEVICE void make_cells(const Problem& problem, const Routing& routing, const Cells& cells, u8* to, int number,
                               int of, Meanwhile meanwhile) {
    // Cells whose values are asked for before the first is written: what registers allow.
    constexpr int BATCH = MODE == Mode::combine && !Corrects<Format>::value && !Format::TOGETHER ? 4 : 2;
    int items = cells.places * int(cells.width.by), share = ceil_div(items, of), left = items - number * share;
    Walk<MODE> loading(problem, routing, cells, most(0, least(number * share, items - 1))), writing = loading;
    // Two groups of sixteen lanes shuffle together, though one may have fewer cells.
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

// Makes the cells of all slots, in global memory, by all blocks of a launch.
template <class Format, Mode MODE>
MOEPACK_DEVICE void lay_out(const Problem& problem, const Routing& routing) {
    Cells cells = {0, routing.slots, 0, problem.chunks};
    int groups = THREADS / 16, number = blockIdx.x * groups + threadIdx.x / 16;
    if (routing.slots > 0)
        make_cells<Format, MODE>(problem, routing, cells, problem.cells, number, gridDim.x * groups, [] {});
}
#endif

}  // namespace moepack
