// Codes of 2, 3 or 4 bits that index the codebooks of a row, or of a block of its columns (docs/format.md, section 7).
//
// Layout: the bytes on disk, in panels of 16 rows. A lane keeps the codebooks of two rows in registers and looks up
// four codes with one byte permutation, or three for codebooks of 16 entries (codebook.cuh). Centroids are 16-bit
// integers, stored as a plane of high and a plane of low bytes. Tensors for rounded activations have no low plane.
//
// Arithmetic: integers. A token's activations of 128 columns are rounded to 15 bits relative to the power of two above
// the largest, and split into two signed bytes. Products of bytes use s8 tensor cores (m16n8k32). The sums of a chunk
// are exact and become float32 when they are scaled. The error is therefore at most 2^-15 of the largest activation of
// each 128 columns times sum |w|, plus that of float32 sums: bfloat16 activations that are less than 2^7 times smaller
// than the largest are exact. Infinities and NaNs give NaN.
//
// For tensors whose products round activations to 8 or 4 bits, or rotate them by a Hadamard matrix, a separate launch
// prepares the tokens (`prepare_tokens`, one block per token). Its grid is bit-identical to the CPU's.
//
// Launch: common/layer.cuh. One token of a layer, and up to four of a linear layer, have separate kernels (`Few`). On
// Hopper, more tokens of 4-bit linear layers with one codebook per row use codebook_linear.cu.
//
// Bounds: bytes of the panels over memory bandwidth, or the integer pipe, which takes two cycles for a warp's
// instruction. Decoding a weight with 16-bit and 8-bit centroids takes: 4 bits 2.1 and 1.4 integer instructions, 3 bits
// 1.1 and 0.9, 2 bits 1.3 and 1.1. 2.1 instructions are 8 us for 4096 x 14336 weights on an H100, whose bytes take 10
// us at 3 TB/s.
//
// Definitions: BITS, PLANES (bytes of a centroid), TOKENS (most per tile), RESIDENT (blocks per multiprocessor).
#include "codebook.cuh"
#include "codebook_rows.cuh"
#include "common/kernels.cuh"

namespace moepack {

MOEPACK_DEVICE void prefetch(const u8* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

MOEPACK_DEVICE void store_shared(Shared to, u64 value) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(value) : "memory");
}

struct Codebook {
    static constexpr int ENTRIES = 1 << BITS;
    static constexpr int PARAMETERS = PANEL * (4 + PLANES * (ENTRIES + 4));
    static constexpr int CODES = PANEL * CHUNK / 8 * BITS;
    // In the ring, the codes of a chunk are followed by the address of its parameters.
    static constexpr int STAGE = CODES + 16, DEPTH = most(3, 4608 / CODES);
    static constexpr int NOTES = 4, SUMS = 0;  // one is used, four keep cells aligned
    static constexpr bool TOGETHER = false, MAKES_CELLS = true;

    struct Matrix {
        const u8* data;  // the first panel
        i64 panel_bytes;
        int block_chunks;  // per column block; the last block of a row may have fewer
        int reciprocal;    // 2^20 / block_chunks, rounded up; 0: one block

        // The column block of a chunk, for at most 512 chunks.
        MOEPACK_DEVICE int block_of(int chunk) const {
            return u32(chunk * reciprocal) >> 20;
        }
        // The offset of a column block in a panel; it starts with its parameters.
        MOEPACK_DEVICE i64 block_at(int block) const {
            return block * (PARAMETERS + i64(block_chunks) * CODES);
        }
        // The offset of a chunk's codes.
        MOEPACK_DEVICE i64 codes_at(int chunk) const {
            return (block_of(chunk) + 1) * PARAMETERS + i64(chunk) * CODES;
        }
    };

    // Iterates over the chunks of a panel.
    struct Source {
        const u8* data;        // this lane's first piece of the next chunk
        const u8* parameters;  // of its column block
        int left;              // bytes of the panel from `data` on
        int rest, block_chunks;  // chunks until the next column block, and per block
        int lane;

        MOEPACK_DEVICE Source() {}

