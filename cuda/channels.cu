// Experts that compute only the channels selected by the up projection (FloE, equation 11): y = sum over a token's
// experts of weight * sum over channels c of [|u_c| >= t] * silu(gate_c x) * u_c * down_c, with u = up x.
//
// Launches, after one that writes u of each slot (pair of a token and an expert):
//     choose   one block per slot: lists the channels that pass the expert's threshold, in ascending order; the first
//              slot of a token converts the token to f32
//     compute  as many blocks as can be resident: the listed channels of all slots are numbered consecutively, and each
//              block takes an equal range. Its threads own columns. They multiply the gate rows while the down columns
//              are prefetched to L2, and add the latter to a row of `parts` for each slot in the range: row block +
//              slot, which is unique to this pair
//     add      sums the parts of each token's slots
// With coarse copies of all projections, records hold the difference to finer values (docs/methods/floe.md), and
// preceding launches write the coarse gates and u. Then `choose` writes inner = silu(gate) * u of all channels and
// selects channels by inner times the routing weight. `compute` replaces inner for refined channels, a launch after it
// multiplies inner by the coarse down projection, and `add` adds to that result.
// Every sum has a fixed order, determined by routing and selection, and nothing waits for the host. The records of an
// expert's first channels, or of all, are in GPU memory. The others are in pinned host memory, and only selected
// records cross the bus.
//
// `gather` is the compact transfer: it copies selected records from pinned host memory to the GPU, given indices on the
// GPU, with as many blocks as saturate the bus.
//
// Definitions: BITS (per value: 4, 8, or 16 for bf16), REFINES (1: records are differences to coarse copies).
//
// Bounds: bytes of the selected records over memory bandwidth, 8 us for a tenth of an expert of Mixtral-8x7B in bf16
// (23.5 MB) on an H100, after the up projection and three launches.
#include "channels.cuh"
#include "common/tokens.cuh"

#if defined(__CUDACC__)
namespace moepack {

constexpr int BLOCK = 512, WARPS = BLOCK / WARP;
constexpr int BATCH = 128;      // channels per batch of a block
constexpr int COLUMNS_EACH = 4;  // per thread of `add`
using Values = Piece<BITS>;

struct Sparse {
    Records records;
    Activations x;
    const i64* index;      // [slots]
    const float* weights;  // [slots]
    const float* ups;      // [slots, channels]
    float* tokens;         // x in f32, [tokens, columns zero-padded to whole groups]
    int* list;             // [slots, channels]
    int* counts;           // [slots]
    int* offsets;          // [slots + 1]: prefix sums of counts
    float* parts;          // [blocks + slots, columns padded to whole groups]
    float* out;            // [tokens, columns]
    const float* gates;    // [slots, channels] of coarse copies; like `inner`, only if REFINES
    float* inner;          // [slots, channels]
    i64* computed;         // counts over all calls: computed channels, all channels of the experts, and computed
                           // channels that were resident
    int slots, top_k, experts, columns, blocks;

    MOEPACK_DEVICE bool exists(int slot) const {
        return index[slot] >= 0 && index[slot] < experts;
    }

    // The values by which channels of a slot are selected, after multiplication by `judging_factor`.
    MOEPACK_DEVICE const float* judged(int slot) const {
        return (REFINES ? inner : ups) + i64(slot) * records.channels;
    }

    MOEPACK_DEVICE float judging_factor(int slot) const {
        return REFINES ? weights[slot] : 1.0f;
    }

    MOEPACK_DEVICE i64 width() const {
        return i64(records.groups) * Values::GROUP;
    }

    // The number of blocks of `compute` that have any of the `total` channels; each starts at total * block / this.
    MOEPACK_DEVICE int blocks_of(int total) const {
        return least(blocks, total);
    }

