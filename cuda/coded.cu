// Coded integers: entropy-coded codes in units of a step per row or per tensor (docs/format.md, section 9).
//
// Layout: a rearrangement of the bytes on disk, made during upload (rust/core, formats/coded/device). Row blocks are
// cut into column segments, which warps decode independently, and segments into chunks of 256 columns, whose records
// contain the bytes of each of the 64 lanes. The symbols of a lane are decoded in the order of operand A of m16n8k16,
// as f16 values of 2^-24 symbol. The integer of symbol 0 times the sum of the activations is added at the end.
// Dependent codes are 2 half - 127, with halves in place of symbols.
//
// Arithmetic: weights are exact. Activations are rounded to f16 with a power-of-two scale per token. This preserves
// bfloat16 and float16, except values 2^29 times smaller than the token's largest, and 11 bits of float32. Sums are
// float32. If columns have scales, a preceding launch multiplies activations by them in float32 (`scale_columns`),
// because decoding kernels have no registers to spare.
//
// Launch: one block per SM, with as many warps as have room for two records each. A block has its own *tasks*, which
// are row blocks of a tile of tokens (`combine`: of all tiles), and divides their segments among its warps: *units*.
// The warps' sums are collected in shared memory and added in segment order. Each block lays out activations as
// operands B in shared memory; if there are many, a preceding launch does (`lay_out_tokens`, `lay_out_hidden`). Records
// are copied to shared memory one ahead of the record being decoded (coded_ring.cuh).
//
// Bounds: instructions. 4096 x 14336 weights of 3 bits and one token take 35 us on an H100: 2 until tables and first
// records are in flight, 2.5 until activations are operands, 1 for outputs; most of the rest is decoding. Decoding
// takes 9 instructions per symbol and warp (sm_90a), 3.4 of them on the integer pipe and 3.6 on the multiply pipe, each
// of which takes two cycles for a warp's instruction, and about 110 per chunk. A scheduler has 3,584 symbols, and
// issues about 0.7 instructions per cycle. Reading the bytes would take 8 us. If blocks get only one or two row blocks
// of few segments, most of their warps are idle: 2080 x 6144 take 19 us with segments of 1,024 columns, and 13 with
// 512.
//
// Layers with many tokens (MANY): a launch of their own sorts the tokens by expert (`route`), and another lays out the
// activations. A warp multiplies all segments of a row block, so that no sums are shared; `gate_slots` and `add_slots`
// combine the outputs. Up to 24 tokens per expert take 1.2 to 1.5 times as long as decoding alone.
//
// Definitions: TOKENS (most per tile: 1, 8, 16 or 32), MOST_THREADS, DEPENDENT (1: matrices may have dependent codes),
// MANY (1: a preceding launch sorts the tokens).
#include "coded_ring.cuh"
#include "coded_rows.cuh"

namespace moepack {

constexpr int UNROLLED = 4;  // unrolled groups of the decoding loop

#if defined(__CUDACC__)
// The inclusive prefix sum of the lanes' values.
MOEPACK_DEVICE u32 sum_to(u32 value) {
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2)
        asm volatile("{.reg .pred p; .reg .u32 other; shfl.sync.up.b32 other|p, %0, %1, 0, -1;"
                     "@p add.u32 %0, %0, other;}"
                     : "+r"(value)
                     : "r"(distance));
    return value;
}

// Starts a chunk: reads states at the start of a segment, and locates the bytes of the thread's lanes.
MOEPACK_DEVICE void enter_chunk(Lanes<DEPENDENT>& lanes, const u8* record, bool begins, bool dependent) {
    int lane = threadIdx.x % WARP;
    if (begins) {
        const u16* states = reinterpret_cast<const u16*>(record);
        lanes.chain[0].state = ONE | states[lane], lanes.chain[1].state = ONE | states[WARP + lane];
        record += STATES_BYTES;
        if (DEPENDENT) lanes.paths.enter(dependent ? record[lane] : 0);
        if (DEPENDENT && dependent) record += PATHS_BYTES;
    }
    u32 counts = record[lane] | u32(record[WARP + lane]) << 16, sum = sum_to(counts);
    u32 total = __shfl_sync(~0u, sum, WARP - 1) & 0xffff, before = sum - counts;
    lanes.enter(shared_address(record + CODED_LANES), {before & 0xffff, total + (before >> 16)});
}

