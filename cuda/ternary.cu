// Products with ternary weights, read in packed form, well below one bit per weight (docs/format.md, section 5).
//
// A group of LANES lanes multiplies a row. A lane decodes 8 codes at once by table lookups in shared memory (FSV8) or
// global memory (dict16). For each non-zero weight it reads one activation from shared memory, where activations are
// float32 with the TOKENS of a tile side by side. A side table, created once per matrix (`find_columns`), has the
// column of every 32nd code. Four lanes share such a chunk, and two shuffles give each the column of its first code, so
// there is no serial chain. Chunks are aligned to 32 codes of the payload, regardless of rows, so that loads are
// aligned. Codes of the previous row are replaced by zeros. Those of the next row are decoded normally: their columns
// are outside of the row, where PAD zeros are.
//
// Launch: one block of THREADS per multiprocessor. `gated`: a block takes a range of (tile, row), and computes gate and
// up of each row in turn. `combine` (and a linear layer): a block owns rows and multiplies them by all tiles. The
// products of a token are added at the end in slot order, so sums are deterministic without atomics. Results are within
// (non-zeros / 16 + 12) 2^-24 sum |level x|, where level is the larger of the row's two.
//
// Bounds: FSV8 at 88.5 % zeros has 12.5 weights per code: reads are 0.64 bits per weight, 0.04 of them columns, and 16
// bytes per row. Memory bandwidth would allow 40 * 10^12 weights/s; the limit is work: a code takes about 19
// instructions and, including the conflicts of 32 lanes with random lookups and gathers, ten cycles of shared memory
// per warp. An H100 multiplies 7 * 10^12 weights/s for 64 matrices of 2080 x 6144 in a launch. A single small matrix
// takes as long as the work before its first code.
//
// Addresses stay within the pads for any codes: a lane's first column is clamped, and lengths are bounded.
//
// Definitions: DICT16 0 or 1; TOKENS 1 or 4; LANES 8, 16 or 32; THREADS per block; GLOBAL 1 if activations do not fit
// into shared memory.
#include "common/ptx.cuh"
#include "common/routing.cuh"
#include "ternary_rows.cuh"

// ---------------------------------------------------------------- activations

MOEPACK_DEVICE float value(const Activations& x, u64 at) {
    if (x.type == Type::f32) return static_cast<const float*>(x.data)[at];
    u16 bits = static_cast<const u16*>(x.data)[at];
    return x.type == Type::bf16 ? bf16_value(bits) : half_value(bits);
}

// Four neighboring values; rows must be aligned to multiples of four.
MOEPACK_DEVICE void values(const Activations& x, u64 at, float (&out)[4]) {
    if (x.type == Type::f32) {
        float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(x.data) + at);
        out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
        return;
    }
    Pair four = *reinterpret_cast<const Pair*>(static_cast<const u16*>(x.data) + at);
    u16 bits[4] = {u16(four.x), u16(four.x >> 16), u16(four.y), u16(four.y >> 16)};
    for (int i = 0; i < 4; ++i) out[i] = x.type == Type::bf16 ? bf16_value(bits[i]) : half_value(bits[i]);
}

// The tokens of a tile, as an accumulator for a row of weights.
struct Tokens {
    static constexpr int STEP = GLOBAL ? 1 : 4 * TOKENS;  // per column
    u32 origin;  // column 0 in shared memory
    Activations x;
    u64 start[TOKENS];  // the tokens' first values, if they stay in global memory
    Levels levels;
    float sum[TOKENS];

