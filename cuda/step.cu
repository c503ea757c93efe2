// Operations of a decoding step other than products, each in one launch: RMS norms, also of sums, and what happens to
// heads between their products and attention (norms, rotary embeddings, the append to keys and values), as transformers
// computes them.
//
// Arithmetic: f32, with the roundings of transformers' separate operations. A normalized value is rounded to the
// activations' type before it is multiplied by the weight, unless a norm rounds late, and the product is rounded again;
// both products of a rotation are rounded, and so is their sum.
#include "common/layer.cuh"
#include "common/narrow.cuh"
#include "common/rooms.cuh"

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

// Writes a row in its own type. If `late`, only products with weights are rounded.
MOEPACK_DEVICE void normalize(const Activations& x, const Activations& weight, float epsilon, bool late, void* out) {
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
        for (int i = 0; i < 8; ++i)
            product[i] = scale[i] * (late ? value[i] * factor : rounded(x.type, value[i] * factor));
        store_as(x.type, out, row * x.columns + column, product);
    });
}

constexpr int SUMS = 2;  // of eight columns per thread, in registers

// Writes x + addend and its norm; both are rounded to the type of x, as is the addend before.
MOEPACK_DEVICE void add_and_normalize(const Activations& x, const Activations& addend, const Activations& weight,
                                      float epsilon, bool late, void* sum_out, void* out) {
    i64 row = blockIdx.x;
    float sum[SUMS][8], squares = 0;
#pragma unroll
    for (int n = 0; n < SUMS; ++n) {
        int column = (n * blockDim.x + threadIdx.x) * 8;
        u32 word[2][8];
        float more[8];
        load_eight(x, row, column, word[0]), load_eight(addend, row, column, word[1]);
        to_floats(x.type, word[0], sum[n]), to_floats(addend.type, word[1], more);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[n][i] = rounded(x.type, sum[n][i] + rounded(x.type, more[i]));
            squares += sum[n][i] * sum[n][i];
        }
    }
    float factor = rsqrtf(block_sum(squares) / float(x.columns) + epsilon);
#pragma unroll
    for (int n = 0; n < SUMS; ++n) {
        int column = (n * blockDim.x + threadIdx.x) * 8;
        if (column >= x.columns) return;
        u32 word[8];
        float scale[8];
        load_eight(weight, 0, column, word);
        to_floats(weight.type, word, scale);
        store_as(x.type, sum_out, row * x.columns + column, sum[n]);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            sum[n][i] = scale[i] * (late ? sum[n][i] * factor : rounded(x.type, sum[n][i] * factor));
        store_as(x.type, out, row * x.columns + column, sum[n]);
    }
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

// The heads of tokens, as rows of `columns` (at most 256) values of one type. `query_norm` and `key_norm` are weights
// [columns], or null. `cos` and `sin` [tokens, R] rotate the first `rotated` columns, a multiple of 16, or are null; R is
// `rotated`, or half of it, for both halves of the columns. Queries are written to [tokens, query_heads, columns]. Keys and values are written to `rooms`, or, for one token of each sequence,
// to the token `place` of [sequences, key_heads, capacity, columns].
struct Heads {
    Activations queries, keys, values, query_norm, key_norm, cos, sin;
    const i64* place;
    void *queries_out, *keys_out, *values_out;
    float epsilon;
    int query_heads, key_heads;
    int query_stride, key_stride, value_stride;  // rows from one token to the next
    int capacity, rotated;
    Rooms rooms;
};

#if defined(__CUDACC__)
// Rotates the eight columns of a lane with those of the lane that holds the other half.
MOEPACK_DEVICE void rotate_lane(const Heads& heads, Type type, int token, float (&value)[8]) {
    int lane = threadIdx.x % WARP, half = heads.rotated / 2;
    bool first = lane * 8 < half;
    int column = heads.cos.columns > half || first ? lane * 8 : lane * 8 - half;
    int partner = first ? lane + half / 8 : most(lane - half / 8, 0);
    u32 word[8];
    float c[8], s[8];
    load_eight(heads.cos, token, column, word), to_floats(heads.cos.type, word, c);
    load_eight(heads.sin, token, column, word), to_floats(heads.sin.type, word, s);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float other = __shfl_sync(~0u, value[i], partner);
        if (lane * 8 >= 2 * half) continue;
        value[i] = rounded(type, rounded(type, value[i] * c[i]) + rounded(type, (first ? -other : other) * s[i]));
    }
}