        MOEPACK_DEVICE Source(const Matrix& matrix, i64 panel, int chunk, int lane)
            : block_chunks(matrix.block_chunks), lane(lane) {
            int block = matrix.block_of(chunk);
            const u8* base = matrix.data + panel * matrix.panel_bytes;
            i64 at = matrix.codes_at(chunk) + lane * 16;
            data = base + at, left = int(matrix.panel_bytes - at);
            rest = (block + 1) * block_chunks - chunk;
            enter(base + matrix.block_at(block));
        }

        // Prefetches the parameters to L2; they are read when the chunk is multiplied.
        MOEPACK_DEVICE void enter(const u8* at) {
            parameters = at;
            if (lane * 32 < PARAMETERS) prefetch(at + lane * 32);
        }

        MOEPACK_DEVICE void fetch(Shared to, u64 policy) {
            if (rest == 0) {
                enter(data - lane * 16);
                data += PARAMETERS, left -= PARAMETERS, rest = block_chunks;
            }
#pragma unroll
            for (int i = 0; i < ceil_div(CODES / 16, WARP); ++i) {
                if (i * WARP + lane >= CODES / 16) break;
                int from = i * (WARP * 16);
                copy_async(to + (i * WARP + lane) * 16, data + from, from < left ? 16 : 0, policy);
            }
            if (lane == 0) store_shared(to + CODES, reinterpret_cast<u64>(parameters));
            data += CODES, left -= CODES, --rest;
        }
    };

    // The codebooks of rows 2 g and 2 g + 1, loaded when a warp enters another column block.
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

    // Unpacks the codes of a lane's rows into steps.
    static MOEPACK_DEVICE void unpack(const u8* chunk, const Lane& lane, u32 (&step)[2][4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) codes_of<BITS>(chunk, lane.row + i, lane.t, step[i]);
    }

    // sum[i] += a chunk of rows 2 g and 2 g + 1 times tokens 8 i + 2 t and 8 i + 2 t + 1.
    template <int N>
    static MOEPACK_DEVICE void multiply(const Lane& lane, const u8* stage, const u8* cells, int tokens,
                                        float (*out)[4]) {
        lane.enter(*reinterpret_cast<const u8* const*>(stage + CODES));
        const u8* x[N];
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = cells + least(8 * i + lane.row / 2, tokens - 1) * STEP_BYTES + lane.t * 16;
        u32 codes[2][4];
        unpack(stage, lane, codes);
        // Products of high bytes, of a high and a low byte, and of low bytes.
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
                u32 a[4] = {first.bytes(upper, 0), second.bytes(lower, 0), first.bytes(upper, 1),
                            second.bytes(lower, 1)};
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
                // Less than 2^7 2^7 2^7 2^8 + 2^22.
                float total = float(high[i][j] * 256 + middle[i][j]) * 256.0f;
                if (PLANES == 2) total += float(low[i][j]);
                out[i][j] += total * ((j < 2 ? lane.scale.x : lane.scale.y) * note);
            }
        }
    }
};

// Eight activations of a token's chunk as digits: value = (256 * high + low) * unit. Sixteen lanes hold a chunk.
struct Digits {
    Pair high, low;   // for one lane and step of a product, in the order of its codes
    int step, place;  // the indices of these
    float unit;       // NaN if a value is not finite

    MOEPACK_DEVICE explicit Digits(const float (&value)[8]) {
        int lane = threadIdx.x & 15;
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = most(largest, __float_as_uint(value[i]) & 0x7fffffff);
#pragma unroll
        for (int distance = 8; distance; distance /= 2)
            largest = most(largest, __shfl_xor_sync(~0u, largest, distance));
        Scale scale = scale_of(__uint_as_float(largest));
        unit = largest < 0x7f800000 ? scale.inverse * 2.0f : __uint_as_float(0x7fc00000);
        // At most 2^14, so both digits fit; adding 1.5 * 2^23 leaves the integer in the low bits.
        u32 bits[8], upper[2], lower[2];
#pragma unroll
        for (int i = 0; i < 8; ++i) bits[i] = __float_as_uint(__fmaf_rn(value[i], scale.factor * 0.5f, 12582912.0f));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32* four = bits + 4 * i;
            lower[i] = permute(permute(four[0], four[1], 0x0040), permute(four[2], four[3], 0x0040), 0x5410);
#pragma unroll
            for (int k = 0; k < 4; ++k) four[k] += 128;
            upper[i] = permute(permute(four[0], four[1], 0x0051), permute(four[2], four[3], 0x0051), 0x5410);
        }
        step = lane % 4, place = lane / 4;
        if (BITS != 2) {
            // A lane needs runs of four columns that are 16 columns apart: two lanes exchange one run each.
            bool second = lane & 2;
            u32 other_upper = __shfl_xor_sync(~0u, second ? upper[0] : upper[1], 2);
            u32 other_lower = __shfl_xor_sync(~0u, second ? lower[0] : lower[1], 2);
            if (second) upper[0] = other_upper, lower[0] = other_lower;
            else upper[1] = other_upper, lower[1] = other_lower;
            step = lane / 4, place = lane % 2 * 2 + second;
        }
        high = {permute(upper[0], upper[1], 0x5140), permute(upper[0], upper[1], 0x7362)};
        low = {permute(lower[0], lower[1], 0x5140), permute(lower[0], lower[1], 0x7362)};
    }
};

