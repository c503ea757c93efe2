// Operations on whole rows by a block: rotation by Hadamard matrices, and the grid to which activations are rounded.
#pragma once
#include "common/layer.cuh"

namespace moepack {

#if defined(__CUDACC__)
// Multiplies values in shared memory by Sylvester's matrix of `width` columns, unscaled; called by all threads of a
// block.
MOEPACK_DEVICE void rotate(float* values, int width) {
    for (int half = 1; half < width; half *= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < width / 2; i += blockDim.x) {
            int at = (i & -half) * 2 + (i & (half - 1));
            float first = values[at], second = values[at + half];
            values[at] = first + second;
            values[at + half] = first - second;
        }
    }
    __syncthreads();
}

// Rotates the columns of a row, `width` at a time: value(column) reads them, use(column, value) receives the results.
// If `width` exceeds the floats that shared memory holds, the last rounds come first: they add up parts of the row.
template <class Value, class Use>
MOEPACK_DEVICE void rotate_row(int columns, int width, Value value, Use use) {
    constexpr int MOST_WIDTH = 32768;
    float* values = reinterpret_cast<float*>(shared_memory);
    float unit = __fdiv_rn(1.0f, __fsqrt_rn(float(width)));
    int part = least(width, MOST_WIDTH);
    for (int start = 0; start < columns; start += part) {
        int first = start / width * width, number = (start - first) / part;
        for (int i = threadIdx.x; i < part; i += blockDim.x) {
            float sum = value(first + i);
            for (int j = 1; j < width / part; ++j) {
                float other = value(first + j * part + i);
                sum += __popc(number & j) & 1 ? -other : other;
            }
            values[i] = sum;
        }
        rotate(values, part);
        for (int i = threadIdx.x; i < part; i += blockDim.x) use(start + i, __fmul_rn(values[i], unit));
        __syncthreads();
    }
}

MOEPACK_DEVICE float activation(const Activations& x, i64 at) {
    if (x.type == Type::f32) return static_cast<const float*>(x.data)[at];
    u16 bits = static_cast<const u16*>(x.data)[at];
    return x.type == Type::f16 ? half_value(bits) : bf16_value(bits);
}

// The largest of the threads' non-negative values; called by all threads of a block.
MOEPACK_DEVICE float block_largest(float value) {
    __shared__ float largest[WARP];
    __syncthreads();
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = value;
    __syncthreads();
    for (int i = 0; i < blockDim.x / WARP; ++i) value = fmaxf(value, largest[i]);
    return value;
}

// The grid of values between -low and high with `bits` bits: step * (code - zero).
struct Grid {
    float step, zero, inverse, top;

    MOEPACK_DEVICE Grid(float low, float high, int bits) : top(float((1 << bits) - 1)) {
        step = __fdiv_rn(high + low, top);
        inverse = __fdiv_rn(1.0f, step);
        // Ranges whose step has no finite inverse become zeros.
        if (inverse > 3.4028235e38f) step = inverse = 0;
        zero = fminf(fmaxf(floorf(__fadd_rn(__fmul_rn(low, inverse), 0.5f)), 0.0f), top);
    }

    // A value in steps.
    MOEPACK_DEVICE float steps(float value) const {
        return truncf(fminf(fmaxf(__fadd_rn(__fmul_rn(value, inverse), zero + 0.5f), 0.0f), top)) - zero;
    }
};
#endif

}  // namespace moepack