    // The block that computes a channel number.
    MOEPACK_DEVICE int block_of(int number, int total) const {
        return int(((number + 1ll) * blocks_of(total) - 1) / total);
    }
};

MOEPACK_DEVICE void enter_launch() {
    wait_for_launch_before();
    let_next_launch_begin();
}

// Whether a channel passes; NaN passes, so it reaches the output.
MOEPACK_DEVICE bool passes(const float* judged, float factor, int channel, int channels, float threshold) {
    return channel < channels && !(fabsf(judged[channel] * factor) < threshold);
}

MOEPACK_DEVICE float silu(float gate) {
    return gate / (1.0f + __expf(-gate));
}

// Computes a slot's `inner` from the coarse copies; called by all threads of a block.
MOEPACK_DEVICE void begin_inner(const Sparse& sparse, int slot) {
    i64 first = i64(slot) * sparse.records.channels;
    for (int i = threadIdx.x; i < sparse.records.channels; i += blockDim.x)
        sparse.inner[first + i] = silu(sparse.gates[first + i]) * sparse.ups[first + i];
    __syncthreads();
}

// Converts a token to a row of `tokens`; called by all threads of a block.
MOEPACK_DEVICE void widen_token(const Sparse& sparse, int token) {
    for (int column = threadIdx.x * 8; column < sparse.width(); column += blockDim.x * 8) {
        u32 word[8];
        float x[8];
        load_eight(sparse.x, token, column, word);
        to_floats(sparse.x.type, word, x);
        float4* to = reinterpret_cast<float4*>(sparse.tokens + token * sparse.width() + column);
        to[0] = {x[0], x[1], x[2], x[3]}, to[1] = {x[4], x[5], x[6], x[7]};
    }
}

// Writes the exclusive prefix sums of counts to offset[0 .. slots].
MOEPACK_DEVICE void sum_counts(const int* counts, int slots, int* offset) {
    __shared__ int of_warp[WARPS];
    int slot = threadIdx.x, lane = slot % WARP, count = slot < slots ? counts[slot] : 0, sum = count;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        int other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == WARP - 1) of_warp[slot / WARP] = sum;
    __syncthreads();
    for (int warp = 0; warp < slot / WARP; ++warp) sum += of_warp[warp];
    if (slot < slots) offset[slot + 1] = sum;
    if (slot == 0) offset[0] = 0;
    __syncthreads();
}

// Four sums over a warp: lanes 0, 8, 16 and 24 receive those of value[0], [1], [2] and [3].
MOEPACK_DEVICE float sum_four(const float (&value)[4]) {
    bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    float first = upper ? value[2] : value[0], second = upper ? value[3] : value[1];
    first += __shfl_xor_sync(~0u, upper ? value[0] : value[2], 16);
    second += __shfl_xor_sync(~0u, upper ? value[1] : value[3], 16);
    float sum = (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 8);
#pragma unroll
    for (int distance = 4; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// A batch of channels of a slot: their records, and the factors of their down columns.
struct Batch {
    const u8* record[BATCH];
    i64 at[BATCH];  // index of the channel over all slots
    float factor[BATCH];
    float sum[BATCH][WARPS + 1];  // of each warp's columns of the gate row; padded by one to avoid bank conflicts

    // Finds the records; initializes factors with the outputs of the up projection.
    MOEPACK_DEVICE void find(const Sparse& sparse, int slot, int first, int count) {
        const int* list = sparse.list + i64(slot) * sparse.records.channels + first;
        static_assert(BATCH <= BLOCK);
        int i = threadIdx.x, channel = i < count ? list[i] : sparse.records.resident;
        if (i < count) {
            record[i] = sparse.records.at(sparse.index[slot], channel);
            at[i] = i64(slot) * sparse.records.channels + channel;
            factor[i] = sparse.weights[slot] * sparse.ups[at[i]];
        }
        int resident = __syncthreads_count(channel < sparse.records.resident);
        if (i == 0 && resident) atomicAdd(reinterpret_cast<unsigned long long*>(sparse.computed + 2), resident);
    }

    // Prefetches the down columns, which are read after the gate rows.
    MOEPACK_DEVICE void prefetch_down(const Sparse& sparse, int count) const {
        constexpr int LINE = 128;
        const Records& records = sparse.records;
        int lines = ceil_div(records.half_bytes, LINE);
        for (int i = threadIdx.x; records.resident && i < count * lines; i += BLOCK) {
            if (!records.has_resident(record[i / lines], sparse.experts)) continue;
            const u8* at = record[i / lines] + records.half_bytes + i % lines * LINE;
            asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
        }
    }

    // Multiplies the factors by silu(gate x): threads own columns, and process four rows at once.
    MOEPACK_DEVICE void multiply_gates(const Sparse& sparse, const float* token, int count) {
        int pieces = sparse.records.groups * Values::OF_GROUP, lane = threadIdx.x % WARP;
        for (int first = 0; first < count; first += 4) {
            float part[4] = {};
            for (int piece = threadIdx.x; piece < pieces; piece += BLOCK) {
                Values loaded[4];
                float4 x = *reinterpret_cast<const float4*>(token + Values::column(piece, 0));
                float4 y = *reinterpret_cast<const float4*>(token + Values::column(piece, 1));
#pragma unroll
                for (int i = 0; i < 4; ++i) loaded[i] = Values::load(record[least(first + i, count - 1)], piece);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float v[Values::COLUMNS];
                    loaded[i].values(v);
                    float product = v[0] * x.x + v[1] * x.y + v[2] * x.z + v[3] * x.w;
                    product += v[4] * y.x + v[5] * y.y + v[6] * y.z + v[7] * y.w;
                    part[i] += Values::scale(sparse.records, record[least(first + i, count - 1)], 0, piece) * product;
                }
            }
            float of_warp = sum_four(part);
            if (lane % 8 == 0 && first + lane / 8 < count) sum[first + lane / 8][threadIdx.x / WARP] = of_warp;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += BLOCK) {
            float gate = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) gate += sum[i][warp];
            if (REFINES) gate += sparse.gates[at[i]];
            if (REFINES) sparse.inner[at[i]] = silu(gate) * sparse.ups[at[i]];
            factor[i] *= silu(gate);
        }
        __syncthreads();
    }

    // to += the down columns times their factors; if `begins`, to = instead.
    MOEPACK_DEVICE void add_downs(const Sparse& sparse, int count, float* to, bool begins) const {
        int pieces = sparse.records.groups * Values::OF_GROUP;
        for (int piece = threadIdx.x; piece < pieces; piece += BLOCK) {
            float sum[Values::COLUMNS] = {};
#pragma unroll 4
            for (int i = 0; i < count; ++i) {
                float value[Values::COLUMNS];
                Values::load(record[i] + sparse.records.half_bytes, piece).values(value);
                float by = factor[i] * Values::scale(sparse.records, record[i], 1, piece);
#pragma unroll
                for (int j = 0; j < Values::COLUMNS; ++j) sum[j] += by * value[j];
            }
#pragma unroll
            for (int j = 0; j < Values::COLUMNS; j += 4) {
                float4* at = reinterpret_cast<float4*>(to + Values::column(piece, j / 4));
                float4 old = begins ? float4{0, 0, 0, 0} : *at;
                *at = {old.x + sum[j], old.y + sum[j + 1], old.z + sum[j + 2], old.w + sum[j + 3]};
            }
        }
        __syncthreads();
    }
};

}  // namespace moepack

