// Codes of 2, 3 or 4 bits into the codebooks of a row, or of a block of its columns (docs/format.md, section 7).
//
// Layout: the bytes on disk, panels of 16 rows. A lane keeps the codebooks of two rows in registers and looks four codes
// up in one byte permutation, or three where codebooks have 16 entries (codebook.cuh). Centroids are 16-bit integers, a
// plane of high and one of low bytes; tensors made for rounded activations have no low plane.
//
// Arithmetic: integers. A token's activations of 128 columns are rounded to 15 bits of the power of two above the largest,
// two signed bytes; products of bytes go to s8 tensor cores (m16n8k32), a chunk's sums are exact and become float32 when
// they are scaled. So the error is at most 2^-15 of the largest activation of each 128 columns times sum |w|, and that of
// float32 sums: bfloat16 activations no 2^7 times smaller than the largest are exact. Infinities and NaNs give NaN.
//
// Tensors whose products round activations to 8 or 4 bits, or turn them by Hadamard's matrix, have their tokens prepared
// by a launch of its own, `prepare_tokens`, a block a token: the grid is that of the CPU, to the bit.
//
// Launch: common/layer.cuh. Integer instructions a weight of the decoding, 16-bit and 8-bit centroids: 4 bits 2.1 and 1.4,
// 3 bits 1.1 and 0.9, 2 bits 1.3 and 1.1. At 3 TB/s an SM has 31 cycles a quarter for the 8 weights a lane of a product
// of 4 bits, of which decoding takes 34 of the integer pipe: it bounds 16-bit centroids of 4 bits.
//
// Definitions: BITS, PLANES (bytes of a centroid), TOKENS (most of a tile: 8 or 32).
#include "codebook.cuh"
#include "common/layer.cuh"

namespace moepack {

MOEPACK_DEVICE void prefetch(const u8* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

MOEPACK_DEVICE void store_shared(u32 to, u64 value) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(value) : "memory");
}

struct Codebook {
    static constexpr int ENTRIES = 1 << BITS;
    static constexpr int PARAMETERS = PANEL * (4 + PLANES * (ENTRIES + 4));
    static constexpr int CODES = PANEL * CHUNK / 8 * BITS;
    // Behind the codes of a chunk in the ring lies the address of its parameters.
    static constexpr int STAGE = CODES + 16, DEPTH = most(3, 4608 / CODES);
    static constexpr int NOTES = 4, SUMS = 0;  // one is used, four keep cells aligned

    struct Matrix {
        const u8* data;  // the first panel
        i64 panel_bytes;
        int block_bytes;  // of a block of columns with its parameters
        int reciprocal;   // 2^20 / chunks of a block of columns, rounded up; 0: one block

        // The block of columns of a chunk, of at most 512.
        MOEPACK_DEVICE int block_of(int chunk) const {
            return u32(chunk * reciprocal) >> 20;
        }
    };

    // The codebooks of rows 2 g and 2 g + 1, which are loaded when a warp comes to other ones.
    struct Lane {
        int row, t;
        mutable const u8* parameters = nullptr;
        mutable Table<BITS> table[PLANES][2];
        mutable float2 scale;

        MOEPACK_DEVICE explicit Lane(int lane) : row(lane / 4 * 2), t(lane % 4) {}

        MOEPACK_DEVICE void enter(const u8* at) const {
            if (at == parameters) return;
            parameters = at;
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                const u32* words = reinterpret_cast<const u32*>(at + (plane * PANEL + row) * ENTRIES);
#pragma unroll
                for (int i = 0; i < 2 * Table<BITS>::WORDS; ++i)
                    table[plane][i / Table<BITS>::WORDS].word[i % Table<BITS>::WORDS] = words[i];
            }
            scale = *reinterpret_cast<const float2*>(at + PLANES * PANEL * ENTRIES + 4 * row);
        }
    };

    static MOEPACK_DEVICE void fetch(const Matrix& matrix, i64 panel, int chunk, u32 to, int lane, u64 policy) {
        const u8* data = matrix.data + panel * matrix.panel_bytes;
        int block = matrix.block_of(chunk);
        const u8* parameters = data + i64(block) * matrix.block_bytes;
        i64 codes = (block + 1) * PARAMETERS + i64(chunk) * CODES;
#pragma unroll
        for (int piece = lane; piece < CODES / 16; piece += WARP) {
            i64 from = codes + piece * 16;
            bool exists = from < matrix.panel_bytes;
            copy_async(to + piece * 16, data + (exists ? from : 0), exists ? 16 : 0, policy);
        }
        if (lane * 32 < PARAMETERS) prefetch(parameters + lane * 32);
        if (lane == 0) store_shared(to + CODES, reinterpret_cast<u64>(parameters));
    }

    // sum[i] += a chunk of rows 2 g and 2 g + 1 times tokens 8 i + 2 t and 8 i + 2 t + 1.
    template <int N>
    static MOEPACK_DEVICE void multiply(const Lane& lane, const u8* stage, const u8* cells, int tokens, float (*out)[4]) {
        lane.enter(*reinterpret_cast<const u8* const*>(stage + CODES));
        const u8* x[N];
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = cells + least(8 * i + lane.row / 2, tokens - 1) * STEP_BYTES + lane.t * 16;
        u32 codes[2][4];
        codes_of<BITS>(stage, lane.row, lane.t, codes[0]);
        codes_of<BITS>(stage, lane.row + 1, lane.t, codes[1]);
        // Products of high bytes; of a high and a low one; of low ones.
        int high[N][4] = {}, middle[N][4] = {}, low[N][4] = {};
#pragma unroll
        for (int step = 0; step < CHUNK / STEP; ++step) {
            Quad b[N];
#pragma unroll
            for (int i = 0; i < N; ++i) b[i] = *reinterpret_cast<const Quad*>(x[i] + step * tokens * STEP_BYTES);
            Selector<BITS> first(codes[0][step]), second(codes[1][step]);
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                const Table<BITS>&upper = lane.table[plane][0], &lower = lane.table[plane][1];
                u32 a[4] = {first.bytes(upper, 0), second.bytes(lower, 0), first.bytes(upper, 1), second.bytes(lower, 1)};
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    multiply_add(plane == 0 ? high[i] : middle[i], a[0], a[1], a[2], a[3], b[i].x, b[i].y);
                    multiply_add(plane == 0 ? middle[i] : low[i], a[0], a[1], a[2], a[3], b[i].z, b[i].w);
                }
            }
        }
        const float* notes = reinterpret_cast<const float*>(cells + tokens * VALUE_BYTES);