    MOEPACK_DEVICE u32 address(int column) const {
        return GLOBAL ? u32(column) : origin + column * STEP;
    }
    MOEPACK_DEVICE void add(u32 at, u32 kind) {
        // Lanes without a weight do not access memory, which reduces bank conflicts.
        if ((kind & 0xc0000000) == 0) return;
        float factor = weight(kind, levels);
        if constexpr (GLOBAL) {
            if (at >= u32(x.columns)) return;
            for (int i = 0; i < TOKENS; ++i) sum[i] = fmaf(factor, value(x, start[i] + at), sum[i]);
        } else if constexpr (TOKENS == 1) {
            sum[0] = fmaf(factor, *reinterpret_cast<const float*>(memory + at), sum[0]);
        } else {
            float4 four = *reinterpret_cast<const float4*>(memory + at);
            sum[0] = fmaf(factor, four.x, sum[0]), sum[1] = fmaf(factor, four.y, sum[1]);
            sum[2] = fmaf(factor, four.z, sum[2]), sum[3] = fmaf(factor, four.w, sum[3]);
        }
    }
    // Adds up the sums of a group's lanes.
    MOEPACK_DEVICE void gather() {
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2)
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) sum[i] += __shfl_xor_sync(ALL, sum[i], distance);
    }
};

// The activations and routing of a launch: slot s uses row s / shared of x.
struct Launch {
    Activations x;
    const i64* index;  // experts of the slots; null: expert 0
    int slots;
    int shared;        // slots that share activations
};

MOEPACK_DEVICE u32 row_of(const Launch& launch, const Routing& routing, const Tile& tile, int i) {
    return routing.order[tile.start + i] / launch.shared;
}

// Copies a tile's activations to column 0 at `origin`, with pads on both sides; missing tokens of a tile are zeros.
MOEPACK_DEVICE void stage(const Launch& launch, const Routing& routing, const Tile& tile, u32 origin, int pad) {
    float* to = reinterpret_cast<float*>(memory + origin);
    int columns = launch.x.columns;
#pragma unroll 1
    for (int i = threadIdx.x; i < pad * TOKENS; i += THREADS) to[i - pad * TOKENS] = to[columns * TOKENS + i] = 0;
    bool aligned = columns % 4 == 0 && reinterpret_cast<u64>(launch.x.data) % 16 == 0;
#pragma unroll 1
    for (int token = 0; token < TOKENS; ++token) {
        u64 start = u64(token < tile.tokens ? row_of(launch, routing, tile, token) : 0) * columns;
        bool exists = token < tile.tokens;
#pragma unroll 2
        for (int i = threadIdx.x; aligned && i < columns / 4; i += THREADS) {
            float four[4] = {};
            if (exists) values(launch.x, start + 4 * i, four);
            for (int k = 0; k < 4; ++k) to[(4 * i + k) * TOKENS + token] = four[k];
        }
#pragma unroll 1
        for (int i = threadIdx.x; !aligned && i < columns; i += THREADS)
            to[i * TOKENS + token] = exists ? value(launch.x, start + i) : 0;
    }
}

// Bytes of a tile including the pad before it; adjacent tiles share pads.
MOEPACK_DEVICE u32 tile_bytes(const Matrix& matrix) {
    return (matrix.pad + matrix.columns) * 4 * TOKENS + 15 & ~15u;
}

// Starts to copy tables to shared memory.
MOEPACK_DEVICE void copy_tables(const Matrix& matrix, u32 to) {
    const u8* from = reinterpret_cast<const u8*>(matrix.table);
#pragma unroll 1
    for (u32 i = threadIdx.x * 16; i < matrix.dictionaries * TABLE_BYTES; i += blockDim.x * 16)
        copy_kept(shared_address(memory + to + i), from + i);
}

MOEPACK_DEVICE void wait_tables() {
    commit_copies();
    wait_copies<0>();
}

MOEPACK_DEVICE Tokens tokens_of(const Launch& launch, const Routing& routing, const Tile& tile, u32 origin) {
    Tokens tokens = {};
    tokens.origin = origin;
    if constexpr (GLOBAL) {
        tokens.x = launch.x;
        for (int i = 0; i < tile.tokens; ++i)
            tokens.start[i] = u64(row_of(launch, routing, tile, i)) * launch.x.columns;
    }
    return tokens;
}

