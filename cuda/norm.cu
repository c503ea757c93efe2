// RMS norms as transformers computes them, in one launch: a block normalizes a row.
//
// Arithmetic: squares and sums are f32; the normalized value is rounded to the activations' type before it is multiplied
// by the weight, and the product is rounded again.
#include "common/layer.cuh"

namespace moepack {

#if defined(__CUDACC__)
// A float rounded to the type of activations.
MOEPACK_DEVICE float rounded(Type type, float value) {
    if (type == Type::f32) return value;
    if (type == Type::f16) return half_value(u16(to_half2(value, 0.0f)));
    return bf16_value(u16(to_bf16x2(value, 0.0f)));
}

// The sum over all threads of a block.
MOEPACK_DEVICE float block_sum(float value) {
    __shared__ float sums[WARP];
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    value = 0;
    for (int i = 0; i < int(blockDim.x) / WARP; ++i) value += sums[i];
    return value;
}

// Writes a row in its own type.
MOEPACK_DEVICE void normalize(const Activations& x, const Activations& weight, float epsilon, void* out) {
    i64 row = blockIdx.x;
    float squares = 0;
    for_each_eight(x, row, [&](int, const float(&value)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += value[i] * value[i];
    });
    float factor = rsqrtf(block_sum(squares) / float(x.columns) + epsilon);
    for_each_eight(x, row, [&](int column, const float(&value)[8]) {
        u32 word[8];
        float scale[8], product[8];
        load_eight(weight, 0, column, word);
        to_floats(weight.type, word, scale);
#pragma unroll
        for (int i = 0; i < 8; ++i) product[i] = scale[i] * rounded(x.type, value[i] * factor);
        i64 at = row * x.columns + column;
        if (x.type == Type::f16) {
            Quad* to = reinterpret_cast<Quad*>(static_cast<u16*>(out) + at);
            *to = {to_half2(product[0], product[1]), to_half2(product[2], product[3]), to_half2(product[4], product[5]),
                   to_half2(product[6], product[7])};
        } else {
            store_eight(out, at, product, 8, x.type == Type::f32, true);
        }
    });
}
#endif

}  // namespace moepack

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(256) rms_norm(moepack::Activations x, moepack::Activations weight,
                                                           float epsilon, void* out) {
    moepack::enter_launch();
    moepack::normalize(x, weight, epsilon, out);
}
#endif