template <>
MOEPACK_DEVICE void write_cell<Codebook>(u8* cells, int token, int tokens, const float (&value)[8], float weight,
                                         bool exists) {
    Digits digits(value);
    if (!exists) return;
    Pair* to = reinterpret_cast<Pair*>(cells + (digits.step * tokens + token) * STEP_BYTES + digits.place * 16);
    to[0] = digits.high, to[1] = digits.low;
    float* notes = reinterpret_cast<float*>(cells + tokens * VALUE_BYTES);
    if ((threadIdx.x & 15) == 0) notes[token] = digits.unit * weight;
}

// ---------------------------------------------------------------- few tokens

// One token of a layer, or up to four of a linear layer, without routing. A token takes two columns of a product, one
// for each digit, so four tokens cost as much as one. A block processes a range of *units*: panels, or for `gated` each
// panel of each slot. Their chunks form one list, and each warp takes a range of it, so warps rarely change codebooks
// and the block synchronizes once. A warp copies codes to its own ring AHEAD chunks before they are used, starting
// before the activations are converted to digits, and prefetches codebooks to L2 at the same time. (Loads to registers
// cannot run ahead: they share one scoreboard, so waiting for the first waits for all.)
struct Few {
    Activations x;         // one row per slot, or per token of a linear layer; one row for `gated`
    const i64* index;      // the slots' experts; null: expert 0
    const float* weights;  // of the slots; null: 1
    float* out;
    int slots, tokens;     // a linear layer has one slot; otherwise there is one token
    int experts, rows, chunks;
    u32 by_chunks;         // 2^20 / chunks, rounded up
};

constexpr int FEW_WARPS = 16, FEW_THREADS = FEW_WARPS * WARP, AHEAD = 3;
constexpr int FEW_RING = (AHEAD + 1) * Codebook::CODES;  // bytes per warp

// The units of a block.
template <bool GATED>
struct FewUnits {
    static constexpr int WARPS = FEW_WARPS / (GATED + 1);  // per matrix

    const Few& few;
    int panels, first, count;
    int chunks, share;  // chunks per unit; chunks per warp

    MOEPACK_DEVICE explicit FewUnits(const Few& few)
        : few(few), panels(ceil_div(few.rows, PANEL)), chunks(GATED ? few.chunks : few.slots * few.chunks) {
        int units = panels * (GATED ? few.slots : 1), each = units / gridDim.x, more = units % gridDim.x;
        first = blockIdx.x * each + least<int>(blockIdx.x, more), count = each + (blockIdx.x < more);
        share = ceil_div(count * chunks, WARPS);
    }

    // The expert of a slot; negative if there is none.
    MOEPACK_DEVICE i64 expert_of(int slot) const {
        i64 expert = few.index ? few.index[slot] : 0;
        return expert < few.experts ? expert : -1;
    }

    // Places for sums: the warps of a matrix write those of their units side by side. `unit` is relative to the block.
    MOEPACK_DEVICE int places() const {
        return count + WARPS - 1;
    }

    MOEPACK_DEVICE int first_place(int unit) const {
        return unit + unit * chunks / share;
    }