// Sums of a row block and a tile: rows g and g + 8, tokens 8 i + 2 t and 8 i + 2 t + 1.
template <int N>
struct Sums {
    float of[N][4];

    MOEPACK_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < N; ++i) of[i][0] = of[i][1] = of[i][2] = of[i][3] = 0;
    }

    MOEPACK_DEVICE void add(const u32 (&a)[4], const Pair (&b)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) multiply_add(of[i], a[0], a[1], a[2], a[3], b[i].x, b[i].y);
    }
};

// Operands B of a tile, starting at a segment: those of its tokens side by side, or those of a single shared token.
struct Operands {
    const u8* first;
    int tokens;

    MOEPACK_DEVICE int token(int wanted) const {
        return least(wanted, tokens - 1);
    }
};

// The work of a warp: its units, in order.
template <Mode MODE, int N>
struct CodedWarp {
    const CodedProblem& problem;
    const Work<MODE>& work;
    const CodedMatrix &first, &second;
    const Tables& tables;
    const float2* own_notes;
    int step, lane = threadIdx.x % WARP;
    int next_unit, left = 0, next_matrix = 0;  // the next lookup: a unit, or the remaining chunks of the last segment
    u32 next_chunk = 0;
    Ring ring;

    MOEPACK_DEVICE CodedWarp(const CodedProblem& problem, const Work<MODE>& work, const CodedMatrix& first,
                             const CodedMatrix& second, const Tables& tables, const float2* own_notes)
        : problem(problem), work(work), first(first), second(second), tables(tables), own_notes(own_notes),
          step(blockDim.x / WARP), next_unit(threadIdx.x / WARP), ring(Areas(problem).rings, problem.stage) {
        look_up();
    }

    // Copies field by field: taking the address of a kernel argument would move the whole argument to local memory.
    MOEPACK_DEVICE CodedMatrix matrix(int number) const {
        if (MODE != Mode::gated) return first;
        bool other = number == 1;
        return {other ? second.scales : first.scales,           other ? second.tables : first.tables,
                other ? second.blocks : first.blocks,           other ? second.starts : first.starts,
                other ? second.firsts : first.firsts,           other ? second.corrections : first.corrections,
                other ? second.records : first.records,         other ? second.row_scales : first.row_scales,
                other ? second.table_count : first.table_count};
    }

    // The index of a unit's row block over all experts.
    MOEPACK_DEVICE int block_of(const CodedUnit& unit) const {
        return work.routing.tile_at(unit.tile).expert * int(problem.blocks.by) + unit.block;
    }

    // The layout's entry for a unit's row block.
    MOEPACK_DEVICE BlockNote note_of(const CodedUnit& unit) const {
        return {__ldg(matrix(unit.second).blocks + block_of(unit))};
    }

    // The number of chunks in a unit.
    MOEPACK_DEVICE int chunks_of(int segment) const {
        return MANY ? problem.chunks : least(problem.of_segment, problem.chunks - segment * problem.of_segment);
    }

    // The number of groups of 16 columns in a unit.
    MOEPACK_DEVICE int groups_of(int segment) const {
        if (MANY) return problem.groups;
        int most = problem.of_segment * (CODED_CHUNK / CODED_GROUP);
        return least(most, problem.groups - segment * most);
    }

    MOEPACK_DEVICE Operands operands_of(const CodedUnit& unit) const {
        const auto& tile = work.routing.tile_at(unit.tile);
        int tokens = TOKENS == 1 || work.same() ? 1 : tile.tokens;
        int group = unit.segment * problem.of_segment * (CODED_CHUNK / CODED_GROUP);
        const u8* cells = problem.cells ? problem.cells : Areas(problem).cells;
        return {cells + ((work.same() ? 0 : i64(tile.start) * problem.groups) + i64(group) * tokens) * 32, tokens};
    }

    MOEPACK_DEVICE const float2* notes() const {
        return problem.cells ? problem.notes : own_notes;
    }

