// The two launches of an expert layer, for formats with blocks of 16 rows and chunks of 128 columns:
// `Layer<Format, MODE, MOST_TOKENS>::run` multiplies the tokens of all active experts.
//
// Launch: a persistent grid of two blocks of 8 warps per SM, or one of 16 (BLOCK_WARPS). Every block builds the routing
// (common/routing.cuh) and takes a contiguous share of the *units*: a row tile (`row_blocks` blocks of 16 rows) of one
// tile of tokens, or in COMBINE, a row tile of all tiles, whose outputs this block alone sums. The chunks of all tiles
// are numbered consecutively: tile * chunks + chunk. Within a unit, the warps divide (matrix, block of 16 rows, range
// of chunks) among them:
//
//     warp = (matrix * row_blocks + row block) * parts + part
//
// Each warp streams its chunks through its own ring in shared memory (cp.async, DEPTH - 1 chunks in flight). It
// prefetches across the ends of rounds and units, so memory never waits for a barrier. Activations are processed in
// *rounds* of as many cells (common/tokens.cuh) as fit. Cells that a previous launch has laid out are copied one round
// ahead, alternating between two halves of memory; otherwise blocks lay out their own. The sums of the warps of a row
// block are combined in shared memory. Every sum has a fixed order, determined by the routing and the launch.
//
// In COMBINE a *team* of consecutive blocks shares a unit's chunks. It is either a cluster, in which each block adds
// the sums of all blocks for its share of the outputs, or, if clusters are unavailable or too few fit, its blocks write
// partial sums, which another launch adds.
//
// A launch starts while the previous one ends (`enter_launch`). In COMBINE, its first chunks are then already in flight.
//
// A Format defines
//     Matrix                     the weights' launch arguments
//     STAGE, DEPTH               bytes of a chunk of a block of rows in the ring; chunks per ring
//     NOTES, SUMS, place(quad)   the contents of cells, see common/tokens.cuh
//     MAKES_CELLS                launches may pass no `cells`: blocks lay them out, and always if it is TOGETHER
//     TOGETHER                   warpgroups multiply: four warps with four row blocks and the same chunks; it also
//                                defines quad(product, lane)
//     CORRECTS                   products have an additional contribution: `correct<MOST>(matrix, tile, order, row,
//                                first, step, part)` adds to part[i] the row's value for token i, summed from `first`
//                                in steps of `step`
//     Lane(lane)                 constants of a lane
//     fetch(matrix, block, chunk, to, lane, policy)   starts to copy a chunk of a block of rows, over all experts
//     Source                     instead of it, if the position of a chunk follows from the previous one (`Fetching`)
//     multiply<N>(lane, stage, cells, tokens, sum)   sum[i] += chunk x cells of tokens 8 i to 8 i + 7
// where sum[i] holds rows 2 g and 2 g + 1 of columns 8 i + 2 t and 8 i + 2 t + 1:
// {(2g, 2t), (2g, 2t + 1), (2g + 1, 2t), (2g + 1, 2t + 1)} for lane 4 g + t.
#pragma once
#include "common/cells.cuh"
#include "common/ptx.cuh"
#include "common/warpgroups.cuh"

namespace moepack {

#if defined(__CUDACC__)
extern __shared__ __align__(128) u8 shared_memory[];

// Waits for the results of the previous launch (activations and routing), and allows the next launch to start.
MOEPACK_DEVICE void enter_launch() {
    wait_for_launch_before();
    let_next_launch_begin();
}

// Copies the chunks of a block of rows in sequence, with the Format's `fetch`.
template <class Format, class = void>
struct Fetching {
    typename Format::Matrix matrix;
    i64 block;
    int chunk, lane;

    MOEPACK_DEVICE Fetching() {}

    MOEPACK_DEVICE Fetching(const typename Format::Matrix& matrix, i64 block, int chunk, int lane)
        : matrix(matrix), block(block), chunk(chunk), lane(lane) {}