    MOEPACK_DEVICE int last_place(int unit) const {
        return unit + ((unit + 1) * chunks - 1) / share;
    }
};

// A position in a warp's share: one chunk.
template <bool GATED>
struct FewPlace {
    int unit, slot, chunk;
    const u8* panel;  // null: the expert does not exist

    MOEPACK_DEVICE FewPlace(const FewUnits<GATED>& units, const Codebook::Matrix& matrix, int number) {
        unit = number / units.chunks;
        int in_unit = number - unit * units.chunks, in_slot = GATED ? 0 : in_unit / units.few.chunks;
        slot = in_slot, chunk = in_unit - in_slot * units.few.chunks;
        enter(units, matrix);
    }

    MOEPACK_DEVICE void enter(const FewUnits<GATED>& units, const Codebook::Matrix& matrix) {
        int number = units.first + unit;
        if (GATED) slot = number / units.panels, number -= slot * units.panels;
        i64 expert = unit < units.count ? units.expert_of(slot) : -1;
        panel = expert < 0 ? nullptr : matrix.data + (expert * units.panels + number) * matrix.panel_bytes;
    }

    // Advances to the next chunk.
    MOEPACK_DEVICE void advance(const FewUnits<GATED>& units, const Codebook::Matrix& matrix) {
        if (++chunk < units.few.chunks) return;
        chunk = 0;
        if (GATED || ++slot == units.few.slots) slot = 0, ++unit;
        enter(units, matrix);
    }

    // The parameters of its column block.
    MOEPACK_DEVICE const u8* parameters(const Codebook::Matrix& matrix) const {
        return panel + matrix.block_at(matrix.block_of(chunk));
    }
};

template <bool GATED>
struct FewTokens {
    const Few& few;
    const FewUnits<GATED>& units;
    Codebook::Matrix matrix;  // this warp's
    int warp, t, columns;     // columns of activations
    Codebook::Lane lane;
    u8* ring;                 // this warp's
    int turn = 0;             // the ring slot of the next chunk
    int at, end, asked;       // the warp's range in the block's list; the next chunk to copy
    FewPlace<GATED> here, ahead;
    const u8* known = nullptr;  // the last parameters prefetched
    float sum[2] = {0, 0};

    MOEPACK_DEVICE FewTokens(const Few& few, const FewUnits<GATED>& units, const Codebook::Matrix& first,
                             const Codebook::Matrix& second)
        : few(few), units(units), matrix(GATED && threadIdx.x >= FEW_THREADS / 2 ? second : first),
          warp(threadIdx.x / WARP % FewUnits<GATED>::WARPS), t(threadIdx.x % 4), columns(2 * few.tokens),
          lane(threadIdx.x % WARP), ring(shared_memory + threadIdx.x / WARP * FEW_RING),
          at(least(warp * units.share, units.count * units.chunks)),
          end(least(at + units.share, units.count * units.chunks)), asked(at), here(units, matrix, at), ahead(here) {
#pragma unroll 1
        for (int i = 0; i < AHEAD; ++i) fetch(i);
    }

    // Starts to copy the next codes to a part of the ring; bytes after the panel are zero.
    MOEPACK_DEVICE void fetch(int part) {
        if (ahead.panel && asked < end) {
            const u8* parameters = ahead.parameters(matrix);
            if (parameters != known && threadIdx.x % WARP * 32 < Codebook::PARAMETERS)
                prefetch(parameters + threadIdx.x % WARP * 32);
            known = parameters;
            int from = int(matrix.codes_at(ahead.chunk)) + threadIdx.x % WARP * 16;
            int left = int(matrix.panel_bytes) - from;
            Shared to = shared_address(ring + part * Codebook::CODES) + threadIdx.x % WARP * 16;
#pragma unroll
            for (int i = 0; i < ceil_div(Codebook::CODES, WARP * 16); ++i) {
                int more = i * WARP * 16;
                if (threadIdx.x % WARP * 16 + more >= Codebook::CODES) break;
                copy_async(to + more, ahead.panel + (more < left ? from + more : 0), more < left ? 16 : 0, KEEP);
            }
        }
        commit_copies();
        if (++asked < end) ahead.advance(units, matrix);
    }