    // Looks up the next record, if there is one.
    MOEPACK_DEVICE void look_up() {
        if (left == 0) {
            ring.end = ring.start;
            if (next_unit >= work.units()) return;
            CodedUnit unit = work.unit(next_unit);
            next_unit += step, next_matrix = unit.second, left = chunks_of(unit.segment);
            int block = block_of(unit);
            next_chunk = block * problem.chunks + unit.segment * problem.of_segment;
            CodedMatrix of = matrix(unit.second);
            prefetch(of.blocks + block);
            prefetch(of.firsts + block * int(problem.segments.by) + unit.segment);
        }
        ring.look_up(matrix(next_matrix).starts, next_chunk++);
        --left;
    }

    // Fetches that record and looks up the following one.
    MOEPACK_DEVICE void fetch() {
        ring.fetch(matrix(next_matrix).records);
        look_up();
    }

    // Multiplies a unit.
    MOEPACK_DEVICE Sums<N> multiply(u32 number) {
        CodedUnit unit = work.unit(number);
        BlockNote note = note_of(unit);
        Copies copies = tables.find(unit.second, note.table(), Areas(problem).tables);
        Operands from = operands_of(unit);
        const u8* x[N];
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = from.first + from.token(8 * i + lane / 4) * 32 + lane % 4 * 8;
        int groups = groups_of(unit.segment), more = from.tokens * 32, chunk = 0;
        Sums<N> sums;
        sums.clear();
        Lanes<DEPENDENT> lanes;
        bool dependent = note.dependent();
        do {
            fetch();
            bool begins = MANY ? chunk % problem.of_segment == 0 : chunk == 0;
            enter_chunk(lanes, ring.wait<1>(), begins, dependent);
            decode(lanes, copies, x, least(groups, CODED_CHUNK / CODED_GROUP), TOKENS == 1 ? 32 : more, sums);
            // Recompute values afterwards instead of keeping them: the loop is short of registers.
            hold(number);
            if (begins) correct(work.unit(number), MANY ? chunk / problem.of_segment : 0, sums);
            __syncwarp();
            ++chunk, groups -= CODED_CHUNK / CODED_GROUP;
        } while (groups > 0);
        return sums;
    }

    // Multiplies groups of 16 columns by operands B with a stride of `more` bytes.
    MOEPACK_DEVICE void decode(Lanes<DEPENDENT>& lanes, const Copies& copies, const u8* (&x)[N], int groups, int more,
                               Sums<N>& sums) {
#pragma unroll UNROLLED
        for (; groups > 0; --groups) {
            Pair b[N];
#pragma unroll
            for (int i = 0; i < N; ++i) b[i] = *reinterpret_cast<const Pair*>(x[i]), x[i] += more;
            u32 a[4];
            lanes.decode(copies, problem.one, a);
            sums.add(a, b);
        }
    }