// ---------------------------------------------------------------- rows in turn

MOEPACK_DEVICE bool leads() {
    return threadIdx.x % LANES == 0;
}

MOEPACK_DEVICE int group() {
    return threadIdx.x / LANES;
}

// A row to be multiplied: row `at` of a block, in a part: gate (0) or up projection (1), or a tile.
struct Task {
    Quad bits;
    int at, part;
    bool exists;

    // The row, with length 0 after the last one. The bits are first read here, so no earlier code waits for the load.
    MOEPACK_DEVICE Row row() const {
        return {bits.x, exists ? bits.y : 0, __uint_as_float(bits.z), __uint_as_float(bits.w)};
    }
};

// Iterates over the rows of a group of lanes: all parts of each row, or part by part.
template <bool BY_PART>
struct Cursor {
    int at, end, part, parts;

    MOEPACK_DEVICE Cursor(int end, int parts) : at(group()), end(end), part(0), parts(parts) {
        wrap();
    }

    MOEPACK_DEVICE void wrap() {
#pragma unroll 1
        while (BY_PART && at >= end) at -= end, ++part;
    }

    MOEPACK_DEVICE bool exists() const {
        return BY_PART ? part < parts : at < end;
    }

    // The next row; find(at, part) returns its address.
    template <class Find>
    MOEPACK_DEVICE Task take(Find find) {
        Task task = {load_quad(find(least(at, end - 1), least(part, parts - 1))), at, part, exists()};
        if (BY_PART) at += GROUPS, wrap();
        else if (++part == parts) part = 0, at += GROUPS;
        return task;
    }
};

MOEPACK_DEVICE u32 first_code(const Row& row) {
    return row.start / CHUNK * CHUNK + threadIdx.x % LANES * CODES;
}

// Processes a cursor's rows: while one is multiplied, the codes of the next and the entry of the one after are loaded.
template <bool BY_PART>
struct Pipeline {
    Cursor<BY_PART> cursor;
    Task task, ahead;

    template <class Find>
    MOEPACK_DEVICE Pipeline(Cursor<BY_PART> from, Find find)
        : cursor(from), task(cursor.take(find)), ahead(cursor.take(find)) {}

    static MOEPACK_DEVICE Codes fetch_first(const Matrix& matrix, const Task& of) {
        Row row = of.row();
        return fetch(matrix, row, first_code(row));
    }

    // matrix(part) returns a matrix; use(task, row, codes) multiplies. `codes` are the first codes of the first row.
    template <class Find, class Of, class Use>
    MOEPACK_DEVICE void run(Codes codes, Find find, Of matrix, Use use) {
        while (__any_sync(ALL, task.exists)) {
            Task later = cursor.take(find);
            Codes next = fetch_first(matrix(ahead.part), ahead);
            use(task, task.row(), codes);
            task = ahead, ahead = later, codes = next;
        }
    }
};

// ---------------------------------------------------------------- launches

// Builds the routing of a launch; in a linear layer, whose slots are in order, this takes one barrier.
MOEPACK_DEVICE void route(Routing& routing, const Launch& launch, int experts) {
    if (launch.index) return build_routing<TOKENS>(routing, launch.index, launch.slots, experts);
    int tiles = ceil_div(launch.slots, TOKENS);
    for (int i = threadIdx.x; i < launch.slots; i += THREADS) {
        routing.order[i] = u16(i);
        if (i < tiles) routing.tile[i] = {0, u16(i * TOKENS), u16(least(TOKENS, launch.slots - i * TOKENS))};
    }
    if (threadIdx.x == 0) routing.slots = launch.slots, routing.tiles = tiles;
    __syncthreads();
}

// The first row of a block when rows are divided among blocks.
MOEPACK_DEVICE u32 share(u32 rows, u32 block) {
    return rows / gridDim.x * block + least(block, rows % gridDim.x);
}

