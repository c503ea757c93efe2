// Operations of a decoding step other than products, each in one launch: RMS norms and rotary embeddings as transformers
// computes them.
//
// Arithmetic: f32, with the roundings of transformers' separate operations. A normalized value is rounded to the
// activations' type before it is multiplied by the weight, and the product is rounded again; both products of a rotation
// are rounded, and so is their sum.
#include "common/layer.cuh"

namespace moepack {

#if defined(__CUDACC__)
// A float rounded to the type of activations.
MOEPACK_DEVICE float rounded(Type type, float value) {
    if (type == Type::f32) return value;
    if (type == Type::f16) return half_value(u16(to_half2(value, 0.0f)));
    return bf16_value(u16(to_bf16x2(value, 0.0f)));
}

// Writes eight neighboring values, 16-byte aligned, rounded to a type.
MOEPACK_DEVICE void store_as(Type type, void* out, i64 at, const float (&v)[8]) {
    if (type == Type::f16) {
        Quad* to = reinterpret_cast<Quad*>(static_cast<u16*>(out) + at);
        *to = {to_half2(v[0], v[1]), to_half2(v[2], v[3]), to_half2(v[4], v[5]), to_half2(v[6], v[7])};
    } else {
        store_eight(out, at, v, 8, type == Type::f32, true);
    }
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
        store_as(x.type, out, row * x.columns + column, product);
    });
}

// Rotates eight columns of a row of heads: x cos + (-x2, x1) sin, where x1 and x2 are the halves of the row. Each row of
// `cos` and `sin` belongs to `heads` rows.
MOEPACK_DEVICE void rotate_eight(const Activations& x, const Activations& cos, const Activations& sin, int heads,
                                 i64 row, int column, void* out) {
    int half = x.columns / 2;
    bool first = column < half;
    u32 word[4][8];
    load_eight(x, row, column, word[0]);
    load_eight(x, row, first ? column + half : column - half, word[1]);
    load_eight(cos, row / heads, column, word[2]);
    load_eight(sin, row / heads, column, word[3]);
    float own[8], other[8], c[8], s[8], sum[8];
    to_floats(x.type, word[0], own), to_floats(x.type, word[1], other);
    to_floats(cos.type, word[2], c), to_floats(sin.type, word[3], s);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float turned = first ? -other[i] : other[i];
        sum[i] = rounded(x.type, own[i] * c[i]) + rounded(x.type, turned * s[i]);
    }
    store_as(x.type, out, row * x.columns + column, sum);
}
#endif

}  // namespace moepack

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(256) rms_norm(moepack::Activations x, moepack::Activations weight,
                                                           float epsilon, void* out) {
    moepack::enter_launch();
    moepack::normalize(x, weight, epsilon, out);
}

// Rotates queries and keys; a thread rotates eight columns.
extern "C" __global__ void __launch_bounds__(256)
rotate(moepack::Activations queries, moepack::Activations keys, moepack::Activations cos, moepack::Activations sin,
       int rows, int query_heads, int key_heads, void* queries_out, void* keys_out) {
    moepack::enter_launch();
    int item = blockIdx.x * blockDim.x + threadIdx.x, parts = queries.columns / 8;
    int row = item / parts, column = item % parts * 8, of_queries = rows * query_heads;
    if (row < of_queries)
        moepack::rotate_eight(queries, cos, sin, query_heads, row, column, queries_out);
    else if (row < of_queries + rows * key_heads)
        moepack::rotate_eight(keys, cos, sin, key_heads, row - of_queries, column, keys_out);
}
#endif