using namespace moepack;

// Each warp lists the channels of a range, after counting those of the preceding warps.
extern "C" __global__ void __launch_bounds__(1024) choose(Sparse sparse) {
    enter_launch();
    __shared__ int counts[WARP];
    int slot = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, channels = sparse.records.channels;
    if (slot % sparse.top_k == 0) widen_token(sparse, slot / sparse.top_k);
    if (!sparse.exists(slot)) {
        if (threadIdx.x == 0) sparse.counts[slot] = 0;
        return;
    }
    if (REFINES) begin_inner(sparse, slot);
    const float* judged = sparse.judged(slot);
    float threshold = sparse.records.thresholds[sparse.index[slot]], factor = sparse.judging_factor(slot);
    int of_warp = ceil_div(channels, WARP * WARP) * WARP, first = warp * of_warp, count = 0;
#pragma unroll 8
    for (int i = first; i < first + of_warp; i += WARP)
        count += __popc(__ballot_sync(~0u, passes(judged, factor, i + lane, channels, threshold)));
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    int before = lane < warp ? counts[lane] : 0;
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) before += __shfl_xor_sync(~0u, before, distance);
    int* list = sparse.list + i64(slot) * channels + before;
#pragma unroll 8
    for (int i = first; i < first + of_warp; i += WARP) {
        bool wanted = passes(judged, factor, i + lane, channels, threshold);
        u32 all = __ballot_sync(~0u, wanted);
        if (wanted) list[__popc(all & ((1u << lane) - 1))] = i + lane;
        list += __popc(all);
    }
    if (threadIdx.x == 1023) sparse.counts[slot] = before + count;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 2) compute(Sparse sparse) {
    enter_launch();
    __shared__ int offset[MOST_SLOTS + 1];
    __shared__ Batch batch;
    sum_counts(sparse.counts, sparse.slots, offset);
    int slots = sparse.slots, total = offset[slots], slot = 0;
    if (blockIdx.x == 0) {
        int asked = __syncthreads_count(int(threadIdx.x) < slots && sparse.exists(threadIdx.x));
        for (int i = threadIdx.x; i <= slots; i += BLOCK) sparse.offsets[i] = offset[i];
        if (threadIdx.x == 0)
            sparse.computed[0] += total, sparse.computed[1] += i64(asked) * sparse.records.channels;
    }
    int blocks = sparse.blocks_of(total), block = blockIdx.x;
    if (block >= blocks) return;
    int first = int(i64(total) * block / blocks), last = int(i64(total) * (block + 1) / blocks);
    for (int at = first, end; at < last; at = end) {
        while (offset[slot + 1] <= at) ++slot;
        end = least(least(last, offset[slot + 1]), at + BATCH);
        batch.find(sparse, slot, at - offset[slot], end - at);
        batch.prefetch_down(sparse, end - at);
        batch.multiply_gates(sparse, sparse.tokens + slot / sparse.top_k * sparse.width(), end - at);
        float* part = sparse.parts + (block + slot) * sparse.width();
        batch.add_downs(sparse, end - at, part, at == most(first, offset[slot]));
    }
}

