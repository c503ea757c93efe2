// A router's choice of experts from its logits, in one launch: scores, the best experts, their weights.
//
// A warp handles a token, a lane every 32nd expert. Scores are a softmax over all experts, or sigmoids. The experts with
// the largest scores are chosen one after the other, the first one among equals; `correction` is added to the scores for
// the choice, but not to the weights. All arithmetic is in f32; weights are rounded to the type of the logits.
//
// Definition: SCORES, the most scores per lane.
#include "common/layer.cuh"
#include "common/order.cuh"

namespace moepack {

struct Choice {
    const void* logits;  // [tokens, experts]
    Type type;
    const float* correction;  // [experts], or null
    i64* index;               // [tokens, top_k], from the largest score to the smallest
    float* weights;           // [tokens, top_k]
    int tokens, experts, top_k;
    int sigmoid, normalized;  // whether scores are sigmoids; whether weights are divided by their sum
    float scale;              // of the weights
};

#if defined(__CUDACC__)
namespace router {

constexpr float MISSING = -3.0e38f;

MOEPACK_DEVICE float load(const Choice& choice, i64 at) {
    if (choice.type == Type::f32) return static_cast<const float*>(choice.logits)[at];
    u16 bits = static_cast<const u16*>(choice.logits)[at];
    return choice.type == Type::f16 ? half_value(bits) : bf16_value(bits);
}

MOEPACK_DEVICE float rounded(Type type, float value) {
    if (type == Type::f32) return value;
    return type == Type::f16 ? half_value(u16(to_half2(value, 0.0f))) : bf16_value(u16(to_bf16x2(value, 0.0f)));
}

MOEPACK_DEVICE float sum_of_warp(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}

// Turns logits, MISSING for missing experts, into scores.
MOEPACK_DEVICE void score(const Choice& choice, float (&value)[SCORES]) {
    float largest = value[0], sum = 0;
#pragma unroll
    for (int i = 1; i < SCORES; ++i) largest = value[i] > largest ? value[i] : largest;
    if (!choice.sigmoid) largest = float_of(__reduce_max_sync(~0u, order_of(largest)));
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
        value[i] = choice.sigmoid ? 1.0f / (1.0f + expf(-value[i])) : expf(value[i] - largest);
        sum += value[i];
    }
    if (choice.sigmoid) return;
    sum = sum_of_warp(sum);
#pragma unroll
    for (int i = 0; i < SCORES; ++i) value[i] = value[i] / sum;
}

MOEPACK_DEVICE void choose(const Choice& choice, int token) {
    int lane = threadIdx.x % WARP;
    float value[SCORES];
    u32 order[SCORES];
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
        int expert = i * WARP + lane;
        value[i] = expert < choice.experts ? load(choice, i64(token) * choice.experts + expert) : MISSING;
    }
    score(choice, value);
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
        int expert = i * WARP + lane;
        float by = expert < choice.experts && choice.correction ? choice.correction[expert] : 0.0f;
        order[i] = expert < choice.experts ? order_of(value[i] + by) : 0;
    }
    int chosen = 0;
    float weight = 0;
    for (int place = 0; place < choice.top_k; ++place) {
        u32 largest = order[0];
#pragma unroll
        for (int i = 1; i < SCORES; ++i) largest = most(largest, order[i]);
        largest = __reduce_max_sync(~0u, largest);
        int first = SCORES * WARP;
#pragma unroll
        for (int i = SCORES - 1; i >= 0; --i)
            if (order[i] == largest) first = i * WARP + lane;
        int expert = SCORES * WARP - int(__reduce_max_sync(~0u, u32(SCORES * WARP - first)));
        float own = 0;
#pragma unroll
        for (int i = 0; i < SCORES; ++i)
            if (expert == i * WARP + lane) own = value[i], order[i] = 0;
        own = __shfl_sync(~0u, own, expert % WARP);
        if (place == lane) chosen = expert, weight = own;
    }
    float sum = choice.normalized ? sum_of_warp(lane < choice.top_k ? weight : 0.0f) : 1.0f;
    if (lane < choice.top_k) {
        choice.index[i64(token) * choice.top_k + lane] = chosen;
        choice.weights[i64(token) * choice.top_k + lane] = rounded(choice.type, weight / sum * choice.scale);
    }
}

}  // namespace router
#endif

}  // namespace moepack

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(32) choose(moepack::Choice choice) {
    moepack::enter_launch();
    moepack::router::choose(choice, blockIdx.x);
}
#endif