    MOEPACK_DEVICE void fetch(Shared to, u64 policy) {
        Format::fetch(matrix, block, chunk++, to, lane, policy);
    }
};

// The same with its `Source`.
template <class Format>
struct Fetching<Format, decltype(void(sizeof(typename Format::Source)))> : Format::Source {
    using Format::Source::Source;
};

template <class Format, Mode MODE, int MOST_TOKENS>
struct Layer {
    using Matrix = typename Format::Matrix;
    static constexpr int MATRICES = MODE == Mode::gated ? 2 : 1;
    static constexpr int RING = Format::DEPTH * Format::STAGE;
    static constexpr int CELL = VALUE_BYTES + 4 * Format::NOTES;
    // Data that is read but not used after the last cell: values and notes of tokens that do not exist.
    static constexpr int SLACK = (STEP_BYTES + 4 * Format::NOTES) * MOST_TOKENS;

    const Problem& problem;
    const Routing& routing;
    Matrix matrix;              // of this warp
    int lane, columns;          // columns of `sums`
    Schedule<MODE> schedule;
    Cursor<MODE> ahead, here;   // positions of copies and of products
    Fetching<Format> source;
    int remaining = 0;          // remaining chunks of `source`
    int since = 0;              // calls of `fetch` since `copy_cells`
    int stop = 0;               // the end of this block's units
    u64 policy;
    u8 *ring, *into, *from;     // this warp's chunks; the next to copy, the next to multiply
    float* sums;                // [WARPS][columns][16]
    u8* cells;                  // of the current round
    Unit staged = {-1, -1, 0};  // the activations in `cells`
    typename Format::Lane constants;

    MOEPACK_DEVICE Layer(const Problem& problem, const Routing& routing, const Matrix& first, const Matrix& second)
        : problem(problem), routing(routing),
          matrix(MODE == Mode::gated && threadIdx.x >= THREADS / 2 ? second : first), lane(threadIdx.x % WARP),
          columns(MODE == Mode::combine ? problem.tokens : least(problem.slots(), MOST_TOKENS)),
          schedule{problem, routing, int(shared_size() - cells_at() - SLACK) / (are_laid_out() ? 2 * CELL : CELL)},
          ahead(cursor()), here(cursor()),
          policy(read_once()), constants(threadIdx.x % WARP) {
        ring = into = from = shared_memory + threadIdx.x / WARP * RING;
        sums = reinterpret_cast<float*>(shared_memory + WARPS * RING);
        cells = shared_memory + cells_at();
    }

    // Makes a value uniform in a warp for the compiler, which does not allow warpgroup products on paths that it
    // considers divergent.
    static MOEPACK_DEVICE int even(int value) {
        return Format::TOGETHER ? __shfl_sync(~0u, value, 0) : value;
    }

    static MOEPACK_DEVICE Round even(Round round) {
        round.number = even(round.number), round.begin = even(round.begin), round.end = even(round.end);
        return round;
    }

    // Whether a previous launch has laid out the cells.
    MOEPACK_DEVICE bool are_laid_out() const {
        return !Format::TOGETHER && problem.cells;
    }

    MOEPACK_DEVICE int cells_at() const {
        return WARPS * (RING + columns * BLOCK_ROWS * 4);
    }

    MOEPACK_DEVICE Cursor<MODE> cursor() const {
        int warp = threadIdx.x / WARP, bits = 31 - __clz(WARPS / MATRICES) - (31 - __clz(problem.row_blocks));
        return {schedule, warp & ((1 << bits) - 1), bits, (warp >> bits) & (problem.row_blocks - 1)};
    }

    // The first round of a unit; an empty round after the last unit.
    MOEPACK_DEVICE Round first_round(int number) const {
        if (number >= stop) return {number, 0, 0, {0, 0, 0}};
        Unit unit = schedule.unit(number);
        int end = unit.first < unit.last ? schedule.round_end(unit.first, unit.last) : unit.last;
        return {number, unit.first, end, unit};
    }

