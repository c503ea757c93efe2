// The arguments of a layer launch, and its division: the units of a block, the rounds of a unit, and the chunks that a
// warp multiplies in each round (common/layer.cuh).
#pragma once
#include "common/routing.cuh"

namespace moepack {

#if !defined(BLOCK_WARPS)
#define BLOCK_WARPS 8
#endif
constexpr int WARPS = BLOCK_WARPS;  // per block
constexpr int THREADS = WARPS * WARP;
constexpr int BLOCK_ROWS = 16;

enum class Mode {
    gated,     // out[slot] = silu(gate x) * (up x)
    project,   // out[slot] = matrix x
    multiply,  // out[slot] = silu(out[slot]) * (matrix x)
    combine,   // out[token] = sum over its slots of weight * (matrix x[slot])
};

// Division by a number known at launch, without a divide instruction: `inverse` is (2^32 - 1) / by, rounded down.
struct Divisor {
    u32 by, inverse;

#if defined(__CUDACC__)
    MOEPACK_DEVICE int quotient(int value) const {
        u32 estimate = __umulhi(u32(value), inverse);  // exact or one too small
        return int(estimate + (u32(value) - estimate * by >= by));
    }

    MOEPACK_DEVICE int remainder(int value) const {
        return value - quotient(value) * int(by);
    }
#endif
};

// The arguments of a launch other than the matrices.
struct Problem {
    Activations x;
    const i64* index;      // [tokens * top_k], or null: all slots belong to expert 0
    const float* weights;  // [tokens * top_k], or null: 1
    float* out;            // [slots, rows]; combine: [tokens, rows], or parts, [splits, tokens, rows]
    u8* cells;             // cells of all slots, written by `lay_out`, or null if blocks lay them out
    int tokens, experts, rows;
    int row_blocks;        // per row tile: a power of two, at most the warps per matrix
    int split_bits;        // combine: 2^split_bits blocks (a team) share a sum over chunks; otherwise 0
    int in_parts;          // whether a team's blocks write partial sums; otherwise they form a cluster
    Divisor top_k, chunks, row_tiles, teams;

    MOEPACK_BOTH int blocks() const {
        return ceil_div(rows, BLOCK_ROWS);
    }

    MOEPACK_BOTH int slots() const {
        return tokens * int(top_k.by);
    }
};

#if defined(__CUDACC__)
// Chunks `first` to `last` of a row tile.
struct Unit {
    int first, last, rows;

    MOEPACK_DEVICE bool operator!=(const Unit& other) const {
        return first != other.first || last != other.last || rows != other.rows;
    }
};

// Chunks `begin` to `end` of a unit, whose activations are in shared memory at the same time.
struct Round {
    int number, begin, end;
    Unit unit;
};

// The division that every warp computes: the units of a block, and the chunks that a warp multiplies in each round.
template <Mode MODE>
struct Schedule {
    const Problem& problem;
    const Routing& routing;
    int capacity;  // cells that fit

    MOEPACK_DEVICE int chunks() const {
        return int(problem.chunks.by);
    }

    MOEPACK_DEVICE int units() const {
        return int(problem.row_tiles.by) * (MODE == Mode::combine ? 1 : routing.tiles);
    }

    // This block's index among those that share the sums of its units.
    MOEPACK_DEVICE int split() const {
        return MODE == Mode::combine ? blockIdx.x & ((1 << problem.split_bits) - 1) : 0;
    }

    MOEPACK_DEVICE Unit unit(int number) const {
        if (MODE != Mode::combine) {
            int tile = problem.row_tiles.quotient(number);
            return {tile * chunks(), (tile + 1) * chunks(), problem.row_tiles.remainder(number)};
        }
        int total = routing.tiles * chunks();
        return {total * split() >> problem.split_bits, total * (split() + 1) >> problem.split_bits, number};
    }

    // The end of the round that starts with a chunk: whole tiles, or a range of chunks of one tile.
    MOEPACK_DEVICE int round_end(int first, int last) const {
        int tile = problem.chunks.quotient(first), rest = least((tile + 1) * chunks() - first, last - first);
        int used = routing.tile[tile].tokens * rest;
        if (used > capacity) return first + capacity / routing.tile[tile].tokens;
        int end = first + rest;
        while (rest == chunks() && end + rest <= last) {
            used += routing.tile[++tile].tokens * rest;
            if (used > capacity) break;
            end += rest;
        }
        return end;
    }
};

// Iterates over the chunks that a warp multiplies, across all rounds and units.
template <Mode MODE>
struct Cursor {
    Schedule<MODE> schedule;
    int part, part_bits, row_block;  // the warp's range, of 2^part_bits, and its block in the row tile
    int number = 0, stop = 0;        // units
    Unit unit = {0, 0, 0};
    int round = 0, at = 0, end = 0, tile = 0, chunk = 0;

    MOEPACK_DEVICE void start(int first, int last) {
        number = first, stop = last, unit = {0, 0, 0};
        if (number < stop) unit = schedule.unit(number);
        round = unit.first;
    }

    // Indices after the last block repeat it, so that all warps of a round do the same work.
    MOEPACK_DEVICE int block() const {
        return least(unit.rows * schedule.problem.row_blocks + row_block, schedule.problem.blocks() - 1);
    }

    // Computes the warp's share of a round.
    MOEPACK_DEVICE void enter(int first, int last) {
        at = first + ((last - first) * part >> part_bits);
        end = first + ((last - first) * (part + 1) >> part_bits);
    }

    // Takes the chunks of one tile from the share: `chunk` of `tile` is the first, and their number is returned.
    MOEPACK_DEVICE int take() {
        tile = schedule.problem.chunks.quotient(at), chunk = at - tile * schedule.chunks();
        int count = least(end - at, schedule.chunks() - chunk);
        at += count;
        return count;
    }

    // Finds the next share if this one is exhausted; returns false after the last.
    MOEPACK_DEVICE bool find() {
        while (at >= end) {
            if (number >= stop) return false;
            if (round >= unit.last) {
                start(number + 1, stop);
                continue;
            }
            int first = round;
            // A warp that has all chunks of a round continues past its end.
            round = part_bits == 0 ? unit.last : schedule.round_end(first, unit.last);
            enter(first, round);
        }
        return true;
    }
};
#endif

}  // namespace moepack