    // Adds the corrections of a segment of a unit, sixteen per product.
    MOEPACK_DEVICE void correct(CodedUnit unit, int later, Sums<N>& sums) {
        unit.segment += later;
        CodedMatrix of = matrix(unit.second);
        Operands from = operands_of(unit);
        u32 segment = block_of(unit) * int(problem.segments.by) + unit.segment;
        u32 at = __ldg(of.firsts + segment), end = __ldg(of.firsts + segment + 1);
        for (; at < end; at += 16) {
            u32 correction[4], a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 mine = at + lane % 4 * 2 + i / 2 * 8 + i % 2;
                correction[i] = mine < end ? __ldg(of.corrections + mine) : 0;
            }
            correction_operand(correction, lane / 4, a);
            Pair b[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                int token = from.token(8 * i + lane / 4);
                u32 value[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    int column = correction[j] & 0xfff, within = column % CODED_GROUP;
                    const u8* cell = from.first + (column / CODED_GROUP * from.tokens + token) * 32;
                    value[j] = *reinterpret_cast<const u16*>(cell + within % 4 * 8 + within / 4 * 2);
                }
                b[i] = {value[0] | value[1] << 16, value[2] | value[3] << 16};
            }
            sums.add(a, b);
        }
    }

    // Calls write(token, row, sum) for the rows and tokens of a lane, with the contribution of symbol 0 or half 0.
    template <class Write>
    MOEPACK_DEVICE void for_sums(const CodedUnit& unit, const Sums<N>& sums, Write write) {
        const auto& tile = work.routing.tile_at(unit.tile);
        BlockNote note = note_of(unit);
        float factor = float(note.factor()), lowest = unit.segment == 0 ? float(note.lowest()) : 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (token >= tile.tokens) continue;
            float more = lowest * notes()[work.same() ? 0 : tile.start + token].y;
            write(token, lane / 4, sums.of[i / 2][i % 2] * (factor * 16777216.0f) + more);
            write(token, lane / 4 + 8, sums.of[i / 2][2 + i % 2] * (factor * 16777216.0f) + more);
        }
    }

    // Writes a unit's sums [tokens][16] to their place in the block's memory.
    MOEPACK_DEVICE void keep(u32 number, const Sums<N>& sums, int place) {
        float* to = reinterpret_cast<float*>(Areas(problem).sums) + place * work.columns() * CODED_BLOCK;
        for_sums(work.unit(number), sums, [&](int token, int row, float sum) { to[token * CODED_BLOCK + row] = sum; });
    }

    // Writes the outputs of a unit that has all segments. Outputs of the second matrix follow all of the first.
    MOEPACK_DEVICE void write(u32 number, const Sums<N>& sums) {
        CodedUnit unit = work.unit(number);
        CodedMatrix of = matrix(unit.second);
        const auto& tile = work.routing.tile_at(unit.tile);
        float* out = problem.out + (unit.second ? i64(problem.slots()) * problem.rows : 0);
        for_sums(unit, sums, [&](int token, int row, float sum) {
            int line = unit.block * CODED_BLOCK + row, place = tile.start + token;
            if (line >= problem.rows) return;
            float scale = notes()[place].x * scale_of_row(of, tile.expert, problem.rows, line);
            out[i64(work.routing.slot_at(place)) * problem.rows + line] = sum * scale;
        });
    }
};

// Adds the sums of the segments of a matrix in order, starting at a unit.
MOEPACK_DEVICE float add_segments(const float* sums, int unit, int segments, int columns, int token, int row) {
    float total = 0;
    const float* from = sums + (unit * columns + token) * CODED_BLOCK + row;
#pragma unroll 4
    for (int i = 0; i < segments; ++i) total += from[i * columns * CODED_BLOCK];
    return total;
}

// Writes the outputs of tasks `begin` to `end` of a block from their sums in shared memory; called by all threads.
template <Mode MODE>
MOEPACK_DEVICE void write_outputs(const CodedProblem& problem, const Work<MODE>& work, const CodedMatrix& first,
                                  const CodedMatrix& second, const float* sums, const float2* notes, int begin,
                                  int end) {
    const CodedRouting& routing = work.routing;
    int columns = work.columns();
    int outputs = MODE == Mode::combine ? problem.tokens : columns, segments = work.segments();
    for (int item = threadIdx.x; item < (end - begin) * outputs * CODED_BLOCK; item += blockDim.x) {
        int row = item % CODED_BLOCK, token = item / CODED_BLOCK % outputs, task = item / CODED_BLOCK / outputs;
        int unit = task * work.of_task();
        CodedUnit at = {0, 0, begin + task, 0};
        if (MODE != Mode::combine) at = work.unit((begin - work.tasks.first) * work.of_task() + unit);
        int line = at.block * CODED_BLOCK + row;
        if (line >= problem.rows) continue;
        if (MODE == Mode::combine) {
            float total = 0;
            for (int number = 0; number < routing.tiles; ++number, unit += segments) {
                const auto& tile = routing.tile_at(number);
                for (int i = 0; i < tile.tokens; ++i) {
                    if (problem.top_k.quotient(routing.slot_at(tile.start + i)) != token) continue;
                    float sum = add_segments(sums, unit, segments, columns, i, row);
                    total += sum * notes[tile.start + i].x * scale_of_row(first, tile.expert, problem.rows, line);
                }
            }
            problem.out[i64(token) * problem.rows + line] = total;
            continue;
        }
        const auto& tile = routing.tile_at(at.tile);
        if (token >= tile.tokens) continue;
        float factor = notes[work.same() ? 0 : tile.start + token].x;
        float value = add_segments(sums, unit, segments, columns, token, row) * factor *
                      scale_of_row(first, tile.expert, problem.rows, line);
        if (MODE == Mode::gated) {
            float other = add_segments(sums, unit + segments, segments, columns, token, row) * factor *
                          scale_of_row(second, tile.expert, problem.rows, line);
            value = value / (1.0f + __expf(-value)) * other;
        }
        problem.out[i64(routing.slot_at(tile.start + token)) * problem.rows + line] = value;
    }
}