    // cells: a Pair for each step, column and group of four lanes; notes: a float for each token of a chunk.
    MOEPACK_DEVICE void multiply(const u8* cells, const float* notes, float* sums) {
        int column = least(lane.row / 2, columns - 1), token = least(t, few.tokens - 1);
#pragma unroll 1
        while (at < end) {
            wait_copies<AHEAD - 1>();
            __syncwarp();
            fetch(turn == 0 ? AHEAD : turn - 1);
            const u8* codes = ring + turn * Codebook::CODES;
            turn = turn == AHEAD ? 0 : turn + 1;
            if (here.panel) {
                int cell = (GATED ? 0 : here.slot * few.chunks) + here.chunk;
                lane.enter(here.parameters(matrix));
                const Pair* x = reinterpret_cast<const Pair*>(cells) + (cell * 4 * columns + column) * 4 + t;
                add(codes, x, notes[cell * few.tokens + token]);
            }
            int unit = here.unit;
            here.advance(units, matrix);
            if (++at == end || here.unit != unit) give(sums, unit + warp);
        }
    }

    // Adds a chunk to the sums of rows 2 g and 2 g + 1 and of token t.
    MOEPACK_DEVICE void add(const u8* codes, const Pair* x, float note) {
        u32 step_codes[2][4];
        Codebook::unpack(codes, lane, step_codes);
        int sums[PLANES][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            Pair b = x[step * columns * 4];
            Selector<BITS> first(step_codes[0][step]), second(step_codes[1][step]);
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                const Table<BITS>&upper = lane.table[plane][0], &lower = lane.table[plane][1];
                multiply_add(sums[plane], first.bytes(upper, 0), second.bytes(lower, 0), first.bytes(upper, 1),
                             second.bytes(lower, 1), b.x, b.y);
            }
        }
        // Columns 2 t and 2 t + 1 are the digits of token t.
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            int high = sums[0][2 * row] * 256 + sums[0][2 * row + 1];
            if (PLANES == 2) high += sums[PLANES - 1][2 * row];
            float total = float(high) * 256.0f;
            if (PLANES == 2) total += float(sums[PLANES - 1][2 * row + 1]);
            sum[row] += total * ((row ? lane.scale.y : lane.scale.x) * note);
        }
    }

    // Writes this warp's sums to a place in `sums` [places][token][row], and clears them.
    MOEPACK_DEVICE void give(float* sums, int place) {
        if (GATED && threadIdx.x >= FEW_THREADS / 2) place += units.places();
        float2* to = reinterpret_cast<float2*>(sums + (place * few.tokens + t) * PANEL + lane.row);
        if (t < few.tokens) *to = {sum[0], sum[1]};
        sum[0] = sum[1] = 0;
    }
};

// Writes the outputs of a block's units from their sums in shared memory.
template <bool GATED>
MOEPACK_DEVICE void write_few(const Few& few, const FewUnits<GATED>& units, const float* sums) {
    int of_unit = few.tokens * PANEL;
    for (int item = threadIdx.x; item < units.count * of_unit; item += FEW_THREADS) {
        int unit = item / of_unit, place = item - unit * of_unit, number = units.first + unit;
        int slot = GATED ? number / units.panels : 0, row = (number - slot * units.panels) * PANEL + place % PANEL;
        if (row >= few.rows || (GATED && units.expert_of(slot) < 0)) continue;
        float total[2] = {0, 0};
        for (int matrix = 0; matrix <= GATED; ++matrix)
            for (int i = units.first_place(unit); i <= units.last_place(unit); ++i)
                total[matrix] += sums[(matrix * units.places() + i) * of_unit + place];
        if (GATED) total[0] = total[0] / (1.0f + __expf(-total[0])) * total[1];
        few.out[i64(GATED ? slot : place / PANEL) * few.rows + row] = total[0];
    }
}