// A block sums some columns of a token; each of its 32 warps sums every 32nd part of a slot.
extern "C" __global__ void __launch_bounds__(1024) add(Sparse sparse) {
    enter_launch();
    constexpr int WARPS = 32, WIDTH = WARP * COLUMNS_EACH;
    __shared__ float4 sums[WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, token = blockIdx.y;
    int column = blockIdx.x * WIDTH + lane * COLUMNS_EACH, total = sparse.offsets[sparse.slots];
    float4 sum = {0, 0, 0, 0};
    for (int slot = token * sparse.top_k; slot < (token + 1) * sparse.top_k; ++slot) {
        int first = sparse.offsets[slot], end = sparse.offsets[slot + 1];
        if (first == end || column >= sparse.width()) continue;
        int last = sparse.block_of(end - 1, total);
#pragma unroll 8
        for (int block = sparse.block_of(first, total) + warp; block <= last; block += WARPS) {
            const float* part = sparse.parts + (block + slot) * sparse.width() + column;
            float4 value = *reinterpret_cast<const float4*>(part);
            sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    const float* all = reinterpret_cast<const float*>(sums);
    if (int at = blockIdx.x * WIDTH + threadIdx.x; threadIdx.x < WIDTH && at < sparse.columns) {
        float value = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) value += all[i * WIDTH + threadIdx.x];
        float* out = sparse.out + i64(token) * sparse.columns + at;
        *out = REFINES ? *out + value : value;
    }
}

// Decodes `count` records starting at `first` to bfloat16 or, if `wide`, float32 [count, 2 columns], one piece per
// thread.
extern "C" __global__ void __launch_bounds__(256)
dequantize(Records records, i64 first, i64 count, int columns, int wide, void* out) {
    int pieces = records.groups * Values::OF_GROUP;
    i64 items = count * 2 * pieces;
    for (i64 item = i64(blockIdx.x) * blockDim.x + threadIdx.x; item < items; item += i64(gridDim.x) * blockDim.x) {
        int piece = item % pieces, half = item / pieces % 2;
        i64 number = item / pieces / 2;
        const u8* record = records.data + (first + number) * records.bytes;
        float value[Values::COLUMNS], scale = Values::scale(records, record, half, piece);
        Values::load(record + half * records.half_bytes, piece).values(value);
#pragma unroll
        for (int i = 0; i < Values::COLUMNS; ++i) {
            int column = Values::column(piece, i / 4) + i % 4;
            if (column < columns) store_value(out, (number * 2 + half) * columns + column, scale * value[i], wide);
        }
    }
}

// Copies the records list[0 .. *count), each of `bytes` bytes (a multiple of 16), consecutively to `to`; a warp copies
// 4 KB at once.
extern "C" __global__ void __launch_bounds__(512)
gather(const u8* from, const int* list, const int* count, i64 bytes, u8* to) {
    constexpr int AT_ONCE = 8;
    i64 of_record = bytes / 16, all = *count * of_record, step = i64(gridDim.x) * blockDim.x * AT_ONCE;
    i64 warp = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    for (i64 first = warp * WARP * AT_ONCE + threadIdx.x % WARP; first < all; first += step) {
        Quad quad[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            i64 at = first + i * WARP, record = at / of_record;
            if (at < all) quad[i] = load_quad(from + list[record] * bytes + (at - record * of_record) * 16);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * WARP < all) reinterpret_cast<Quad*>(to)[first + i * WARP] = quad[i];
    }
}
#endif