// Writes a row in 8 bits; each lane has eight columns, zeros after the last one.
MOEPACK_DEVICE void store_narrow(u8* row, int columns, int column, const float (&value)[8]) {
    constexpr float GREATEST = 3.4028234e38f;
    float largest = 0;
    bool is_finite = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        is_finite = is_finite && fabsf(value[i]) <= GREATEST;
        largest = fmaxf(largest, fabsf(value[i]));
    }
    if (!is_finite) largest = __uint_as_float(0x7f800000);
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    float scale = largest / 127;
    is_finite = scale <= GREATEST;
    if (column >= columns) return;
    u32 word[2] = {0, 0};
    if (is_finite && scale > 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            // The quotient exceeds 127 if the scale is subnormal, whose rounding is coarse.
            float code = fminf(fmaxf(rintf(value[i] / scale), -127.0f), 127.0f);
            word[i / 4] |= (u32(int(code)) & 255) << i % 4 * 8;
        }
    }
    u32* to = reinterpret_cast<u32*>(row + column);
    to[0] = word[0], to[1] = word[1];
    if (column == 0) *reinterpret_cast<float*>(row + columns) = is_finite ? scale : __uint_as_float(0x7fc00000);
}

// A warp prepares one row.
MOEPACK_DEVICE void prepare_head(const Heads& heads, int item) {
    int all = heads.query_heads + 2 * heads.key_heads, token = item / all, head = item % all;
    int kind = head < heads.query_heads ? 0 : head < heads.query_heads + heads.key_heads ? 1 : 2;
    head -= kind == 0 ? 0 : heads.query_heads + (kind - 1) * heads.key_heads;
    const Activations& x = kind == 0 ? heads.queries : kind == 1 ? heads.keys : heads.values;
    int stride = kind == 0 ? heads.query_stride : kind == 1 ? heads.key_stride : heads.value_stride;
    int column = threadIdx.x % WARP * 8;
    u32 word[8];
    float value[8];
    load_eight(x, i64(token) * stride + head, column, word), to_floats(x.type, word, value);
    const Activations& norm = kind == 0 ? heads.query_norm : heads.key_norm;
    if (kind < 2 && norm.data) {
        float squares = 0, scale[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += value[i] * value[i];
#pragma unroll
        for (int distance = WARP / 2; distance; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
        float factor = rsqrtf(squares / float(x.columns) + heads.epsilon);
        load_eight(norm, 0, column, word), to_floats(norm.type, word, scale);
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = rounded(x.type, scale[i] * rounded(x.type, value[i] * factor));
    }
    if (kind < 2 && heads.cos.data) rotate_lane(heads, x.type, token, value);
    bool exists = column < x.columns;
    if (kind == 0) {
        i64 row = i64(token) * heads.query_heads + head;
        if (exists) store_as(x.type, heads.queries_out, row * x.columns + column, value);
        return;
    }
    void* out = kind == 1 ? heads.keys_out : heads.values_out;
    i64 row = i64(token) * heads.key_heads + head, capacity = heads.capacity, place;
    if (heads.rooms.keys) {
        place = heads.rooms.place[token];
        if (place < 0) return;
        i64 room = heads.rooms.sequence[token];
        out = reinterpret_cast<void*>((kind == 1 ? heads.rooms.keys : heads.rooms.values)[room]);
        row = head, capacity = heads.rooms.capacity[room];
    } else {
        place = *heads.place;
    }
    row = row * capacity + place;
    if (heads.rooms.narrow) store_narrow(static_cast<u8*>(out) + row * (x.columns + NARROW_SCALE), x.columns, column, value);
    else if (exists) store_as(x.type, out, row * x.columns + column, value);
}
#endif

}  // namespace moepack

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(256) rms_norm(moepack::Activations x, moepack::Activations weight,
                                                           float epsilon, int late, void* out) {
    moepack::enter_launch();
    moepack::normalize(x, weight, epsilon, late, out);
}

// Columns: at most 16 per thread.
extern "C" __global__ void __launch_bounds__(1024)
add_norm(moepack::Activations x, moepack::Activations addend, moepack::Activations weight, float epsilon, int late,
         void* sum_out, void* out) {
    moepack::enter_launch();
    moepack::add_and_normalize(x, addend, weight, epsilon, late, sum_out, out);
}

extern "C" __global__ void __launch_bounds__(128) prepare_heads(moepack::Heads heads, int rows) {
    moepack::enter_launch();
    int item = blockIdx.x * (blockDim.x / moepack::WARP) + threadIdx.x / moepack::WARP;
    if (item < rows) moepack::prepare_head(heads, item);
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