template <Mode MODE>
MOEPACK_DEVICE void run_coded(const CodedProblem& problem, const CodedMatrix& first, const CodedMatrix& second) {
    __shared__ CodedRouting routing;
    __shared__ Share share;
    __shared__ Tables tables;
    __shared__ float2 own_notes[MANY ? 1 : MOST_SLOTS];
    if (problem.index) enter_launch();
    routing.build(problem);
    Work<MODE> work(problem, routing, share);
    find_tables(work, first, second, tables);
    CodedWarp<MODE, ceil_div(TOKENS, 8)> warp(problem, work, first, second, tables, own_notes);
    Areas areas(problem);
    // Without an index, tables and first records are known before the preceding launch has ended. Otherwise activations
    // are requested first.
    auto load = [&] {
        tables.load(first, second, areas.tables, problem.table_bytes);
        warp.fetch();
    };
    bool early = !problem.index || problem.cells || routing.slots == 0;
    if (early) load();
    if (!problem.index) enter_launch();
    auto load_late = [&] {
        if (!early) load();
    };
    int places = work.same() ? least(routing.slots, 1) : routing.slots;
    if (!problem.cells && places)
        lay_out_places<MODE>(problem, routing, 0, places, areas.cells, own_notes, work.same(), load_late);
    __syncthreads();
    int unit = threadIdx.x / WARP, warps = blockDim.x / WARP;
    if constexpr (MANY) {
        for (; unit < work.units(); unit += warps) warp.write(unit, warp.multiply(unit));
        return;
    }
    int room = problem.sum_bytes / (work.columns() * CODED_BLOCK * 4), round = most(1, room / most(work.of_task(), 1));
    const float* sums = reinterpret_cast<const float*>(areas.sums);
    for (int begin = share.first; begin < share.last; begin += round) {
        int end = least(begin + round, share.last), start = (begin - share.first) * work.of_task();
        int stop = (end - share.first) * work.of_task();
        for (; unit < stop; unit += warps) warp.keep(unit, warp.multiply(unit), unit - start);
        __syncthreads();
        write_outputs(problem, work, first, second, sums, warp.notes(), begin, end);
        __syncthreads();
    }
}

// Lays out operands B in global memory: one block per place, in a grid-stride loop.
template <Mode MODE>
MOEPACK_DEVICE void lay_out_coded(const CodedProblem& problem) {
    __shared__ CodedRouting routing;
    enter_launch();
    routing.build(problem);
    for (int place = blockIdx.x; place < routing.slots; place += gridDim.x) {
        if (!routing.has(place)) continue;
        lay_out_places<MODE>(problem, routing, place, 1, problem.cells, problem.notes, false, [] {});
        __syncthreads();
    }
}
#endif

}  // namespace moepack

#if defined(__CUDACC__)
using namespace moepack;

#define CODED_KERNEL extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)

CODED_KERNEL lay_out_tokens(CodedProblem problem) {
    lay_out_coded<Mode::project>(problem);
}

CODED_KERNEL lay_out_hidden(CodedProblem problem) {
    lay_out_coded<Mode::combine>(problem);
}

CODED_KERNEL gated(CodedProblem problem, CodedMatrix gate, CodedMatrix up) {
    run_coded<Mode::gated>(problem, gate, up);
}

CODED_KERNEL project(CodedProblem problem, CodedMatrix matrix) {
    run_coded<Mode::project>(problem, matrix, matrix);
}

