// What a block of cuda/coded.cu prepares before decoding: its work, tables in shared memory, activations as operands B.
#pragma once
#include "coded.cuh"
#include "common/layer.cuh"
#include "common/routes.cuh"

namespace moepack {

// The sections of the weights' layout, passed to a launch.
struct CodedMatrix {
    const float* scales;
    const u32 *tables, *blocks, *starts, *firsts, *corrections;
    const u8* records;
    int row_scales, table_count;
};

// The arguments of a launch other than the matrices.
struct CodedProblem {
    Activations x;
    const i64* index;      // [tokens * top_k], or null: all slots belong to expert 0
    const float* weights;  // [tokens * top_k], or null: 1
    float* out;            // [slots, rows]; combine: [tokens, rows]
    u8* cells;             // operands B laid out by `lay_out`, or null if blocks lay them out
    float2* notes;         // factor and sum of each place
    Routes routes;         // MANY: the schedule
    int tokens, experts, rows;
    int groups;            // groups of 16 columns
    int chunks, of_segment;
    int table_bytes, sum_bytes, cell_bytes, stage;  // shared memory: table copies, sums, cells; a record
    u32 one;
    Divisor top_k, segments, blocks;

    MOEPACK_BOTH int slots() const {
        return tokens * int(top_k.by);
    }
};

#if defined(__CUDACC__)
#if MANY
// The schedule of a preceding launch as a routing; every tile has places for the most tokens.
struct CodedRouting {
    Routes routes;
    int tiles, slots;  // `slots` counts places

    MOEPACK_DEVICE void build(const CodedProblem& problem) {
        if (threadIdx.x == 0) routes = problem.routes, tiles = *routes.count, slots = tiles * TOKENS;
        __syncthreads();
    }

    struct Tile {
        int expert, start, tokens;
    };

    MOEPACK_DEVICE Tile tile_at(int number) const {
        return {routes.expert[number], number * TOKENS, routes.tokens[number]};
    }

    MOEPACK_DEVICE Tile tile_of(int place) const {
        return tile_at(place / TOKENS);
    }

    MOEPACK_DEVICE int slot_at(int place) const {
        return routes.slot[place];
    }

    // Whether a place has a token.
    MOEPACK_DEVICE bool has(int place) const {
        return place % TOKENS < routes.tokens[place / TOKENS];
    }
};
#else
struct CodedRouting : Routing {
    MOEPACK_DEVICE void build(const CodedProblem& problem) {
        build_routing<TOKENS>(*this, problem.index, problem.slots(), problem.experts);
    }

    MOEPACK_DEVICE const Tile& tile_at(int number) const {
        return tile[number];
    }

    MOEPACK_DEVICE const Tile& tile_of(int place) const {
        return tile[at[place]];
    }

    MOEPACK_DEVICE int slot_at(int place) const {
        return order[place];
    }