    MOEPACK_DEVICE Round next_round(const Round& round) const {
        if (round.end >= round.unit.last) return first_round(round.number + 1);
        return {round.number, round.end, schedule.round_end(round.end, round.unit.last), round.unit};
    }

    // Identifies a round's activations by their chunks; if there is a single token, all experts read the same ones.
    MOEPACK_DEVICE Unit activations_of(const Round& round) const {
        if (round.begin == round.end) return staged;
        const Tile& tile = routing.tile[problem.chunks.quotient(round.begin)];
        bool same = MODE != Mode::combine && problem.tokens == 1 && tile.tokens == 1;
        int first = same ? problem.chunks.remainder(round.begin) : round.begin;
        return {first, first + round.end - round.begin, same};
    }

    // The cells of a round: a range of tokens times a range of chunks.
    MOEPACK_DEVICE Cells cells_of(const Round& round) const {
        int tile = problem.chunks.quotient(round.begin), chunk = round.begin - tile * schedule.chunks();
        const Tile &begin = routing.tile[tile], &end = routing.tile[problem.chunks.quotient(round.end - 1)];
        u32 width = least(schedule.chunks() - chunk, round.end - round.begin);
        return {begin.start, end.start + end.tokens - begin.start, chunk, {width, ~0u / width}};
    }

    // Starts to copy the cells of a round that are laid out in global memory.
    MOEPACK_DEVICE void copy_cells(const Round& round, u8* to) {
        Cells copied = cells_of(round);
        const Tile& tile = routing.tile[problem.chunks.quotient(round.begin)];
        i64 first = i64(copied.start) * schedule.chunks() + i64(tile.tokens) * copied.chunk;
        const u8* data = problem.cells + first * CELL;
        int bytes = copied.places * int(copied.width.by) * CELL;
        for (int i = threadIdx.x * 16; i < bytes; i += THREADS * 16) copy_async(shared_address(to + i), data + i);
        commit_copies();
        since = 0;
    }

    // Lays out the cells of a round. `meanwhile` as in `make_cells`.
    template <class Meanwhile>
    MOEPACK_DEVICE void make_cells_of(const Round& round, Meanwhile meanwhile) {
        constexpr int GROUPS = THREADS / 16;
        Cells made = cells_of(round);
        bool few = made.places * int(made.width.by) <= 2 * GROUPS;
        if constexpr (Format::TOGETHER)
            if (!few) return make_tiles<Format, MODE>(problem, routing, made, cells, meanwhile);
        if constexpr (Format::MAKES_CELLS)
            make_cells<Format, MODE>(problem, routing, made, cells, threadIdx.x / 16, GROUPS, meanwhile);
    }

    // Starts to copy activations to the half of the cells that the current round does not read.
    MOEPACK_DEVICE void prepare(const Round& round, const Unit& activations) {
        if (are_laid_out() && activations != staged) copy_cells(round, other_cells());
    }

    // Chunks that are requested before the previous launch has ended, because only the activations depend on it. The
    // index of a layer was complete before that launch: the launch of the first products has waited for it.
    MOEPACK_DEVICE int early() const {
        return MODE != Mode::combine ? 0 : problem.index ? Format::DEPTH - 1 : 1;
    }

    // Switches to a round that `prepare` has processed. The first call fills the ring after its own reads, so that
    // activations do not queue behind weights.
    MOEPACK_DEVICE void enter(const Round& round, const Unit& activations) {
        if (!(activations != staged)) return;
        auto start = [&] {
#pragma unroll 1
            for (int i = 1 + early(); staged.first < 0 && i < Format::DEPTH; ++i) fetch();
        };
        if (are_laid_out()) {
            start();
            wait_cells();
            cells = other_cells();
        } else {
            __syncthreads();
            make_cells_of(round, start);
            if (Format::TOGETHER) publish_operands();
        }
        staged = activations;
        __syncthreads();
    }