#if MANY
extern "C" __global__ void __launch_bounds__(ROUTE_THREADS) route(Routes routes, const i64* index, int slots,
                                                                  int experts, int columns) {
    enter_launch();
    route_slots(routes, index, slots, experts, columns);
}
#else
CODED_KERNEL combine(CodedProblem problem, CodedMatrix matrix) {
    run_coded<Mode::combine>(problem, matrix, matrix);
}
#endif

// N neighboring values of a row: 4 if rows are a multiple of four, otherwise 1.
template <int N>
struct Values {
    alignas(4 * N) float of[N];

    MOEPACK_DEVICE explicit Values(const float* from) {
        if constexpr (N == 4) *reinterpret_cast<float4*>(of) = *reinterpret_cast<const float4*>(from);
        else of[0] = from[0];
    }

    MOEPACK_DEVICE void store(float* to) const {
        if constexpr (N == 4) *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(of);
        else to[0] = of[0];
    }
};

// Sums the outputs of a token.
template <int N>
MOEPACK_DEVICE void add_slots_of(const CodedProblem& problem, const float* from, int token) {
    int top_k = problem.top_k.by;
    for (int row = threadIdx.x * N; row < problem.rows; row += blockDim.x * N) {
        alignas(16) float total[N] = {};
#pragma unroll 4
        for (int slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
            i64 expert = problem.index[slot];
            if (expert < 0 || expert >= problem.experts) continue;
            Values<N> value(from + i64(slot) * problem.rows + row);
#pragma unroll
            for (int i = 0; i < N; ++i) total[i] += problem.weights[slot] * value.of[i];
        }
        Values<N>(total).store(problem.out + i64(token) * problem.rows + row);
    }
}

// out[token] = the sum over its slots of weight * from[slot]; slots without an expert are skipped. Blocks take tokens.
CODED_KERNEL add_slots(CodedProblem problem, const float* from) {
    enter_launch();
    for (int token = blockIdx.x; token < problem.tokens; token += gridDim.x) {
        if (problem.rows % 4 == 0) add_slots_of<4>(problem, from, token);
        else add_slots_of<1>(problem, from, token);
    }
}

// to[row] = activations of row `row / per` times the column scales: the shared ones, or otherwise those of the expert
// of slot `row`, if it has one.
CODED_KERNEL scale_columns(CodedProblem problem, ColumnScales scales, int rows, int per, float* to) {
    enter_launch();
    int eights = problem.x.columns / 8;
    i64 count = i64(rows) * eights, step = i64(gridDim.x) * blockDim.x;
    for (i64 item = i64(blockIdx.x) * blockDim.x + threadIdx.x; item < count; item += step) {
        int row = int(item / eights), column = int(item % eights) * 8;
        i64 expert = scales.stride ? problem.index[row] : 0;
        if (expert < 0 || expert >= problem.experts) continue;
        u32 word[8];
        float value[8];
        load_eight(problem.x, row / per, column, word);
        to_floats(problem.x.type, word, value);
        // Rows of scales are zero-padded to a multiple of 16, and aligned to one.
        const float4* from = reinterpret_cast<const float4*>(scales.of(expert) + column);
        float4 low = __ldg(from), high = __ldg(from + 1), *into = reinterpret_cast<float4*>(to + item * 8);
        into[0] = {value[0] * low.x, value[1] * low.y, value[2] * low.z, value[3] * low.w};
        into[1] = {value[4] * high.x, value[5] * high.y, value[6] * high.z, value[7] * high.w};
    }
}

template <int N>
MOEPACK_DEVICE void gate_slot(float* out, const float* up, int rows) {
    for (int row = threadIdx.x * N; row < rows; row += blockDim.x * N) {
        Values<N> value(out + row), other(up + row);
#pragma unroll
        for (int i = 0; i < N; ++i) value.of[i] = value.of[i] / (1.0f + __expf(-value.of[i])) * other.of[i];
        value.store(out + row);
    }
}

