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

// Walks over the cells (place, chunk) that sixteen lanes have: every `step`-th.
template <Mode MODE>
struct Walk {
    const Problem& problem;
    const Routing& routing;
    const Cells& cells;
    int place, k, more_places, more_chunks;
    int slot, token, tokens, before;  // of the place; tokens of its tile, and of the tiles before it

    MOEPACK_DEVICE Walk(const Problem& problem, const Routing& routing, const Cells& cells, int first, int step)
        : problem(problem), routing(routing), cells(cells), place(cells.width.quotient(first)),
          k(cells.width.remainder(first)), more_places(cells.width.quotient(step)),
          more_chunks(cells.width.remainder(step)) {
        enter();
    }

    // Reads what the routing says of the place; the last one's behind the end.
    MOEPACK_DEVICE void enter() {
        int at = cells.start + least(place, cells.places - 1);
        const Tile& tile = routing.tile[routing.at[at]];
        slot = routing.order[at], token = at - tile.start, tokens = tile.tokens, before = tile.start - cells.start;
    }

    MOEPACK_DEVICE void next() {
        int old = place;
        place += more_places, k += more_chunks;
        if (k >= int(cells.width.by)) k -= int(cells.width.by), ++place;
        if (place != old) enter();
    }

    MOEPACK_DEVICE bool exists() const {
        return place < cells.places;
    }

    MOEPACK_DEVICE void load(u32 (&word)[8]) const {
        int row = MODE == Mode::combine ? slot : problem.top_k.quotient(slot);
        load_eight(problem.x, row, (cells.chunk + k) * CHUNK + threadIdx.x % 16 * 8, word);
    }

    template <class Format>
    MOEPACK_DEVICE void write(u8* to, const u32 (&word)[8]) const {
        float value[8], weight = MODE == Mode::combine && problem.weights ? problem.weights[slot] : 1.0f;
        to_floats(problem.x.type, word, value);
        to += i64(before * int(cells.width.by) + tokens * k) * (VALUE_BYTES + 4 * Format::NOTES);
        write_cell<Format>(to, token, tokens, value, weight, exists());
    }
};

// Makes cells: sixteen lanes the `first`-th, first + step and so on. `meanwhile` runs when the last values have been
// asked for, so that they do not queue behind weights.
template <class Format, Mode MODE, class Meanwhile>
MOEPACK_DEVICE void make_cells(const Problem& problem, const Routing& routing, const Cells& cells, u8* to, int first,
                               int step, Meanwhile meanwhile) {
    // Cells whose values are asked for before the first is written: what registers allow.
    constexpr int BATCH = MODE == Mode::combine && !Corrects<Format>::value ? 4 : 2;
    Walk<MODE> loading(problem, routing, cells, first, step), writing = loading;
    // Two groups of sixteen lanes shuffle together.
    for (int base = first & ~1, items = cells.places * int(cells.width.by);; base += BATCH * step) {
        u32 word[BATCH][8];
#pragma unroll
        for (int i = 0; i < BATCH; ++i, loading.next())
            if (base + i * step < items) loading.load(word[i]);
        bool last = base + BATCH * step >= items;
        if (last) meanwhile();
#pragma unroll
        for (int i = 0; i < BATCH; ++i, writing.next())
            if (base + i * step < items) writing.template write<Format>(to, word[i]);
        if (last) return;
    }
}

// Makes the cells of all slots, in global memory, by all blocks of a launch.
template <class Format, Mode MODE>
MOEPACK_DEVICE void lay_out(const Problem& problem, const Routing& routing) {
    Cells cells = {0, routing.slots, 0, problem.chunks};
    int groups = THREADS / 16, first = blockIdx.x * groups + threadIdx.x / 16, step = gridDim.x * groups;
    if (routing.slots > 0) make_cells<Format, MODE>(problem, routing, cells, problem.cells, first, step, [] {});
}
#endif

}  // namespace moepack
