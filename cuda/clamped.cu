// What experts with clamped gates and biases compute between and behind their products, as in gpt-oss. Rows are slots, a
// token and one of its experts, or the places of slots.
//
//     inner = (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g), where g = min(gate, limit)
//     out[token] = sum of its slots' weight * output
//
// Biases of the expert are added to gate, up and output before. All arithmetic is in f32; sums are in the order of slots.
//
// A thread computes four columns, or, if rows have another number of columns, each on its own.
#include "common/layer.cuh"

namespace moepack {

struct Clamped {
    const float *gate, *up;  // [rows, columns]
    const i64* expert;       // [rows]; rows of experts that do not exist are skipped
    const void* bias;        // [experts, 2 * columns], or null
    Type type;               // of biases
    float* inner;            // [rows, columns]
    int columns, experts;
    int stride, up_at;  // the bias of a column's gate is at column * stride, that of up at column * stride + up_at
    float alpha, limit;
};

struct Biased {
    const float* outputs;  // [places, columns]
    const int* place;      // [tokens, top_k], the rows of slots, negative for none; null: the slots themselves
    const i64* expert;     // [tokens, top_k]; experts that do not exist are skipped
    const float* weights;  // [tokens, top_k]
    const void* bias;      // [experts, columns], or null
    Type type;             // of biases
    float* out;            // [tokens, columns]
    int top_k, columns, experts;
};

#if defined(__CUDACC__)
namespace clamped {

// N neighboring values, aligned to their size.
template <int N>
struct alignas(4 * N) Values {
    float at[N];
};

template <int N>
MOEPACK_DEVICE Values<N> load(const float* from) {
    return *reinterpret_cast<const Values<N>*>(from);
}

MOEPACK_DEVICE float bias_at(const void* bias, Type type, i64 at) {
    if (!bias) return 0;
    if (type == Type::f32) return static_cast<const float*>(bias)[at];
    u16 bits = static_cast<const u16*>(bias)[at];
    return type == Type::f16 ? half_value(bits) : bf16_value(bits);
}

// Comparisons keep NaN.
template <int N>
MOEPACK_DEVICE void gate(const Clamped& c, i64 row, int column) {
    i64 expert = c.expert[row], first = expert * 2 * c.columns + i64(column) * c.stride, at = row * c.columns + column;
    if (expert < 0 || expert >= c.experts) return;
    Values<N> gates = load<N>(c.gate + at), ups = load<N>(c.up + at), inner;
#pragma unroll
    for (int i = 0; i < N; ++i, first += c.stride) {
        float g = gates.at[i] + bias_at(c.bias, c.type, first), u = ups.at[i] + bias_at(c.bias, c.type, first + c.up_at);
        g = g > c.limit ? c.limit : g;
        u = u > c.limit ? c.limit : u < -c.limit ? -c.limit : u;
        inner.at[i] = (u + 1) * (g / (1 + __expf(-c.alpha * g)));
    }
    *reinterpret_cast<Values<N>*>(c.inner + at) = inner;
}

template <int N>
MOEPACK_DEVICE void sum(const Biased& b, i64 token, int column) {
    Values<N> total = {};
    for (i64 slot = token * b.top_k; slot < (token + 1) * b.top_k; ++slot) {
        i64 expert = b.expert[slot], place = b.place ? b.place[slot] : slot;
        if (expert < 0 || expert >= b.experts || place < 0) continue;
        Values<N> output = load<N>(b.outputs + place * b.columns + column);
        float weight = b.weights[slot];
#pragma unroll
        for (int i = 0; i < N; ++i)
            total.at[i] += weight * (output.at[i] + bias_at(b.bias, b.type, expert * b.columns + column + i));
    }
    *reinterpret_cast<Values<N>*>(b.out + token * b.columns + column) = total;
}

}  // namespace clamped
#endif

}  // namespace moepack

#if defined(__CUDACC__)
// Grid: rows or tokens, and shares of their columns.
extern "C" __global__ void __launch_bounds__(256) gate(moepack::Clamped clamped) {
    moepack::enter_launch();
    int thread = blockIdx.y * blockDim.x + threadIdx.x, columns = clamped.columns;
    if (columns % 4 == 0 && thread < columns / 4) moepack::clamped::gate<4>(clamped, blockIdx.x, thread * 4);
    for (int i = thread; columns % 4 && i < columns; i += gridDim.y * blockDim.x)
        moepack::clamped::gate<1>(clamped, blockIdx.x, i);
}

extern "C" __global__ void __launch_bounds__(256) sum(moepack::Biased biased) {
    moepack::enter_launch();
    int thread = blockIdx.y * blockDim.x + threadIdx.x, columns = biased.columns;
    if (columns % 4 == 0 && thread < columns / 4) moepack::clamped::sum<4>(biased, blockIdx.x, thread * 4);
    for (int i = thread; columns % 4 && i < columns; i += gridDim.y * blockDim.x)
        moepack::clamped::sum<1>(biased, blockIdx.x, i);
}
#endif