    MOEPACK_DEVICE bool has(int) const {
        return true;
    }
};
#endif

MOEPACK_DEVICE void prefetch(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

constexpr int MOST_WARPS = MOST_THREADS / WARP;

// A segment of a row block of a matrix, and the tile of tokens that it is multiplied by.
struct CodedUnit {
    int tile, second, block, segment;
};

// The tasks of a block; in shared memory, because rarely read values would occupy registers of all threads.
struct Share {
    int first, last;
};

// The units of a block, in task order.
template <Mode MODE>
struct Work {
    const CodedProblem& problem;
    const CodedRouting& routing;
    const Share& tasks;

    // Called by all threads, which may read the tasks after the next barrier.
    MOEPACK_DEVICE Work(const CodedProblem& problem, const CodedRouting& routing, Share& tasks)
        : problem(problem), routing(routing), tasks(tasks) {
        int blocks = problem.blocks.by, count = MODE == Mode::combine ? blocks : routing.tiles * blocks;
        int share = count / gridDim.x, more = count % gridDim.x;
        int first = blockIdx.x * share + least<int>(blockIdx.x, more);
        if (threadIdx.x == 0) tasks = {first, first + share + (blockIdx.x < more)};
    }

    // Whether all tiles consist of the same single token.
    MOEPACK_DEVICE bool same() const {
        return MODE != Mode::combine && problem.tokens == 1;
    }

    // The most tokens per tile.
    MOEPACK_DEVICE int columns() const {
        return least(problem.slots(), TOKENS);
    }

    MOEPACK_DEVICE int units() const {
        return (tasks.last - tasks.first) * of_task();
    }

    // The number of units of a row block of a matrix: with many tokens, a unit has all segments.
    MOEPACK_DEVICE int segments() const {
        return MANY ? 1 : int(problem.segments.by);
    }

    // Units per task.
    MOEPACK_DEVICE int of_task() const {
        return segments() * (MODE == Mode::combine ? routing.tiles : MODE == Mode::gated ? 2 : 1);
    }

    MOEPACK_DEVICE CodedUnit unit(int number) const {
        int part = MANY ? number : problem.segments.quotient(number), segment = number - part * segments();
        if (MODE == Mode::combine) {
            int task = part / routing.tiles;
            return {part - task * routing.tiles, 0, tasks.first + task, segment};
        }
        int task = tasks.first + (MODE == Mode::gated ? part / 2 : part), tile = problem.blocks.quotient(task);
        return {tile, MODE == Mode::gated ? part % 2 : 0, task - tile * int(problem.blocks.by), segment};
    }
};

// The areas of a launch in dynamic shared memory.
struct Areas {
    u8 *tables, *sums, *cells, *rings;

    MOEPACK_DEVICE explicit Areas(const CodedProblem& problem)
        : tables(shared_memory), sums(tables + problem.table_bytes), cells(sums + problem.sum_bytes),
          rings(cells + problem.cell_bytes) {}
};

// The tables of a block's row blocks, in as many copies as fit.
struct Tables {
    u64 used[2];  // bitmasks of the first and the second matrix
    int copies;   // a power of two, at most 32

    // Called by all threads, after `used` is set. A warp loads 32 entries at once, one per lane, and writes their
    // copies.
    MOEPACK_DEVICE void load(const CodedMatrix& first, const CodedMatrix& second, u8* to, int room) {
        int own = __popcll(used[0]), count = own + __popcll(used[1]), shift = 5, lane = threadIdx.x % WARP;
        while (shift > 0 && count << (shift + 10) > room) --shift;
        if (threadIdx.x == 0) copies = 1 << shift;
        for (int part = threadIdx.x / WARP; part < count * (SLOTS / WARP); part += blockDim.x / WARP) {
            int number = part / (SLOTS / WARP), matrix = number >= own;
            u64 rest = used[matrix];
            for (int before = number - (matrix ? own : 0); before > 0; --before) rest &= rest - 1;
            const u32* table = (matrix ? second.tables : first.tables) + (__ffsll(rest) - 1) * SLOTS;
            u32 entry = __ldg(table + part * WARP % SLOTS + lane);
            u32* words = reinterpret_cast<u32*>(to) + (part * WARP << shift) + lane;
#pragma unroll 8
            for (int i = 0; i < 1 << shift; ++i) words[i * WARP] = __shfl_sync(~0u, entry, (i * WARP + lane) >> shift);
        }
    }

    // The copy of a matrix's table that a lane reads.
    MOEPACK_DEVICE Copies find(int matrix, int table, const u8* at) const {
        int before = __popcll(used[matrix] & (1ull << table) - 1) + (matrix ? __popcll(used[0]) : 0);
        u32 place = before * SLOTS * copies + (threadIdx.x & (copies - 1));
        return {shared_address(at) + 4 * place, u32(4 * copies)};
    }
};

// Determines which tables the units of a block use; called by all threads.
template <Mode MODE>
MOEPACK_DEVICE void find_tables(const Work<MODE>& work, const CodedMatrix& first, const CodedMatrix& second,
                                Tables& tables) {
    constexpr int MATRICES = MODE == Mode::gated ? 2 : 1;
    bool several = first.table_count > 1 || (MATRICES == 2 && second.table_count > 1);
    if (threadIdx.x < 2) tables.used[threadIdx.x] = !several && int(threadIdx.x) < MATRICES;
    __syncthreads();
    if (!several) return;
    int parts = work.units() / work.segments();
    for (int part = threadIdx.x; part < parts; part += blockDim.x) {
        CodedUnit unit = work.unit(part * work.segments());
        const u32* blocks = unit.second ? second.blocks : first.blocks;
        int block = work.routing.tile_at(unit.tile).expert * int(work.problem.blocks.by) + unit.block;
        atomicOr(&tables.used[unit.second], 1ull << (blocks[block] & 63));
    }
    __syncthreads();
}

// Lays out operands B of the tokens at `count` places of the routing, starting at `first`, and their notes: the inverse
// of the power-of-two scale times the weight, and the sum of the values. Called by all threads of a block; warps divide
// the places, and `meanwhile` runs after the first values were requested.
//
// The cells of a tile start at that of its first place. Every 16 columns take 32 bytes per token: four lanes of four
// values, those of columns t, 4 + t, 8 + t and 12 + t.
template <Mode MODE, class Meanwhile>
MOEPACK_DEVICE void lay_out_places(const CodedProblem& problem, const CodedRouting& routing, int first, int count,
                                   u8* cells, float2* notes, bool same, Meanwhile meanwhile) {
    __shared__ float largest_of[MOST_WARPS], sum_of[MOST_WARPS];
    int warps = blockDim.x / WARP, per = most(1, warps / most(count, 1)), rows = warps / per;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, in_row = warp % per * WARP + lane;
    int more = per * WARP * 8, end = problem.groups * CODED_GROUP;
    for (int base = 0; base < count; base += rows) {
        bool exists = warp / per < rows && base + warp / per < count;
        int place = first + least(base + warp / per, count - 1), slot = routing.slot_at(place);
        int row = MODE == Mode::combine ? slot : problem.top_k.quotient(slot);
        const auto& tile = routing.tile_of(place);
        int tokens = same ? 1 : tile.tokens;
        u8* to = same ? cells : cells + (i64(tile.start) * problem.groups + place - tile.start) * 32;
        // The first two loads of a thread stay in registers; later ones (long rows) are loaded twice.
        u32 word[2][8];
        float value[8], largest = 0, sum = 0;
        load_eight(problem.x, row, in_row * 8, word[0]), load_eight(problem.x, row, in_row * 8 + more, word[1]);
        if (base == 0) meanwhile();
        auto compare = [&](const u32 (&eight)[8]) {
            to_floats(problem.x.type, eight, value);
#pragma unroll
            for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(value[i]));
        };
        compare(word[0]), compare(word[1]);
        u32 later[8];
        for (int column = in_row * 8 + 2 * more; column < end; column += more)
            load_eight(problem.x, row, column, later), compare(later);
#pragma unroll
        for (int distance = WARP / 2; distance; distance /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        if (lane == 0) largest_of[warp] = largest;
        __syncthreads();
        int group = least(warp / per, rows - 1) * per;
        if (per > 1) {
            largest = largest_of[group + least(lane, per - 1)];
#pragma unroll
            for (int distance = WARP / 2; distance; distance /= 2)
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        }
        Scale scale = scale_of(largest);
        auto write = [&](int column, const u32 (&eight)[8]) {
            if (!exists || column >= end) return;
            to_floats(problem.x.type, eight, value);
            u8* from = to + i64(column / CODED_GROUP) * tokens * 32 + column % CODED_GROUP / 8 * 4;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                u32 pair = to_half2(value[t] * scale.factor, value[4 + t] * scale.factor);
                *reinterpret_cast<u32*>(from + t * 8) = pair;
                sum += half_value(u16(pair)) + half_value(u16(pair >> 16));
            }
        };
        write(in_row * 8, word[0]), write(in_row * 8 + more, word[1]);
        for (int column = in_row * 8 + 2 * more; column < end; column += more)
            load_eight(problem.x, row, column, later), write(column, later);
#pragma unroll
        for (int distance = WARP / 2; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) sum_of[warp] = sum;
        __syncthreads();
        if (exists && in_row == 0) {
            float total = 0, weight = MODE == Mode::combine && problem.weights ? problem.weights[slot] : 1.0f;
            for (int i = 0; i < per; ++i) total += sum_of[warp + i];
            notes[place] = {scale.inverse * weight, total};
        }
    }
}
#endif

}  // namespace moepack
