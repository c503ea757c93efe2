// Chooses the next token of each sequence from its logits, as `moepack.serving.text.sampling` does: temperature, top-k,
// top-p, min-p, then the inverse of the cumulative distribution at a random number, in the order of tokens.
//
// A team of blocks, a cluster on Hopper, has a row, which it reads once for every question that it asks: the largest
// score, the limits of top-k and top-p (four questions each, one for each byte of a distance), the mass of the tokens
// that are left. The row is divided among the threads; a question takes about 15 instructions per token. A distance is
// how far a score is below the largest one, in fixed point. The first bytes of distances differ more than the first
// bytes of floats, so that few threads count in the same bin. Masses are integers, whose sums have one value in any
// order.
#include "common/layer.cuh"
#include "common/order.cuh"

namespace moepack {

struct Draw {
    const void* logits;  // [rows, columns]
    Type type;
    // [5, rows]: temperature (0: the likeliest token), top-k (0: all), top-p, min-p, random number.
    const double* draws;
    i64* tokens;  // [rows]; -1 if a logit is not finite
    int rows, columns;
    int blocks;  // of a row
};

#if defined(__CUDACC__)
namespace draw {

constexpr int MOST_THREADS = 1024, BINS = 256;
constexpr int RUN = 8;                   // neighboring columns of a thread
constexpr int BATCH = 2;                 // runs of a thread that are under way together
constexpr float ONE = 1099511627776.0f;  // the weight of the likeliest token: 2^40
constexpr float MASS = 2147483648.0f;    // its mass in a bin: 2^31
constexpr float UNIT = 134217728.0f;     // distances are multiples of 2^-27
constexpr float FARTHEST = 4294967040.0f;
constexpr float COLDEST = 1e-6f;  // the lowest divisor of logits
constexpr float GREATEST = 3.4028234e38f;

// What the threads of a block share.
struct Shared {
    u64 best[MOST_THREADS];  // of threads
    u64 own[2][BINS];        // what the block gives to its team, in turns
    u64 sum[2][BINS];
    u32 low[BINS], carries[BINS];
    u64 below;  // the mass in nearer bins than the found one
    u32 bin;
    int not_finite;
};

template <Type TYPE>
struct Row {
    const void* logits;
    int columns;
    float temperature, largest;

    MOEPACK_DEVICE float logit(int column) const {
        if (TYPE == Type::f32) return static_cast<const float*>(logits)[column];
        u16 bits = static_cast<const u16*>(logits)[column];
        return TYPE == Type::f16 ? half_value(bits) : bf16_value(bits);
    }

    MOEPACK_DEVICE float score(float logit) const {
        return logit / temperature;
    }

    MOEPACK_DEVICE u32 distance(float score) const {
        float units = (largest - score) * UNIT;
        return u32(units < FARTHEST ? units : FARTHEST);
    }

    MOEPACK_DEVICE u64 weight(float score) const {
        return u64(__expf(score - largest) * ONE);
    }

    // Calls use(column, logit) for the columns of a range, which `lanes` threads share: eight neighboring ones at a
    // time, in single loads if they are aligned.
    template <class Use>
    MOEPACK_DEVICE void for_each(int first, int last, int lane, int lanes, Use use) const {
        for (first += lane * RUN; first < last; first += BATCH * lanes * RUN) {
            float value[BATCH][RUN];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) load(first + i * lanes * RUN, last, value[i]);
#pragma unroll
            for (int i = 0; i < BATCH * RUN; ++i) {
                int column = first + i / RUN * lanes * RUN + i % RUN;
                if (column < last) use(column, value[i / RUN][i % RUN]);
            }
        }
    }

    MOEPACK_DEVICE void load(int first, int last, float (&value)[RUN]) const {
        constexpr int BYTES = TYPE == Type::f32 ? 4 : 2;
        const u8* at = static_cast<const u8*>(logits) + i64(first) * BYTES;
        if (first + RUN <= last && reinterpret_cast<u64>(at) % 16 == 0) {
            alignas(16) u32 word[RUN * BYTES / 4];
#pragma unroll
            for (int i = 0; i < RUN * BYTES / 16; ++i)
                reinterpret_cast<Quad*>(word)[i] = reinterpret_cast<const Quad*>(at)[i];
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                u16 bits = u16(word[i * BYTES / 4] >> (BYTES == 2 ? i % 2 * 16 : 0));
                value[i] = TYPE == Type::f32   ? __uint_as_float(word[i * BYTES / 4])
                           : TYPE == Type::f16 ? half_value(bits)
                                               : bf16_value(bits);
            }
        } else {
#pragma unroll
            for (int i = 0; i < RUN; ++i) value[i] = first + i < last ? logit(first + i) : 0;
        }
    }
};