// hidden[slot] = silu(gate x) * (up x).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gated(const Matrix gate, const Matrix up, const Launch launch, float* hidden) {
    __shared__ Routing routing;
    __shared__ Matrix matrices[2];
    if (threadIdx.x == 0) matrices[0] = gate, matrices[1] = up;
    u32 second = gate.dictionaries * TABLE_BYTES;
    u32 origin = second + up.dictionaries * TABLE_BYTES + gate.pad * 4 * TOKENS;
    copy_tables(gate, 0);
    copy_tables(up, second);
    route(routing, launch, gate.experts);
    u32 rows = routing.tiles * gate.rows, begin = share(rows, blockIdx.x), end = share(rows, blockIdx.x + 1);
    auto of = [&](int part) -> const Matrix& { return matrices[part]; };
    u32 staged = ~0u;
    for (u32 at = begin; at < end;) {
        int number = at / gate.rows, first = at % gate.rows, last = least<u32>(gate.rows, first + end - at);
        const Tile tile = routing.tile[number];
        auto find = [&](int at, int part) { return matrices[part].row + u64(tile.expert) * gate.rows + first + at; };
        Pipeline<false> pipeline({last - first, 2}, find);
        // With one token per tile, adjacent tiles often have the same token.
        u32 token = TOKENS == 1 ? row_of(launch, routing, tile, 0) : u32(number);
        bool stale = !GLOBAL && token != staged;
        if (stale && staged != ~0u) __syncthreads();
        if (stale) stage(launch, routing, tile, origin, gate.pad);
        Codes codes = pipeline.fetch_first(matrices[0], pipeline.task);
        wait_tables();
        if (stale || staged == ~0u) __syncthreads();
        staged = token;
        float gates[TOKENS];
        pipeline.run(codes, find, of, [&](const Task& task, const Row& row, const Codes& codes) {
            Tokens tokens = tokens_of(launch, routing, tile, origin);
            tokens.levels = levels(row.first, row.second);
            walk(matrices[task.part], task.part ? second : 0, row, codes, tokens);
            tokens.gather();
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                if (task.part == 0) gates[i] = tokens.sum[i];
                if (task.part == 1 && leads() && task.exists && i < tile.tokens)
                    hidden[u64(routing.order[tile.start + i]) * gate.rows + first + task.at] =
                        gates[i] / (1 + __expf(-gates[i])) * tokens.sum[i];
            }
        });
        at += last - first;
    }
}