// out[slot] = silu(out[slot]) * up[slot]; slots without an expert are not changed. Blocks take slots.
CODED_KERNEL gate_slots(CodedProblem problem, const float* up) {
    enter_launch();
    for (int slot = blockIdx.x; slot < problem.slots(); slot += gridDim.x) {
        i64 expert = problem.index[slot], at = i64(slot) * problem.rows;
        if (expert < 0 || expert >= problem.experts) continue;
        if (problem.rows % 4 == 0) gate_slot<4>(problem.out + at, up + at, problem.rows);
        else gate_slot<1>(problem.out + at, up + at, problem.rows);
    }
}

// Decodes `count` row blocks, numbered over all experts, starting at `begin`; one warp per segment. `make` returns what
// writes the segment of a row block (`Rows` or `Halves`). Records are copied one ahead, also of the next segment.
template <class Make>
MOEPACK_DEVICE void decode_blocks(const CodedProblem& problem, const CodedMatrix& matrix, i64 begin, i64 count,
                                  Make make) {
    __shared__ Tables tables;
    Areas areas(problem);
    if (threadIdx.x < 2) tables.used[threadIdx.x] = threadIdx.x ? 0 : ~0ull >> (64 - matrix.table_count);
    __syncthreads();
    tables.load(matrix, matrix, areas.tables, problem.table_bytes);
    __syncthreads();
    Ring ring(areas.rings, problem.stage);
    // Units are fewer than records, whose numbers are 32 bits.
    int warps = blockDim.x / WARP, segments = problem.segments.by, chunk_ahead = 0;
    int units = int(count) * segments, step = gridDim.x * warps, ahead = blockIdx.x * warps + threadIdx.x / WARP;
    auto look_up = [&] {
        ring.end = ring.start;
        if (ahead >= units) return;
        int block = int(begin) + ahead / segments, chunk = ahead % segments * problem.of_segment + chunk_ahead;
        ring.look_up(matrix.starts, block * problem.chunks + chunk);
        bool ends = chunk + 1 == problem.chunks || chunk_ahead + 1 == problem.of_segment;
        chunk_ahead = ends ? 0 : chunk_ahead + 1, ahead += ends ? step : 0;
    };
    auto fetch = [&] {
        ring.fetch(matrix.records);
        look_up();
    };
    int unit = ahead;
    look_up(), fetch();
    for (; unit < units; unit += step) {
        int block = int(begin) + unit / segments, number = block * segments + unit % segments;
        int chunk = unit % segments * problem.of_segment, first = chunk * CODED_CHUNK;
        int last = least(chunk + problem.of_segment, problem.chunks);
        auto target = make(block, chunk == 0);
        Copies copies = tables.find(0, target.note.table(), areas.tables);
        Lanes<DEPENDENT> lanes;
        for (; chunk < last; ++chunk) {
            fetch();
            enter_chunk(lanes, ring.wait<1>(), chunk * CODED_CHUNK == first, target.note.dependent());
            int end = least((chunk + 1) * CODED_CHUNK, problem.groups * CODED_GROUP);
            target.put_chunk(chunk * CODED_CHUNK, end, [&](u32(&a)[4]) { lanes.decode(copies, problem.one, a); });
            __syncwarp();
        }
        target.correct(matrix.corrections, matrix.firsts[number], matrix.firsts[number + 1], first);
    }
}

// Decodes row blocks from `begin` on, the first one of an expert, to bfloat16 or, if `wide`, float32.
CODED_KERNEL dequantize(CodedProblem problem, CodedMatrix matrix, ColumnScales scales, i64 begin, i64 count,
                        int columns, int wide, void* out) {
    decode_blocks(problem, matrix, begin, count, [&](i64 block, bool) {
        return Rows(problem, matrix, scales, block, begin / problem.blocks.by, columns, wide, out);
    });
}

// Decodes all `count` row blocks to operands A, `block_bytes` each.
CODED_KERNEL decode_halves(CodedProblem problem, CodedMatrix matrix, i64 count, i64 block_bytes, u8* out) {
    enter_launch();
    decode_blocks(problem, matrix, 0, count, [&](i64 block, bool first) {
        Halves halves(out + block * block_bytes, BlockNote{matrix.blocks[block]});
        int expert = int(block / problem.blocks.by), line = int(block % problem.blocks.by) * CODED_BLOCK;
        if (first) halves.scale(matrix, expert, problem.rows, line);
        return halves;
    });
}
#endif