// The blocks of a row.
struct Team {
    int rank, blocks;
    int turn = 0;

    // The columns of this block.
    MOEPACK_DEVICE int share(int columns) const {
        return ceil_div(ceil_div(columns, blocks), RUN) * RUN;
    }

    MOEPACK_DEVICE u64 load(const u64& own, int block) const {
        return blocks == 1 ? own : load_number_of_block(shared_address(&own), block);
    }

    // Waits for the blocks.
    MOEPACK_DEVICE void meet() const {
        if (blocks == 1) __syncthreads();
        else wait_for_cluster<true>();
    }

    // Gathers `count` numbers of each block from `own` in `sum`: one block after the other, or added up. A number that
    // other blocks read is overwritten two turns later, when they have read it. A block by itself needs one turn, and
    // leaves the other one to blocks that still read.
    MOEPACK_DEVICE void gather(Shared& shared, int count, bool add) {
        meet();
        for (int i = threadIdx.x; i < BINS; i += blockDim.x) {
            u64 number = 0;
            if (!add && i < count * blocks) number = load(shared.own[turn][i % count], i / count);
            for (int block = 0; add && block < blocks; ++block) number += load(shared.own[turn][i], block);
            shared.sum[0][i] = number;
        }
        turn ^= blocks > 1;
        __syncthreads();
    }
};

// The likeliest token, the first one among equals; -1 if a logit is not finite.
template <Type TYPE>
MOEPACK_DEVICE int likeliest(const Row<TYPE>& row, Shared& shared, Team& team) {
    u64 best = 0;
    int share = team.share(row.columns), first = team.rank * share;
    row.for_each(first, least(row.columns, first + share), threadIdx.x, blockDim.x, [&](int column, float logit) {
        if (!(fabsf(logit) <= GREATEST)) shared.not_finite = 1;
        best = most(best, u64(order_of(logit)) << 32 | u32(~column));
    });
    shared.best[threadIdx.x] = best;
    for (int half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < half)
            shared.best[threadIdx.x] = most(shared.best[threadIdx.x], shared.best[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) shared.own[team.turn][0] = shared.not_finite ? ~0ull : shared.best[0];
    team.gather(shared, 1, false);
    best = shared.sum[0][0];
    for (int block = 1; block < team.blocks; ++block) best = most(best, shared.sum[0][block]);
    return best == ~0ull ? -1 : int(~u32(best));
}

// Finds the first bin up to which the numbers in `sum` add up to a target, or to all if that is less; returns the rest
// of the target in that bin.
MOEPACK_DEVICE u64 find_bin(Shared& shared, u64 target) {
    int from = 0;
    for (int step = 1; step < BINS; step *= 2, from ^= 1) {
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
            shared.sum[from ^ 1][bin] = shared.sum[from][bin] + (bin >= step ? shared.sum[from][bin - step] : 0);
        __syncthreads();
    }
    target = least(target, shared.sum[from][BINS - 1]);
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        u64 below = bin ? shared.sum[from][bin - 1] : 0;
        if (below < target && shared.sum[from][bin] >= target) shared.bin = bin, shared.below = below;
    }
    __syncthreads();
    return target - shared.below;
}

// The least distance up to which the mass of all tokens reaches the target, or all of their mass. Tokens beyond `limit`
// have none.
template <Type TYPE, class MassOf>
MOEPACK_DEVICE u32 reach(const Row<TYPE>& row, Shared& shared, Team& team, u32 limit, u64 target, MassOf mass_of) {
    u32 found = 0;
    int share = team.share(row.columns), first = team.rank * share;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) shared.low[bin] = shared.carries[bin] = 0;
        __syncthreads();
        row.for_each(first, least(row.columns, first + share), threadIdx.x, blockDim.x, [&](int, float logit) {
            float score = row.score(logit);
            u32 distance = row.distance(score);
            if (distance > limit || (shift < 24 && distance >> (shift + 8) != found >> (shift + 8))) return;
            u32 mass = mass_of(score), bin = distance >> shift & (BINS - 1), old = atomicAdd(&shared.low[bin], mass);
            if (old + mass < old) atomicAdd(&shared.carries[bin], 1u);
        });
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
            shared.own[team.turn][bin] = u64(shared.carries[bin]) << 32 | shared.low[bin];
        team.gather(shared, BINS, true);
        target = find_bin(shared, target);
        found |= shared.bin << shift;
    }
    return found;
}

// The tokens of each of `warps` that share `count` tokens: whole runs, if they are more than one.
MOEPACK_DEVICE int part_of(int count, int warps) {
    int part = ceil_div(count, warps);
    return part > RUN ? ceil_div(part, RUN) * RUN : part;
}