#pragma unroll
        for (int i = 0; i < N; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float note = notes[least(8 * i + 2 * lane.t + j % 2, tokens - 1)];
                // Below 2^7 2^7 2^7 2^8 + 2^22.
                float total = float(high[i][j] * 256 + middle[i][j]) * 256.0f;
                if (PLANES == 2) total += float(low[i][j]);
                out[i][j] += total * ((j < 2 ? lane.scale.x : lane.scale.y) * note);
            }
        }
    }
};

// A token's activations of a chunk as digits: value = (256 * high + low) * a power of two. A lane of sixteen has eight.
template <>
MOEPACK_DEVICE void write_cell<Codebook>(u8* cells, int token, int tokens, const float (&value)[8], float weight, bool exists) {
    int lane = threadIdx.x & 15;
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = most(largest, __float_as_uint(value[i]) & 0x7fffffff);
#pragma unroll
    for (int distance = 8; distance; distance /= 2)
        largest = most(largest, __shfl_xor_sync(~0u, largest, distance));
    Scale scale = scale_of(__uint_as_float(largest));
    u32 high[2] = {}, low[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // At most 2^14, so that both digits fit.
        int digits = __float2int_rn(value[i] * (scale.factor * 0.5f));
        low[i / 4] |= u32(digits & 255) << 8 * (i % 4);
        high[i / 4] |= u32((digits + 128) >> 8 & 255) << 8 * (i % 4);
    }
    int step = lane % 4, place = lane / 4;
    if (BITS != 2) {
        // Runs of four columns that meet in a lane are 16 columns apart: of two lanes, each keeps one pair of runs.
        bool second = lane & 2;
        u32 send[2] = {second ? high[0] : high[1], second ? low[0] : low[1]};
        u32 other[2] = {__shfl_xor_sync(~0u, send[0], 2), __shfl_xor_sync(~0u, send[1], 2)};
        if (second) high[0] = other[0], low[0] = other[1];
        else high[1] = other[0], low[1] = other[1];
        step = lane / 4, place = lane % 2 * 2 + second;
    }
    Quad quad = {permute(high[0], high[1], 0x5140), permute(high[0], high[1], 0x7362),
                 permute(low[0], low[1], 0x5140), permute(low[0], low[1], 0x7362)};
    if (!exists) return;
    *reinterpret_cast<Quad*>(cells + (step * tokens + token) * STEP_BYTES + place * 16) = quad;
    float* notes = reinterpret_cast<float*>(cells + tokens * VALUE_BYTES);
    if (lane == 0) notes[token] = largest < 0x7f800000 ? scale.inverse * 2.0f * weight : __uint_as_float(0x7fc00000);
}

// ---------------------------------------------------------------- whole rows

// Multiplies values in shared memory by Sylvester's matrix of `width` columns, unscaled; all threads of a block.
MOEPACK_DEVICE void turn(float* values, int width) {
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

// Turns the columns of a row, `width` at a time: value(column) are its values, use(column, value) takes the new ones. Of
// more columns than shared memory has floats for, what the last rounds add comes first: sums of parts of the row.
template <class Value, class Use>
MOEPACK_DEVICE void turn_row(int columns, int width, Value value, Use use) {
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
        turn(values, part);
        for (int i = threadIdx.x; i < part; i += blockDim.x) use(start + i, __fmul_rn(values[i], unit));
        __syncthreads();
    }
}

MOEPACK_DEVICE float activation(const Activations& x, i64 at) {
    if (x.type == Type::f32) return static_cast<const float*>(x.data)[at];
    u16 bits = static_cast<const u16*>(x.data)[at];
    return x.type == Type::f16 ? half_value(bits) : bf16_value(bits);
}

