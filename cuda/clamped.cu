// What experts with clamped gates and biases compute between and behind their products, as in gpt-oss. Rows are slots: a
// token and one of its experts.
//
//     inner = (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g), where g = min(gate, limit)
//     out[token] = sum of its slots' weight * output
//
// Biases of the expert are added to gate, up and output before. All arithmetic is in f32; sums are in the order of slots.
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
    const float* outputs;  // [tokens, top_k, columns]
    const i64* expert;     // [tokens, top_k]; experts that do not exist are skipped
    const float* weights;  // [tokens, top_k]
    const void* bias;      // [experts, columns], or null
    Type type;             // of biases
    float* out;            // [tokens, columns]
    int top_k, columns, experts;
};

#if defined(__CUDACC__)
namespace clamped {

MOEPACK_DEVICE float bias_at(const void* bias, Type type, i64 at) {
    if (!bias) return 0;
    if (type == Type::f32) return static_cast<const float*>(bias)[at];
    u16 bits = static_cast<const u16*>(bias)[at];
    return type == Type::f16 ? half_value(bits) : bf16_value(bits);
}

// Comparisons keep NaN.
MOEPACK_DEVICE void gate(const Clamped& c, i64 row, int column) {
    i64 expert = c.expert[row], first = expert * 2 * c.columns + i64(column) * c.stride, at = row * c.columns + column;
    if (expert < 0 || expert >= c.experts) return;
    float g = c.gate[at] + bias_at(c.bias, c.type, first), u = c.up[at] + bias_at(c.bias, c.type, first + c.up_at);
    g = g > c.limit ? c.limit : g;
    u = u > c.limit ? c.limit : u < -c.limit ? -c.limit : u;
    c.inner[at] = (u + 1) * (g / (1 + __expf(-c.alpha * g)));
}

MOEPACK_DEVICE void sum(const Biased& b, i64 token, int column) {
    float total = 0;
    for (i64 slot = token * b.top_k; slot < (token + 1) * b.top_k; ++slot) {
        i64 expert = b.expert[slot];
        if (expert < 0 || expert >= b.experts) continue;
        float bias = bias_at(b.bias, b.type, expert * b.columns + column);
        total += b.weights[slot] * (b.outputs[slot * b.columns + column] + bias);
    }
    b.out[token * b.columns + column] = total;
}

}  // namespace clamped
#endif

}  // namespace moepack

#if defined(__CUDACC__)
// Grid: shares of the columns, and rows or tokens.
extern "C" __global__ void __launch_bounds__(256) gate(moepack::Clamped clamped) {
    moepack::enter_launch();
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < clamped.columns) moepack::clamped::gate(clamped, blockIdx.y, column);
}

extern "C" __global__ void __launch_bounds__(256) sum(moepack::Biased biased) {
    moepack::enter_launch();
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < biased.columns) moepack::clamped::sum(biased, blockIdx.y, column);
}
#endif