// Converts all activations to digits: rows of x times chunks; `tokens` rows share the cell of a chunk.
template <bool GATED>
MOEPACK_DEVICE void stage(const Few& few, u8* cells, float* notes) {
    constexpr int BATCH = 4, STRIDE = FEW_THREADS / 16;
    int rows = GATED ? 1 : few.slots * few.tokens, columns = 2 * few.tokens;
    for (int base = threadIdx.x / WARP * 2; base < rows * few.chunks; base += BATCH * STRIDE) {
        u32 word[BATCH][8];
        int first = base + threadIdx.x / 16 % 2;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            int item = least(first + i * STRIDE, rows * few.chunks - 1), row = u32(item * few.by_chunks) >> 20;
            load_eight(few.x, row, (item - row * few.chunks) * CHUNK + threadIdx.x % 16 * 8, word[i]);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            int item = first + i * STRIDE, row = u32(item * few.by_chunks) >> 20;
            float value[8];
            to_floats(few.x.type, word[i], value);
            Digits digits(value);
            if (item >= rows * few.chunks) continue;
            int token = row % few.tokens, cell = row / few.tokens * few.chunks + item - row * few.chunks;
            int place = ((cell * 4 + digits.step) * columns + 2 * token) * 4 + digits.place;
            Pair* to = reinterpret_cast<Pair*>(cells) + place;
            to[0] = digits.high, to[4] = digits.low;
            float weight = few.weights ? few.weights[row] : 1.0f;
            if (threadIdx.x % 16 == 0) notes[cell * few.tokens + token] = digits.unit * weight;
        }
    }
}

template <bool GATED>
MOEPACK_DEVICE void run_few(const Few& few, const Codebook::Matrix& first, const Codebook::Matrix& second) {
    int cell_count = (GATED ? 1 : few.slots) * few.chunks;
    u8* cells = shared_memory + FEW_WARPS * FEW_RING;
    float* notes = reinterpret_cast<float*>(cells + cell_count * few.tokens * VALUE_BYTES);
    float* sums = notes + ceil_div(cell_count * few.tokens, 4) * 4;
    // The first codes of a linear layer are known before the preceding launch has ended.
    if (few.index) enter_launch();
    FewUnits<GATED> units(few);
    FewTokens<GATED> tokens(few, units, first, second);
    if (!few.index) enter_launch();
    stage<GATED>(few, cells, notes);
    __syncthreads();
    tokens.multiply(cells, notes, sums);
    __syncthreads();
    write_few<GATED>(few, units, sums);
}

}  // namespace moepack

using namespace moepack;

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1)
    gated_few(Few few, Codebook::Matrix gate, Codebook::Matrix up) {
    run_few<true>(few, gate, up);
}

extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1) combine_few(Few few, Codebook::Matrix matrix) {
    run_few<false>(few, matrix, matrix);
}

// Rotates each row of x by a Hadamard matrix of `width` columns (1: no rotation) and rounds it to `bits` bits (0: no
// rounding). With `steps`, rounded rows are integers in units of these steps.
extern "C" __global__ void prepare_tokens(Activations x, int width, int bits, float* out, float* steps) {
    enter_launch();
    int row = blockIdx.x;
    float* to = out + i64(row) * x.columns;
    float low = 0, high = 0, odd = 0;
    auto see = [&](float value) {
        low = fmaxf(low, -value), high = fmaxf(high, value);
        if (!(fabsf(value) < __uint_as_float(0x7f800000))) odd = 1;
    };
    if (width > 1) {
        auto value = [&](int column) { return activation(x, i64(row) * x.columns + column); };
        rotate_row(x.columns, width, value, [&](int column, float value) { to[column] = value, see(value); });
    } else {
        for_each_eight(x, row, [&](int, const float(&value)[8]) {
#pragma unroll
            for (int i = 0; i < 8; ++i) see(value[i]);
        });
    }
    if (bits == 0) return;
    Grid grid(block_largest(low), block_largest(high), bits);
    bool finite = block_largest(odd) == 0 && grid.step < __uint_as_float(0x7f800000);
    float none = __uint_as_float(0x7fc00000), unit = steps ? 1.0f : grid.step;
    if (steps && threadIdx.x == 0) steps[row] = grid.step;
    auto rounded = [&](float value) { return finite ? unit * grid.steps(value) : none; };
    if (width > 1) {
        for (int i = threadIdx.x; i < x.columns; i += blockDim.x) to[i] = rounded(to[i]);
    } else {
        for_each_eight(x, row, [&](int column, float(&value)[8]) {
#pragma unroll
            for (int i = 0; i < 8; ++i) value[i] = rounded(value[i]);
            store_eight(to, column, value, 8, true, true);
        });
    }
}