    MOEPACK_DEVICE u8* other_cells() const {
        u8* first = shared_memory + cells_at();
        return cells == first ? first + schedule.capacity * CELL : first;
    }

    // Waits for this thread's latest `copy_cells`, but not for chunks that `fetch` has requested since, if they are
    // many.
    MOEPACK_DEVICE void wait_cells() {
        if (since >= Format::DEPTH - 1) wait_copies<Format::DEPTH - 1>();
        else if (since == Format::DEPTH - 2) wait_copies<Format::DEPTH - 2>();
        else wait_copies<0>();
    }

    // Starts to copy the next chunk, if there is one.
    MOEPACK_DEVICE void fetch() {
        if (remaining == 0 && ahead.find()) {
            remaining = ahead.take();
            i64 block = i64(routing.tile[ahead.tile].expert) * problem.blocks() + ahead.block();
            source = Fetching<Format>(matrix, block, ahead.chunk, lane);
        }
        if (remaining > 0) {
            source.fetch(shared_address(into), policy);
            --remaining;
        }
        commit_copies();
        ++since;
        into += Format::STAGE;
        if (into == ring + RING) into = ring;
    }

    // Multiplies chunks of one tile, whose cells are contiguous.
    template <int N>
    MOEPACK_DEVICE void multiply(int count, const Tile& tile, const u8* cell) {
        float sum[N][4] = {};
        int tokens = tile.tokens;
        for (; count > 0; --count) {
            wait_copies<Format::DEPTH - 2>();
            __syncwarp();
            fetch();
            Format::template multiply<N>(constants, from, cell, tokens, sum);
            cell += tokens * CELL;
            from += Format::STAGE;
            if (from == ring + RING) from = ring;
        }
        add(tile, sum);
    }

    // Multiplies this warp's share of a round.
    MOEPACK_DEVICE void multiply(int first, int last) {
        if (first == last) return;
        int number = problem.chunks.quotient(first), chunk = first - number * schedule.chunks();
        int width = least(schedule.chunks() - chunk, last - first), start = routing.tile[number].start;
        here.enter(first, last);
        for (here.at = even(here.at), here.end = even(here.end); here.at < here.end;) {
            int count = even(here.take());
            here.at = even(here.at);
            const Tile& tile = routing.tile[here.tile];
            const u8* cell = cells + ((tile.start - start) * width + tile.tokens * (here.chunk - chunk)) * CELL;
            int tokens = even(tile.tokens);
            if (MOST_TOKENS == 8 || tokens <= 8) multiply<1>(count, tile, cell);
            else if (MOST_TOKENS == 16 || tokens <= 16) multiply<2>(count, tile, cell);
            else multiply<MOST_TOKENS / 8>(count, tile, cell);
        }
    }

