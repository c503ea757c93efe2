// Chooses the next token of each sequence from its logits, as `moepack.serving.text.sampling` does: temperature, top-k,
// top-p, min-p, then the inverse of the cumulative distribution at a random number, in the order of tokens.
//
// A block has a row, which it reads once for every question that it asks: the largest score, the limits of top-k and
// top-p (four questions each, one for each byte of a score), the mass of the tokens that are left. Weights are
// exp(score - largest) as integers, so that sums have one value in any order.
#include "common/layer.cuh"
#include "common/order.cuh"

namespace moepack {

struct Draw {
    const void* logits;  // [rows, columns]
    Type type;
    const double* draws;  // [5, rows]: temperature (0: the likeliest token), top-k (0: all), top-p, min-p, random number
    i64* tokens;          // [rows]; -1 if a logit is not finite
    int rows, columns;
};

#if defined(__CUDACC__)
namespace draw {

constexpr int MOST_THREADS = 1024, BINS = 256;
constexpr float ONE = 1099511627776.0f;  // the weight of the likeliest token: 2^40
constexpr float COLDEST = 1e-6f;         // the lowest divisor of logits
constexpr float GREATEST = 3.4028234e38f;

// What the threads of a block share.
struct Shared {
    u64 best[MOST_THREADS];
    u64 mass[2][BINS];
    u64 above;  // the mass in higher bins than the found one
    u32 bin;
    int not_finite;
};

struct Row {
    const Draw& draw;
    i64 first;
    float temperature, largest = 0;

    MOEPACK_DEVICE float logit(int column) const {
        i64 at = first + column;
        if (draw.type == Type::f32) return static_cast<const float*>(draw.logits)[at];
        u16 bits = static_cast<const u16*>(draw.logits)[at];
        return draw.type == Type::f16 ? half_value(bits) : bf16_value(bits);
    }

    MOEPACK_DEVICE float score(int column) const {
        return logit(column) / temperature;
    }

    MOEPACK_DEVICE u64 weight(float score) const {
        return u64(__expf(score - largest) * ONE);
    }
};

// The likeliest token, the first one among equals; -1 if a logit is not finite.
MOEPACK_DEVICE int likeliest(const Row& row, Shared& shared) {
    u64 best = 0;
    for (int column = threadIdx.x; column < row.draw.columns; column += blockDim.x) {
        float logit = row.logit(column);
        if (!(fabsf(logit) <= GREATEST)) shared.not_finite = 1;
        best = most(best, u64(order_of(logit)) << 32 | u32(~column));
    }
    shared.best[threadIdx.x] = best;
    for (int half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < half)
            shared.best[threadIdx.x] = most(shared.best[threadIdx.x], shared.best[threadIdx.x + half]);
    }
    __syncthreads();
    return shared.not_finite ? -1 : int(~u32(shared.best[0]));
}

// The largest order of a score for which the mass of all scores of at least this order reaches the target. Scores below
// `least` have no mass.
template <class MassOf>
MOEPACK_DEVICE u32 reach(const Row& row, Shared& shared, u32 least, u64 target, MassOf mass_of) {
    u32 found = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) shared.mass[0][bin] = 0;
        __syncthreads();
        for (int column = threadIdx.x; column < row.draw.columns; column += blockDim.x) {
            float score = row.score(column);
            u32 order = order_of(score);
            bool is_in = order >= least && (shift == 24 || order >> (shift + 8) == found >> (shift + 8));
            if (is_in) atomicAdd(&shared.mass[0][order >> shift & (BINS - 1)], mass_of(score));
        }
        __syncthreads();
        // Sums of a bin and all higher ones.
        int from = 0;
        for (int distance = 1; distance < BINS; distance *= 2, from ^= 1) {
            for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
                shared.mass[from ^ 1][bin] =
                    shared.mass[from][bin] + (bin + distance < BINS ? shared.mass[from][bin + distance] : 0);
            __syncthreads();
        }
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
            u64 above = bin + 1 < BINS ? shared.mass[from][bin + 1] : 0;
            if (above < target && shared.mass[from][bin] >= target) shared.bin = bin, shared.above = above;
        }
        __syncthreads();
        found |= shared.bin << shift, target -= shared.above;
    }
    return found;
}

// Divides the tokens from `first` to `last` among the warps and sums the mass of each part; returns that of all.
MOEPACK_DEVICE u64 sum_parts(const Row& row, u64* parts, u32 least, int first, int last, int part) {
    int warps = blockDim.x / WARP, warp = threadIdx.x / WARP;
    if (int(threadIdx.x) < warps) parts[threadIdx.x] = 0;
    __syncthreads();
    u64 sum = 0;
    for (int column = first + warp * part + threadIdx.x % WARP; column < moepack::least(last, first + (warp + 1) * part);
         column += WARP) {
        float score = row.score(column);
        if (order_of(score) >= least) sum += row.weight(score);
    }
    atomicAdd(parts + warp, sum);
    __syncthreads();
    sum = 0;
    for (int i = 0; i < warps; ++i) sum += parts[i];
    return sum;
}

// The first token for which the mass of all tokens up to it exceeds a part of the whole.
MOEPACK_DEVICE int invert(const Row& row, Shared& shared, u32 least, double uniform) {
    int first = 0, last = row.draw.columns, warps = blockDim.x / WARP;
    u64 place = 0;
    while (true) {
        int part = ceil_div(last - first, warps);
        u64 all = sum_parts(row, shared.mass[0], least, first, last, part);
        if (first == 0 && last == row.draw.columns) place = moepack::least(u64(uniform * double(all)), all - 1);
        int found = 0;
        for (; place >= shared.mass[0][found]; ++found) place -= shared.mass[0][found];
        first += found * part, last = moepack::least(last, first + part);
        if (last - first == 1) return first;
        __syncthreads();
    }
}

MOEPACK_DEVICE void choose(const Draw& draw) {
    __shared__ Shared shared;
    i64 number = blockIdx.x;
    auto given = [&](int field) { return draw.draws[field * draw.rows + number]; };
    double temperature = given(0), top_k = given(1), top_p = given(2), min_p = given(3);
    if (threadIdx.x == 0) shared.not_finite = 0;
    __syncthreads();
    Row row{draw, number * draw.columns, most(float(temperature), COLDEST)};
    int token = likeliest(row, shared);
    if (token >= 0 && temperature > 0) {
        row.largest = row.score(token);
        u32 least = 0;
        if (top_k > 0 && top_k < draw.columns)
            least = reach(row, shared, least, u64(top_k), [](float) { return u64(1); });
        if (top_p < 1) {
            __syncthreads();
            int part = ceil_div(draw.columns, int(blockDim.x / WARP));
            u64 all = sum_parts(row, shared.mass[0], least, 0, draw.columns, part);
            u64 target = moepack::least(most(u64(ceil(top_p * double(all))), u64(1)), all);
            __syncthreads();
            least = reach(row, shared, least, target, [&](float score) { return row.weight(score); });
        }
        if (min_p > 0) least = most(least, order_of(row.largest + logf(float(min_p))));
        __syncthreads();
        token = invert(row, shared, least, given(4));
    }
    if (threadIdx.x == 0) draw.tokens[number] = token;
}

}  // namespace draw
#endif

}  // namespace moepack

#if defined(__CUDACC__)
// Grid: rows. Block: 64 to 1,024 threads, a power of two; each step of `invert` leaves the tokens of one of its warps.
extern "C" __global__ void __launch_bounds__(moepack::draw::MOST_THREADS) choose(moepack::Draw draw) {
    moepack::enter_launch();
    moepack::draw::choose(draw);
}
#endif