// out[slot / each] = the sum of weights[slot] * (down x[slot]), where each slot has its own x; weights may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    combine(const Matrix down, const Launch launch, const float* weights, int each, int staged, float* out) {
    __shared__ Routing routing;
    __shared__ Matrix matrix;
    if (threadIdx.x == 0) matrix = down;
    int first = share(down.rows, blockIdx.x), rows = int(share(down.rows, blockIdx.x + 1)) - first;
    u32 size = tile_bytes(down), origin = down.dictionaries * TABLE_BYTES;
    copy_tables(down, 0);
    route(routing, launch, down.experts);
    // Products of slots are written directly to the output if `each` is 1, otherwise to shared memory.
    u32 behind_tiles = origin + (GLOBAL ? 0 : staged * size + down.pad * 4 * TOKENS);
    float* products = each == 1 ? out + first : reinterpret_cast<float*>(memory + behind_tiles);
    u32 stride = each == 1 ? down.rows : rows;
    if (routing.slots < launch.slots)
        for (int i = threadIdx.x; i < rows * launch.slots; i += THREADS) products[i / rows * stride + i % rows] = 0;
    auto of = [&](int) -> const Matrix& { return matrix; };
    for (int base = 0; base < routing.tiles && rows > 0; base += staged) {
        int count = least(staged, routing.tiles - base);
        auto find = [&](int at, int part) {
            return matrix.row + u64(routing.tile[base + part].expert) * matrix.rows + first + at;
        };
        Pipeline<true> pipeline({rows, count}, find);
        if (base > 0) __syncthreads();
        for (int i = 0; !GLOBAL && i < count; ++i)
            stage(launch, routing, routing.tile[base + i], origin + i * size + down.pad * 4 * TOKENS, down.pad);
        Codes codes = pipeline.fetch_first(matrix, pipeline.task);
        wait_tables();
        __syncthreads();
        pipeline.run(codes, find, of, [&](const Task& task, const Row& row, const Codes& codes) {
            int number = least(task.part, count - 1);
            const Tile tile = routing.tile[base + number];
            Tokens tokens = tokens_of(launch, routing, tile, origin + number * size + down.pad * 4 * TOKENS);
            tokens.levels = levels(row.first, row.second);
            walk(matrix, 0, row, codes, tokens);
            tokens.gather();
            if (!leads() || !task.exists) return;
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                if (i >= tile.tokens) break;
                u32 slot = routing.order[tile.start + i];
                products[slot * stride + task.at] = (weights ? weights[slot] : 1) * tokens.sum[i];
            }
        });
    }
    if (each == 1) return;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * (launch.slots / each); i += THREADS) {
        float sum = 0;
#pragma unroll 2
        for (int slot = i / rows * each; slot < (i / rows + 1) * each; ++slot) sum += products[slot * rows + i % rows];
        out[u64(i / rows) * down.rows + first + i % rows] = sum;
    }
}

// Writes a row's non-zero weights as bf16 to a zeroed row.
struct Writer {
    static constexpr int STEP = 1;
    u16* out;
    int columns;
    u32 first, second;

    MOEPACK_DEVICE u32 address(int column) const {
        return column;
    }
    MOEPACK_DEVICE void add(u32 column, u32 kind) {
        if (kind >> 30 != 0 && column < u32(columns)) out[column] = u16(kind >> 31 ? first : second);
    }
};

// Zeroes a row of a group of lanes, or copies one; rows that are multiples of 16 bytes use whole words.
MOEPACK_DEVICE void copy_row(u16* to, const u16* from, int columns) {
    int lane = threadIdx.x % LANES;
    bool words = columns % 8 == 0;
    for (int i = lane; words && i < columns / 8; i += LANES)
        reinterpret_cast<Quad*>(to)[i] = from ? reinterpret_cast<const Quad*>(from)[i] : Quad{};
    for (int i = lane; !words && i < columns; i += LANES) to[i] = from ? from[i] : 0;
}

// Decodes `experts` experts, starting at `from`. Each group of lanes assembles a row in shared memory (GLOBAL: in
// place), because two-byte stores cost the L2 as much as 32-byte stores.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dequantize(const Matrix matrix, int from, int experts, u16* out) {
    copy_tables(matrix, 0);
    wait_tables();
    __syncthreads();
    u16* rows_here = reinterpret_cast<u16*>(memory + matrix.dictionaries * TABLE_BYTES);
    int groups = blockDim.x / LANES;
    i64 rows = i64(experts) * matrix.rows;
    for (i64 base = i64(blockIdx.x) * groups; base < rows; base += i64(gridDim.x) * groups) {
        i64 number = base + group();
        Row row = {};
        if (number < rows) row = matrix.row[i64(from) * matrix.rows + number];
        Codes codes = fetch(matrix, row, first_code(row));
        u16 *place = out + number * matrix.columns, *buffer = rows_here + group() * (matrix.columns + 7 & ~7);
        if (GLOBAL) buffer = place;
        if (!GLOBAL || number < rows) copy_row(buffer, nullptr, matrix.columns);
        __syncwarp();
        Writer writer = {buffer, matrix.columns, to_bf16x2(row.first, 0), to_bf16x2(row.second, 0)};
        walk(matrix, 0, row, codes, writer);
        __syncwarp();
        if (!GLOBAL && number < rows) copy_row(place, buffer, matrix.columns);
        __syncwarp();
    }
}