// Divides the tokens from `first` to `last` among the warps of a team, and sums the weights of each part in `sum`;
// returns the tokens of a part.
template <Type TYPE>
MOEPACK_DEVICE int sum_parts(const Row<TYPE>& row, Shared& shared, Team& team, u32 limit, int first, int last) {
    int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int part = part_of(last - first, warps * team.blocks), begin = first + (team.rank * warps + warp) * part;
    u64 sum = 0;
    row.for_each(begin, least(last, begin + part), lane, WARP, [&](int, float logit) {
        float score = row.score(logit);
        if (row.distance(score) <= limit) sum += row.weight(score);
    });
    shared.best[threadIdx.x] = sum;
    for (int half = WARP / 2; half; half /= 2) {
        __syncwarp();
        if (lane < half) shared.best[threadIdx.x] += shared.best[threadIdx.x + half];
    }
    if (lane == 0) shared.own[team.turn][warp] = shared.best[threadIdx.x];
    team.gather(shared, warps, false);
    return part;
}

// The sum of all parts of a team.
MOEPACK_DEVICE u64 sum_of(const Shared& shared, const Team& team) {
    u64 sum = 0;
#pragma unroll 8
    for (int i = 0; i < int(blockDim.x) / WARP * team.blocks; ++i) sum += shared.sum[0][i];
    return sum;
}

// The first token for which the weight of all tokens up to it exceeds a part of the whole. The team divides the row
// among its warps, then each block divides the part that it finds.
template <Type TYPE>
MOEPACK_DEVICE int invert(const Row<TYPE>& row, Shared& shared, Team& team, u32 limit, double uniform) {
    int first = 0, last = row.columns, part = sum_parts(row, shared, team, limit, first, last);
    u64 all = sum_of(shared, team), target = least(u64(uniform * double(all)), all - 1) + 1;
    Team alone = {0, 1, team.turn};
    while (true) {
        __syncthreads();  // all threads have the sum
        target = find_bin(shared, target);
        first += int(shared.bin) * part, last = least(last, first + part);
        if (last - first == 1) return first;
        part = sum_parts(row, shared, alone, limit, first, last);
    }
}

template <Type TYPE>
MOEPACK_DEVICE void choose(const Draw& draw, Shared& shared) {
    Team team = {int(blockIdx.x) % draw.blocks, draw.blocks};
    i64 number = blockIdx.x / draw.blocks;
    auto given = [&](int field) { return draw.draws[field * draw.rows + number]; };
    double temperature = given(0), top_k = given(1), top_p = given(2), min_p = given(3);
    if (threadIdx.x == 0) shared.not_finite = 0;
    __syncthreads();
    const u8* logits = static_cast<const u8*>(draw.logits) + number * draw.columns * (TYPE == Type::f32 ? 4 : 2);
    Row<TYPE> row{logits, draw.columns, most(float(temperature), COLDEST), 0};
    int token = likeliest(row, shared, team);
    if (token >= 0 && temperature > 0) {
        row.largest = row.score(row.logit(token));
        u32 limit = ~0u;
        if (top_k > 0 && top_k < draw.columns)
            limit = reach(row, shared, team, limit, u64(top_k), [](float) { return 1u; });
        if (top_p < 1) {
            sum_parts(row, shared, team, limit, 0, draw.columns);
            u64 all = sum_of(shared, team);
            u64 target = most(u64(ceil(top_p * double(all) * double(MASS / ONE))), u64(1));
            __syncthreads();
            auto mass = [&](float score) { return u32(__expf(score - row.largest) * MASS); };
            limit = reach(row, shared, team, limit, target, mass);
        }
        if (min_p > 0) limit = least(limit, row.distance(row.largest + logf(float(min_p))));
        __syncthreads();
        token = invert(row, shared, team, limit, given(4));
    }
    if (threadIdx.x == 0 && team.rank == 0) draw.tokens[number] = token;
    team.meet();  // others may read what this block gave
}

}  // namespace draw
#endif

}  // namespace moepack

#if defined(__CUDACC__)
// Grid: rows times `blocks`, which form a cluster; one or up to eight, with at most 256 warps. Block: 64 to 1,024
// threads, a power of two; each step of `invert` leaves the tokens of one warp.
extern "C" __global__ void __launch_bounds__(moepack::draw::MOST_THREADS) choose(moepack::Draw draw) {
    using moepack::Type;
    __shared__ moepack::draw::Shared shared;
    moepack::enter_launch();
    if (draw.type == Type::f32) moepack::draw::choose<Type::f32>(draw, shared);
    else if (draw.type == Type::f16) moepack::draw::choose<Type::f16>(draw, shared);
    else moepack::draw::choose<Type::bf16>(draw, shared);
}
#endif
