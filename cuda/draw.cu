// Chooses the next token of each sequence from its logits, as `moepack.serving.text.sampling` does: temperature, top-k,
// top-p, min-p, then the inverse of the cumulative distribution at a random number, in the order of tokens.
//
// A block has a row, which it reads once for every question that it asks: the largest score, the limits of top-k and
// top-p (four questions each, one for each byte of a distance), the mass of the tokens that are left. A distance is how
// far a score is below the largest one, in fixed point. The first bytes of distances differ more than the first bytes
// of floats, so that few threads count in the same bin. Masses are integers, whose sums have one value in any order.
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
};

#if defined(__CUDACC__)
namespace draw {

constexpr int MOST_THREADS = 1024, BINS = 256;
constexpr int BATCH = 8;                 // loads of a thread that are under way together
constexpr float ONE = 1099511627776.0f;  // the weight of the likeliest token: 2^40
constexpr float MASS = 2147483648.0f;    // its mass in a bin: 2^31
constexpr float UNIT = 134217728.0f;     // distances are multiples of 2^-27
constexpr float FARTHEST = 4294967040.0f;
constexpr float COLDEST = 1e-6f;  // the lowest divisor of logits
constexpr float GREATEST = 3.4028234e38f;

// What the threads of a block share.
struct Shared {
    u64 best[MOST_THREADS];  // of threads
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

    // Calls use(column, logit) for every `step`th column of a range.
    template <class Use>
    MOEPACK_DEVICE void for_each(int first, int last, int step, Use use) const {
        for (; first < last; first += BATCH * step) {
            float value[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                int column = first + i * step;
                value[i] = column < last ? logit(column) : 0;
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (first + i * step < last) use(first + i * step, value[i]);
        }
    }
};

// The likeliest token, the first one among equals; -1 if a logit is not finite.
template <Type TYPE>
MOEPACK_DEVICE int likeliest(const Row<TYPE>& row, Shared& shared) {
    u64 best = 0;
    row.for_each(threadIdx.x, row.columns, blockDim.x, [&](int column, float logit) {
        if (!(fabsf(logit) <= GREATEST)) shared.not_finite = 1;
        best = most(best, u64(order_of(logit)) << 32 | u32(~column));
    });
    shared.best[threadIdx.x] = best;
    for (int half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < half)
            shared.best[threadIdx.x] = most(shared.best[threadIdx.x], shared.best[threadIdx.x + half]);
    }
    __syncthreads();
    return shared.not_finite ? -1 : int(~u32(shared.best[0]));
}

// The least distance up to which the mass of all tokens reaches the target, or all of their mass. Tokens beyond `limit`
// have none.
template <Type TYPE, class MassOf>
MOEPACK_DEVICE u32 reach(const Row<TYPE>& row, Shared& shared, u32 limit, u64 target, MassOf mass_of) {
    u32 found = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) shared.low[bin] = shared.carries[bin] = 0;
        __syncthreads();
        row.for_each(threadIdx.x, row.columns, blockDim.x, [&](int, float logit) {
            float score = row.score(logit);
            u32 distance = row.distance(score);
            if (distance > limit || (shift < 24 && distance >> (shift + 8) != found >> (shift + 8))) return;
            u32 mass = mass_of(score), bin = distance >> shift & (BINS - 1), old = atomicAdd(&shared.low[bin], mass);
            if (old + mass < old) atomicAdd(&shared.carries[bin], 1u);
        });
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
            shared.sum[0][bin] = u64(shared.carries[bin]) << 32 | shared.low[bin];
        __syncthreads();
        // Sums of a bin and all nearer ones.
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
        found |= shared.bin << shift, target -= shared.below;
    }
    return found;
}

// Divides the tokens from `first` to `last` among the warps and sums the weights of each part; returns the sum of all.
template <Type TYPE>
MOEPACK_DEVICE u64 sum_parts(const Row<TYPE>& row, Shared& shared, u32 limit, int first, int last, int part) {
    int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u64 sum = 0;
    int begin = first + warp * part;
    row.for_each(begin + lane, least(last, begin + part), WARP, [&](int, float logit) {
        float score = row.score(logit);
        if (row.distance(score) <= limit) sum += row.weight(score);
    });
    shared.best[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0) {
        for (int i = 1; i < WARP; ++i) sum += shared.best[threadIdx.x + i];
        shared.sum[0][warp] = sum;
    }
    __syncthreads();
    sum = 0;
    for (int i = 0; i < warps; ++i) sum += shared.sum[0][i];
    return sum;
}

// The first token for which the weight of all tokens up to it exceeds a part of the whole.
template <Type TYPE>
MOEPACK_DEVICE int invert(const Row<TYPE>& row, Shared& shared, u32 limit, double uniform) {
    int first = 0, last = row.columns, warps = blockDim.x / WARP;
    u64 place = 0;
    while (true) {
        int part = ceil_div(last - first, warps);
        u64 all = sum_parts(row, shared, limit, first, last, part);
        if (first == 0 && last == row.columns) place = least(u64(uniform * double(all)), all - 1);
        int found = 0;
        for (; place >= shared.sum[0][found]; ++found) place -= shared.sum[0][found];
        first += found * part, last = least(last, first + part);
        if (last - first == 1) return first;
        __syncthreads();
    }
}

template <Type TYPE>
MOEPACK_DEVICE void choose(const Draw& draw, Shared& shared) {
    i64 number = blockIdx.x;
    auto given = [&](int field) { return draw.draws[field * draw.rows + number]; };
    double temperature = given(0), top_k = given(1), top_p = given(2), min_p = given(3);
    if (threadIdx.x == 0) shared.not_finite = 0;
    __syncthreads();
    const u8* logits = static_cast<const u8*>(draw.logits) + number * draw.columns * (TYPE == Type::f32 ? 4 : 2);
    Row<TYPE> row{logits, draw.columns, most(float(temperature), COLDEST), 0};
    int token = likeliest(row, shared);
    if (token >= 0 && temperature > 0) {
        row.largest = row.score(row.logit(token));
        u32 limit = ~0u;
        if (top_k > 0 && top_k < draw.columns)
            limit = reach(row, shared, limit, u64(top_k), [](float) { return 1u; });
        if (top_p < 1) {
            __syncthreads();
            u64 all = sum_parts(row, shared, limit, 0, draw.columns, ceil_div(draw.columns, int(blockDim.x / WARP)));
            u64 target = most(u64(ceil(top_p * double(all) * double(MASS / ONE))), u64(1));
            __syncthreads();
            auto mass = [&](float score) { return u32(__expf(score - row.largest) * MASS); };
            limit = reach(row, shared, limit, target, mass);
        }
        if (min_p > 0) limit = least(limit, row.distance(row.largest + logf(float(min_p))));
        __syncthreads();
        token = invert(row, shared, limit, given(4));
    }
    if (threadIdx.x == 0) draw.tokens[number] = token;
}

}  // namespace draw
#endif

}  // namespace moepack

#if defined(__CUDACC__)
// Grid: rows. Block: 64 to 1,024 threads, a power of two; each step of `invert` leaves the tokens of one of its warps.
extern "C" __global__ void __launch_bounds__(moepack::draw::MOST_THREADS) choose(moepack::Draw draw) {
    using moepack::Type;
    __shared__ moepack::draw::Shared shared;
    moepack::enter_launch();
    if (draw.type == Type::f32) moepack::draw::choose<Type::f32>(draw, shared);
    else if (draw.type == Type::f16) moepack::draw::choose<Type::f16>(draw, shared);
    else moepack::draw::choose<Type::bf16>(draw, shared);
}
#endif