    // Adds a tile's sums to this warp's part of `sums`. If a token chose an expert twice, it has two columns; the four
    // lanes of a row then take turns, so that the order is fixed.
    template <int N>
    MOEPACK_DEVICE void add(const Tile& tile, const float (&sum)[N][4]) {
        float* mine = sums + threadIdx.x / WARP * columns * BLOCK_ROWS + lane / 4 * 2;
        int turns = MODE == Mode::combine && routing.repeats ? 4 : 1;
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) {
                int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
                if ((turns > 1 && lane % 4 != turn) || token >= tile.tokens) continue;
                int column = MODE == Mode::combine ? problem.top_k.quotient(routing.order[tile.start + token]) : token;
                float2* to = reinterpret_cast<float2*>(mine + column * BLOCK_ROWS);
                *to = {to->x + sum[i / 2][i % 2], to->y + sum[i / 2][2 + i % 2]};
            }
            __syncwarp();
        }
    }

    // Adds a Format's contribution other than chunks, for a tile, to this warp's part of `sums`. Half a warp covers the
    // 16 rows, and both halves of all warps of a row block divide the sum.
    MOEPACK_DEVICE void correct(const Tile& tile) {
        float part[MOST_TOKENS] = {};
        float* mine = sums + threadIdx.x / WARP * columns * BLOCK_ROWS + lane % BLOCK_ROWS;
        int row = here.block() * BLOCK_ROWS + lane % BLOCK_ROWS;
        Format::template correct<MOST_TOKENS>(matrix, tile, routing.order, least(row, problem.rows - 1),
                                              here.part * 2 + lane / BLOCK_ROWS, 2 << here.part_bits, part);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < MOST_TOKENS; ++i) {
            part[i] += __shfl_xor_sync(~0u, part[i], BLOCK_ROWS);
            if (i >= tile.tokens || lane >= BLOCK_ROWS) continue;
            int slot = routing.order[tile.start + i];
            float weight = MODE == Mode::combine && problem.weights ? problem.weights[slot] : 1.0f;
            mine[(MODE == Mode::combine ? problem.top_k.quotient(slot) : i) * BLOCK_ROWS] += part[i] * weight;
        }
        __syncwarp();
    }

    // The same for all tiles of a unit, once.
    MOEPACK_DEVICE void correct(const Unit& unit, int split) {
        if (split > 0) return;
        int tile = MODE == Mode::combine ? 0 : problem.chunks.quotient(unit.first);
        int end = MODE == Mode::combine ? routing.tiles : tile + 1;
        for (; tile < end; ++tile) correct(routing.tile[tile]);
    }

    // Sums four neighboring rows over the warps, and clears them in `sums`.
    MOEPACK_DEVICE void take(int block, int column, int row, float (&total)[4]) {
        float* from = sums + ((block << here.part_bits) * columns + column) * BLOCK_ROWS + row;
        total[0] = total[1] = total[2] = total[3] = 0;
#pragma unroll 4
        for (int i = 0; i < 1 << here.part_bits; ++i, from += columns * BLOCK_ROWS) {
            float4& part = *reinterpret_cast<float4*>(from);
            total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
            part = {0, 0, 0, 0};
        }
    }

    // Adds up the `sums` of all blocks of a cluster without clearing them.
    MOEPACK_DEVICE void take_of_cluster(int block, int column, int row, float (&total)[4]) const {
        Shared from = shared_address(sums + ((block << here.part_bits) * columns + column) * BLOCK_ROWS + row);
        int blocks = 1 << problem.split_bits;
        total[0] = total[1] = total[2] = total[3] = 0;
#pragma unroll 1
        for (int i = 0; i < 1 << here.part_bits; ++i, from += columns * BLOCK_ROWS * 4) {
#pragma unroll 1
            for (int first = 0; first < blocks; first += 4) {
                // Four blocks are loaded at once; indices after the last are not added.
                float4 part[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) part[j] = load_of_block(from, least(first + j, blocks - 1));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (first + j >= blocks) break;
                    total[0] += part[j].x, total[1] += part[j].y, total[2] += part[j].z, total[3] += part[j].w;
                }
            }
        }
    }

    MOEPACK_DEVICE bool is_cluster() const {
        return MODE == Mode::combine && HAS_CLUSTERS && problem.split_bits && !problem.in_parts;
    }

    // Writes the outputs of a unit, or this block's share in a cluster; a thread writes four rows of a token.
    MOEPACK_DEVICE void write(const Unit& unit, int split) {
        const Tile& tile = routing.tile[problem.chunks.quotient(unit.first)];
        int bits = 2 + 31 - __clz(problem.row_blocks), outputs = MODE == Mode::combine ? problem.tokens : tile.tokens;
        bool shared = is_cluster();
        int first = shared ? split * THREADS + threadIdx.x : threadIdx.x;
        for (int item = first; item < outputs << bits; item += shared ? THREADS << problem.split_bits : THREADS) {
            int column = item >> bits, place = (item & ((1 << bits) - 1)) * 4, block = place / BLOCK_ROWS;
            float value[4], up[4];
            if (shared) take_of_cluster(block, column, place % BLOCK_ROWS, value);
            else take(block, column, place % BLOCK_ROWS, value);
            if (MODE == Mode::gated) take(problem.row_blocks + block, column, place % BLOCK_ROWS, up);
            place += unit.rows << (bits + 2);
            int line = MODE != Mode::combine ? routing.order[tile.start + column]
                                             : column + (problem.in_parts ? split * problem.tokens : 0);
            float* to = problem.out + i64(line) * problem.rows + place;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (place + i >= problem.rows) break;
                if (MODE == Mode::gated) to[i] = silu(value[i]) * up[i];
                else to[i] = MODE == Mode::multiply ? silu(to[i]) * value[i] : value[i];
            }
        }
    }

    static MOEPACK_DEVICE float silu(float x) {
        return x / (1.0f + __expf(-x));
    }

    // Writes the outputs of a unit.
    MOEPACK_DEVICE void finish(const Round& round) {
        int split = schedule.split();
        if constexpr (Corrects<Format>::value) correct(round.unit, split);
        if (is_cluster()) wait_for_cluster<true>();
        else __syncthreads();
        write(round.unit, split);
        if (is_cluster()) wait_for_cluster<false>(), clear();
        __syncthreads();
    }

    MOEPACK_DEVICE void clear() {
        for (int i = threadIdx.x; i < WARPS * columns * BLOCK_ROWS; i += THREADS) sums[i] = 0;
    }

    MOEPACK_DEVICE void run() {
        clear();
        int team = blockIdx.x >> problem.split_bits;
        int units = schedule.units(), share = problem.teams.quotient(units), more = problem.teams.remainder(units);
        int first = team * share + least(team, more);
        stop = even(first + share + (team < more));
        ahead.start(first, stop);
        if (MODE == Mode::combine) {
#pragma unroll 1
            for (int i = 0; i < early(); ++i) fetch();
            enter_launch();
        }
        Round round = {first - 1, 0, 0, {0, 0, 0}};
        do {
            Round next = even(next_round(round));
            Unit activations = activations_of(next);
            prepare(next, activations);
            here.unit = round.unit;
            multiply(round.begin, round.end);
            if (next.number != round.number && round.number >= first) finish(round);
            enter(next, activations);
            round = next;
        } while (round.number < stop);
        wait_copies<0>();
    }
};