// The largest of the threads' values, which are not negative; all threads of a block.
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

// What `bits` bits make of values between -low and high: step * (code - zero).
struct Grid {
    float step, zero, inverse, top;

    MOEPACK_DEVICE Grid(float low, float high, int bits) : top(float((1 << bits) - 1)) {
        step = __fdiv_rn(high + low, top);
        inverse = __fdiv_rn(1.0f, step);
        // A range whose step has no finite inverse becomes zeros.
        if (inverse > 3.4028235e38f) step = inverse = 0;
        zero = fminf(fmaxf(floorf(__fadd_rn(__fmul_rn(low, inverse), 0.5f)), 0.0f), top);
    }
    MOEPACK_DEVICE float round(float value) const {
        float code = fminf(fmaxf(__fadd_rn(__fmul_rn(value, inverse), zero + 0.5f), 0.0f), top);
        return step * (truncf(code) - zero);
    }
};

}  // namespace moepack

using namespace moepack;

// Turns each row of x by Hadamard's matrix of `width` columns (1: not at all) and rounds it to `bits` bits (0: not at all).
extern "C" __global__ void prepare_tokens(Activations x, int width, int bits, float* out) {
    i64 start = i64(blockIdx.x) * x.columns;
    float low = 0, high = 0, odd = 0;
    auto use = [&](int column, float value) {
        out[start + column] = value;
        low = fmaxf(low, -value), high = fmaxf(high, value);
        if (!(fabsf(value) < __uint_as_float(0x7f800000))) odd = 1;
    };
    auto value = [&](int column) { return activation(x, start + column); };
    if (width > 1) turn_row(x.columns, width, value, use);
    else for (int i = threadIdx.x; i < x.columns; i += blockDim.x) use(i, value(i));
    if (bits == 0) return;
    Grid grid(block_largest(low), block_largest(high), bits);
    bool finite = block_largest(odd) == 0 && grid.step < __uint_as_float(0x7f800000);
    for (int i = threadIdx.x; i < x.columns; i += blockDim.x)
        out[start + i] = finite ? grid.round(out[start + i]) : __uint_as_float(0x7fc00000);
}

// The value of a row and a column.
MOEPACK_DEVICE float weight(const Codebook::Matrix& matrix, int rows, i64 row, int column) {
    i64 expert = row / rows, panel = expert * ceil_div(rows, PANEL) + row % rows / PANEL;
    int place = row % rows % PANEL, chunk = column / CHUNK, block = matrix.block_of(chunk);
    const u8* data = matrix.data + panel * matrix.panel_bytes;
    const u8* codes = data + i64(block + 1) * Codebook::PARAMETERS + i64(chunk) * Codebook::CODES;
    const u8* books = data + i64(block) * matrix.block_bytes;
    u32 code = code_of<BITS>(codes, place, column % CHUNK);
    int centroid = static_cast<signed char>(books[place * Codebook::ENTRIES + code]) * 256;
    if (PLANES == 2) centroid += static_cast<signed char>(books[(PANEL + place) * Codebook::ENTRIES + code]);
    const float* scales = reinterpret_cast<const float*>(books + PLANES * PANEL * Codebook::ENTRIES);
    return __fmul_rn(scales[place], float(centroid));
}

// Writes the values of `count` rows, counted through all experts, from `first` on, turned back by matrices of `width`.
extern "C" __global__ void dequantize(Codebook::Matrix matrix, i64 first, i64 count, int rows, int columns, int width, u16* out) {
    for (i64 i = blockIdx.x; i < count; i += gridDim.x) {
        auto value = [&](int column) { return weight(matrix, rows, first + i, column); };
        auto use = [&](int column, float value) { out[i * columns + column] = u16(to_bf16x2(value, 0)); };
        if (width > 1) turn_row(columns, width, value, use);
        else for (int column = threadIdx.x; column < columns; column += blockDim.x) use(column, value(column));
    }
}

#define LAUNCH extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)

// Makes the cells of the slots of a layer's first and second launch.
LAUNCH lay_out_tokens(Problem problem) {
    lay_out_layer<Codebook, Mode::project, TOKENS>(problem);
}

LAUNCH lay_out_hidden(Problem problem) {
    lay_out_layer<Codebook, Mode::combine, TOKENS>(problem);
}

LAUNCH gated(Problem problem, Codebook::Matrix gate, Codebook::Matrix up) {
    run_layer<Codebook, Mode::gated, TOKENS>(problem, gate, up);
}

LAUNCH project(Problem problem, Codebook::Matrix matrix) {
    run_layer<Codebook, Mode::project, TOKENS>(problem, matrix, matrix);
}

LAUNCH multiply(Problem problem, Codebook::Matrix matrix) {
    run_layer<Codebook, Mode::multiply, TOKENS>(problem, matrix, matrix);
}

LAUNCH combine(Problem problem, Codebook::Matrix matrix) {
    run_layer<Codebook, Mode::combine, TOKENS>(problem, matrix, matrix);
}