// A row of a matrix, numbered over all experts.
struct CodebookRow {
    const Codebook::Matrix& matrix;
    const u8* panel;
    int place;

    MOEPACK_DEVICE CodebookRow(const Codebook::Matrix& matrix, int rows, i64 row) : matrix(matrix) {
        i64 expert = row / rows;
        int in_expert = int(row - expert * rows);
        panel = matrix.data + (expert * ceil_div(rows, PANEL) + in_expert / PANEL) * matrix.panel_bytes;
        place = in_expert % PANEL;
    }

    MOEPACK_DEVICE float value(int column) const {
        int chunk = column / CHUNK, block = matrix.block_of(chunk);
        const u8 *codes = panel + matrix.codes_at(chunk), *books = panel + matrix.block_at(block);
        u32 code = code_of<BITS>(codes, place, column % CHUNK);
        int centroid = static_cast<signed char>(books[place * Codebook::ENTRIES + code]) * 256;
        if (PLANES == 2) centroid += static_cast<signed char>(books[(PANEL + place) * Codebook::ENTRIES + code]);
        const float* scales = reinterpret_cast<const float*>(books + PLANES * PANEL * Codebook::ENTRIES);
        return __fmul_rn(scales[place], float(centroid));
    }
};

// Writes 32 columns of a chunk: those that lane t of four takes for products, four neighboring ones at a time.
MOEPACK_DEVICE void store_codes(const CodebookRow& row, int chunk, int t, int columns, int wide, i64 at, void* out) {
    const u8* books = row.panel + row.matrix.block_at(row.matrix.block_of(chunk));
    const u8 *high = books + row.place * Codebook::ENTRIES, *low = high + PANEL * Codebook::ENTRIES;
    float scale = reinterpret_cast<const float*>(books + PLANES * PANEL * Codebook::ENTRIES)[row.place];
    u32 step[4];
    codes_of<BITS>(row.panel + row.matrix.codes_at(chunk), row.place, t, step);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int column = chunk * CHUNK + (BITS == 2 ? t * 32 + i * 4 : i * 16 + t * 4);
        float value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 code = step[i / 2] >> (8 * j + i % 2 * 4) & (Codebook::ENTRIES - 1);
            int centroid = static_cast<signed char>(high[code]) * 256;
            if (PLANES == 2) centroid += static_cast<signed char>(low[code]);
            value[j] = __fmul_rn(scale, float(centroid));
        }
        if (columns % 4 == 0 && column < columns && wide) {
            *reinterpret_cast<float4*>(static_cast<float*>(out) + at + column) = {value[0], value[1], value[2], value[3]};
        } else if (columns % 4 == 0 && column < columns) {
            Pair pair = {to_bf16x2(value[0], value[1]), to_bf16x2(value[2], value[3])};
            *reinterpret_cast<Pair*>(static_cast<u16*>(out) + at + column) = pair;
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (column + j < columns) store_value(out, at + column + j, value[j], wide);
        }
    }
}

// Decodes `count` rows, numbered over all experts, starting at `first`, and reverses the rotation by matrices of
// `width`. A block rotates a row at a time; without a rotation, a thread decodes 32 columns.
extern "C" __global__ void dequantize(Codebook::Matrix matrix, i64 first, i64 count, int rows, int columns, int width,
                                      int wide, void* out) {
    if (width > 1) {
        for (i64 i = blockIdx.x; i < count; i += gridDim.x) {
            CodebookRow row(matrix, rows, first + i);
            auto use = [&](int column, float value) { store_value(out, i * columns + column, value, wide); };
            rotate_row(columns, width, [&](int column) { return row.value(column); }, use);
        }
        return;
    }
    int parts = ceil_div(columns, CHUNK) * 4;
    for (i64 item = i64(blockIdx.x) * blockDim.x + threadIdx.x; item < count * parts; item += i64(gridDim.x) * blockDim.x) {
        i64 i = item / parts;
        int part = int(item - i * parts);
        store_codes(CodebookRow(matrix, rows, first + i), part / 4, part % 4, columns, wide, i * columns, out);
    }
}

MOEPACK_LAYER_KERNELS(Codebook)