// The body of a layer's kernels, and of the kernels that lay out cells beforehand.
template <class Format, Mode MODE, int MOST_TOKENS>
MOEPACK_DEVICE void run_layer(const Problem& problem, const typename Format::Matrix& first,
                              const typename Format::Matrix& second) {
    __shared__ Routing routing;
    if (MODE != Mode::combine) enter_launch();
    build_routing<MOST_TOKENS>(routing, problem.index, problem.slots(), problem.experts, problem.top_k.by);
    Layer<Format, MODE, MOST_TOKENS>(problem, routing, first, second).run();
}

template <class Format, Mode MODE, int MOST_TOKENS>
MOEPACK_DEVICE void lay_out_layer(const Problem& problem) {
    __shared__ Routing routing;
    enter_launch();
    build_routing<MOST_TOKENS>(routing, problem.index, problem.slots(), problem.experts, problem.top_k.by);
    if constexpr (!Format::TOGETHER) lay_out<Format, MODE>(problem, routing);
}

// out[i] = the sum of parts[split][i] over all splits, for i < count: completes a `combine` that was split.
MOEPACK_DEVICE void add_parts(const float* parts, float* out, int count, int splits) {
    enter_launch();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        float sum = parts[i];
#pragma unroll 8
        for (int split = 1; split < splits; ++split) sum += parts[i64(split) * count + i];
        out[i] = sum;
    }
}
#endif

}  // namespace moepack
