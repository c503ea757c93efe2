// The kernels of every family whose Format implements `Layer` (common/layer.cuh). Definitions: TOKENS, RESIDENT.
#pragma once
#include "common/layer.cuh"

#if defined(__CUDACC__)
#define MOEPACK_LAUNCH extern "C" __global__ void __launch_bounds__(moepack::THREADS, RESIDENT)

// `lay_out_tokens` and `lay_out_hidden` lay out the cells of the slots for a layer's first and second launch; the other
// kernels are the launches, one per Mode.
#define MOEPACK_LAYER_KERNELS(FORMAT)                                                                          \
    MOEPACK_LAUNCH lay_out_tokens(moepack::Problem problem) {                                                  \
        moepack::lay_out_layer<FORMAT, moepack::Mode::project, TOKENS>(problem);                               \
    }                                                                                                          \
    MOEPACK_LAUNCH lay_out_hidden(moepack::Problem problem) {                                                  \
        moepack::lay_out_layer<FORMAT, moepack::Mode::combine, TOKENS>(problem);                               \
    }                                                                                                          \
    MOEPACK_LAUNCH gated(moepack::Problem problem, FORMAT::Matrix gate, FORMAT::Matrix up) {                   \
        moepack::run_layer<FORMAT, moepack::Mode::gated, TOKENS>(problem, gate, up);                           \
    }                                                                                                          \
    MOEPACK_LAUNCH project(moepack::Problem problem, FORMAT::Matrix matrix) {                                  \
        moepack::run_layer<FORMAT, moepack::Mode::project, TOKENS>(problem, matrix, matrix);                   \
    }                                                                                                          \
    MOEPACK_LAUNCH multiply(moepack::Problem problem, FORMAT::Matrix matrix) {                                 \
        moepack::run_layer<FORMAT, moepack::Mode::multiply, TOKENS>(problem, matrix, matrix);                  \
    }                                                                                                          \
    MOEPACK_LAUNCH combine(moepack::Problem problem, FORMAT::Matrix matrix) {                                  \
        moepack::run_layer<FORMAT, moepack::Mode::combine, TOKENS>(problem, matrix, matrix);                   \
    }                                                                                                          \
    MOEPACK_LAUNCH add_splits(const float* parts, float* out, int count, int splits) {                         \
        moepack::add_parts(parts, out, count, splits);                                                         \
    }
#endif