// ---------------------------------------------------------------- tables, once per matrix

// The sections of a tensor.
struct Tensor {
    const u8* levels;
    const u8* index;
    const u64* starts;
    int experts, rows, columns;
    int level_type;  // 0 bf16, 1 f16, 2 f32
    int symmetric;   // only the positive level of a row is stored
    int wide;        // FSV8: index entries have 32 bits
    u32 three_slots; // FSV8: one bit per dictionary
};

MOEPACK_DEVICE float level(const Tensor& tensor, u64 at) {
    if (tensor.level_type == 2) return reinterpret_cast<const float*>(tensor.levels)[at];
    u16 bits = reinterpret_cast<const u16*>(tensor.levels)[at];
    return tensor.level_type == 0 ? bf16_value(bits) : half_value(bits);
}

MOEPACK_DEVICE Row make_row(const Tensor& tensor, u64 number, u32 start, u32 length, bool swapped) {
    float negative = tensor.symmetric ? -level(tensor, number) : level(tensor, 2 * number);
    float positive = level(tensor, tensor.symmetric ? number : 2 * number + 1);
    return {start, length, swapped ? positive : negative, swapped ? negative : positive};
}

// Creates the rows of groups of 64 (FSV8), or single rows.
extern "C" __global__ void find_rows(const Tensor tensor, Row* rows) {
    i64 number = i64(blockIdx.x) * blockDim.x + threadIdx.x;
#if DICT16
    if (number >= i64(tensor.experts) * tensor.rows) return;
    i64 expert = number / tensor.rows;
    const u32* index = reinterpret_cast<const u32*>(tensor.index);
    u64 base = tensor.starts[expert], start = base + index[number];
    u64 end = number + 1 < (expert + 1) * tensor.rows ? base + index[number + 1] : tensor.starts[expert + 1];
    rows[number] = make_row(tensor, number, u32(start), u32(end - start), false);
#else
    constexpr int STORED = 64;
    i64 groups = ceil_div(tensor.rows, STORED), expert = number / groups;
    if (number >= tensor.experts * groups) return;
    u32 start = u32(tensor.starts[number]);
    int shift = tensor.wide ? 28 : 12;
    for (int row = int(number % groups) * STORED, end = least(row + STORED, tensor.rows); row < end; ++row) {
        i64 at = expert * tensor.rows + row;
        u32 entry = tensor.wide ? reinterpret_cast<const u32*>(tensor.index)[at]
                                : reinterpret_cast<const u16*>(tensor.index)[at];
        u32 codes = entry & (1u << shift) - 1, field = entry >> shift, dictionary = field & 7;
        u32 slots = tensor.three_slots >> dictionary & 1;
        rows[at] = make_row(tensor, at, start, codes | dictionary << 28 | slots << 31, field >> 3);
        start += codes;
    }
#endif
}

// Writes the column of every 32nd code that is not the first of its row; one thread per row.
extern "C" __global__ void find_columns(const Matrix matrix, u16* columns) {
    i64 number = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (number >= i64(matrix.experts) * matrix.rows) return;
    Row row = matrix.row[number];
    if (is_raw(matrix, row)) return;
    const u32* table = matrix.table + (DICT16 ? 0 : (row.length >> 28 & 7) * (TABLE_BYTES / 4));
    u32 at = 0, previous = 0;
    for (u32 code = row.start; code < row.start + length(row); ++code) {
        if (code % CHUNK == 0) columns[code / CHUNK] = u16(at);
        u32 next = DICT16 ? reinterpret_cast<const u16*>(matrix.payload)[code] : matrix.payload[code];
        at += table[DICT16 ? next : next << 3 | previous >> 5] >> 16 & 255;
        previous = next;
    }
}
