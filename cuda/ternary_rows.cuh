// Rows of ternary codes as processed by a group of lanes: the codes of each lane, their first columns, and the calls to
// a sink. For cuda/ternary.cu, whose definitions it uses.
#pragma once
#include "common/ptx.cuh"
#include "ternary.cuh"

using namespace moepack;

constexpr int GROUPS = THREADS / LANES;
constexpr u32 ALL = ~0u;

struct Row {
    u32 start;   // its first code in the payload
    u32 length;  // codes in bits 0-27; for FSV8 the dictionary in bits 28-30, and three slots in bit 31
    float first, second;  // levels of symbols 1 and 2
};

struct Matrix {
    const Row* row;
    const u16* column;  // per 32nd code of the payload, unless it is a row's first
    const u8* payload;
    const u32* table;   // entries, for FSV8 TABLE_BYTES per dictionary
    int experts, rows, columns;
    int dictionaries;   // of FSV8; 0 for dict16
    int pad;            // columns that codes of other rows may reach
};

extern __shared__ __align__(16) u8 memory[];

MOEPACK_DEVICE void copy_kept(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

MOEPACK_DEVICE u32 length(const Row& row) {
    return row.length & 0x0fffffff;
}

// Whether a row is stored as 2-bit symbols, four per byte, instead of codes.
MOEPACK_DEVICE bool is_raw(const Matrix& matrix, const Row& row) {
    return !DICT16 && length(row) == ceil_div<u32>(matrix.columns, 4);
}

// Eight codes, and the stored column of their chunk.
struct Codes {
#if DICT16
    Quad words;
#else
    Pair words;
    u32 previous;
#endif
    u32 column;
};

MOEPACK_DEVICE Codes fetch(const Matrix& matrix, const Row& row, u32 code) {
    Codes codes = {};
    if (code >= row.start + length(row)) return codes;
    codes.column = __ldg(matrix.column + code / CHUNK);
#if DICT16
    codes.words = load_quad(matrix.payload + 2 * u64(code));
#else
    u64 words = __ldg(reinterpret_cast<const u64*>(matrix.payload + code));
    codes.words = {u32(words), u32(words >> 32)};
    // The bytes before the payload belong to the tensor, so the read is in bounds.
    codes.previous = __ldg(matrix.payload + i64(code) - 1);
#endif
    return codes;
}

// The entries of a lane's codes, starting at index `code`; codes before `start` are read as code 0.
MOEPACK_DEVICE void look_up(const Matrix& matrix, u32 table, u32 start, u32 code, Codes codes, u32 (&entry)[CODES]) {
#if DICT16
    u32 words[4] = {codes.words.x, codes.words.y, codes.words.z, codes.words.w};
#pragma unroll
    for (int i = 0; i < CODES; ++i) {
        u32 number = words[i / 2] >> 16 * (i % 2) & 0xffff;
        entry[i] = __ldg(matrix.table + (code + i < start ? 0 : number));
    }
#else
    if (code < start) {
        u64 keep = start - code < CODES ? ~0ull << 8 * (start - code) : 0;
        codes.words.x &= u32(keep);
        codes.words.y &= u32(keep >> 32);
    }
    moepack::look_up(memory, table, codes.words, code <= start ? 0 : codes.previous, entry);
#endif
}

template <int SLOTS, class Sink>
MOEPACK_DEVICE void scatter_words(const u32 (&entry)[CODES], u32 at, Sink& sink) {
#pragma unroll
    for (int i = 0; i < CODES; ++i) {
        each_slot<SLOTS>(entry[i], Sink::STEP, at, [&](u32 address, u32 kind) { sink.add(address, kind); });
        at = behind(entry[i], Sink::STEP, at);
    }
}

template <class Sink>
MOEPACK_DEVICE void scatter(const Row& row, const u32 (&entry)[CODES], u32 at, Sink& sink) {
    if (DICT16 || row.length >> 31)
        scatter_words<3>(entry, at, sink);
    else
        scatter_words<2>(entry, at, sink);
}

template <class Sink>
MOEPACK_DEVICE void walk_raw(const Matrix& matrix, const Row& row, Sink& sink) {
    for (u32 byte = threadIdx.x % LANES; byte < length(row); byte += LANES) {
        u32 symbols = matrix.payload[row.start + byte];
        for (int i = 0; i < 4; ++i) {
            u32 symbol = symbols >> 2 * i & 3;
            if (symbol == 1 || symbol == 2) sink.add(sink.address(4 * byte + i), symbol == 1 ? 3u << 30 : 1u << 30);
        }
    }
}

// Calls sink.add for every non-zero weight of this lane's codes in a row of a group of LANES lanes; the first codes are
// given. `table` is the offset of the matrix's first table in shared memory. The groups of a warp run together.
template <class Sink>
MOEPACK_DEVICE void walk(const Matrix& matrix, u32 table, const Row& row, Codes codes, Sink& sink) {
    constexpr u32 STRIDE = LANES * CODES;
    u32 lane = threadIdx.x % LANES, quarter = lane % (CHUNK / CODES);
    u32 first = row.start / CHUNK * CHUNK, end = row.start + length(row);
    u32 trips = length(row) == 0 || is_raw(matrix, row) ? 0 : ceil_div(end - first, STRIDE);
    if (!DICT16) table += (row.length >> 28 & 7) * TABLE_BYTES;
    u32 zero = DICT16 ? __ldg(matrix.table) : *reinterpret_cast<const u32*>(memory + table);
    // Codes of the previous row are read as zeros that end at column 0.
    int column = -int(row.start - first) * int(zero >> 16 & 255);
    bool known = lane < CHUNK / CODES;
    if (!known) column = 0;
    u32 code = first + lane * CODES;
    for (u32 trip = __reduce_max_sync(ALL, trips); trip > 0; --trip) {
        Codes next = fetch(matrix, row, code + STRIDE);
        bool exists = code < end && trips > 0;
        u32 entry[CODES] = {};
        if (exists) look_up(matrix, table, row.start, code, codes, entry);
        u32 mine = 0;
#pragma unroll
        for (int i = 0; i < CODES; ++i) mine = behind(entry[i], 1, mine);
        u32 sum = mine, other = __shfl_up_sync(ALL, sum, 1, CHUNK / CODES);
        if (quarter >= 1) sum += other;
        other = __shfl_up_sync(ALL, sum, 2, CHUNK / CODES);
        if (quarter >= 2) sum += other;
        // Chunks of a round are less than 2^16 columns after those of the previous round.
        if (!known) column += (codes.column - column) & 0xffff;
        known = false;
        if (exists) {
            int at = least(most(column + int(sum - mine), -matrix.pad), matrix.columns);
            scatter(row, entry, sink.address(at), sink);
        }
        codes = next;
        code += STRIDE;
    }
    if (is_raw(matrix, row)) walk_raw(matrix, row, sink);
}
