// Creates the GPU records of coded integers (rust/core, formats/coded/device) from a packed tensor's streams, which
// were uploaded unchanged.
//
// The 64 lanes of a stream share a run of bytes; records separate the bytes by lane. A warp decodes a stream, with two
// lanes per thread; two ballots tell all threads which lanes take bytes. Two passes: `measure` computes the size of
// each record, and `write_records` writes the records at offsets from the prefix sums of the sizes.
//
// Launch: a warp per stream, WARPS warps per block.
//
// Bounds: the dependency chain from one register (64 weights) to the next, about 100 to 200 cycles, with all streams in
// parallel; a projection of a layer of Mixtral-8x7B has 1,792 streams of 4,096 registers.
#include "paths.cuh"

#if defined(__CUDACC__)
namespace moepack {

constexpr int WARPS = 4, LANES = 64, QUADS = 64, STATE_BYTES = 128, UNIT = 16, BLOCK_ROWS = 16;

struct Upload {
    const u8* packed;
    const i64* streams;  // the start of each in `packed`, followed by the end of the last
    const u32* tables;   // 256 words each: {0, frequency, slot - start, symbol} per slot, parities in bit 31
    const u32* blocks;   // per row block; the lowest byte is its table
    const u32* starts;   // per record, in units
    int* units;          // size of each record
    u8* records;
    int count, of_expert;      // streams
    int stream_blocks;         // row blocks per stream
    int row_blocks;            // per expert
    int rows, quads, chunks, of_segment;
    int dependent;             // whether codes are dependent

    // Bytes before a record's counts.
    MOEPACK_DEVICE int state_bytes(bool begins) const {
        return begins ? STATE_BYTES + (dependent ? PATHS_BYTES : 0) : 0;
    }
};

// A thread's lanes, `lane` and `lane` + 32, of the stream being decoded.
struct Lanes {
    u32 state[2], path[2];  // states of rANS and of the trellis
    const u8* bytes;
    i64 at = 0, length;

    MOEPACK_DEVICE Lanes(const u8* stream, i64 size) : bytes(stream + STATE_BYTES), length(size - STATE_BYTES) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int lane = threadIdx.x % WARP + i * WARP;
            state[i] = stream[lane] << 8 | stream[LANES + lane];
        }
    }

    // Decodes a register; lanes from `active` on are idle. Calls take(i, byte) for each byte that a lane takes.
    template <class Take>
    MOEPACK_DEVICE void next(const u32* table, int active, Take take) {
        u32 full[2], taken[2], below = (1u << threadIdx.x % WARP) - 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 entry = table[state[i] & 255];
            full[i] = (entry >> 8 & 255) * (state[i] >> 8) + (entry >> 16 & 255);
            bool exists = int(threadIdx.x % WARP) + i * WARP < active;
            taken[i] = __ballot_sync(~0u, exists && full[i] < 256);
            if (exists) path[i] = next_state(path[i], entry >> 31);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            bool takes = taken[i] >> threadIdx.x % WARP & 1;
            u32 byte = takes ? bytes[at + __popc(taken[i] & below) + (i ? __popc(taken[0]) : 0)] : 0;
            if (takes) take(i, byte);
            if (int(threadIdx.x % WARP) + i * WARP < active) state[i] = takes ? full[i] << 8 | byte : full[i];
        }
        at = least(at + __popc(taken[0]) + __popc(taken[1]), length);
    }
};

// Iterates over the records of this warp's stream: calls begin(record, whether it starts a segment, lanes), take(i,
// byte) for each byte, and end(record, begins).
template <class Begin, class Take, class End>
MOEPACK_DEVICE void for_records(const Upload& upload, Begin begin, Take take, End end) {
    int stream = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (stream >= upload.count) return;
    i64 start = upload.streams[stream];
    Lanes lanes(upload.packed + start, upload.streams[stream + 1] - start);
    int first = stream % upload.of_expert * upload.stream_blocks;
    int last = least(first + upload.stream_blocks, upload.row_blocks);
    i64 expert = i64(stream / upload.of_expert) * upload.row_blocks;
    const u32* table = upload.tables + (upload.blocks[expert + first] & 255) * 256;
    for (int block = first; block < last; ++block) {
        int active = least(upload.rows - block * BLOCK_ROWS, BLOCK_ROWS) * 4;
        lanes.path[0] = lanes.path[1] = 0;
        for (int chunk = 0; chunk < upload.chunks; ++chunk) {
            i64 record = (expert + block) * upload.chunks + chunk;
            bool begins = chunk % upload.of_segment == 0;
            begin(record, begins, lanes);
            int quads = least(upload.quads - chunk * QUADS, QUADS);
            for (int quad = 0; quad < quads; ++quad) lanes.next(table, active, take);
            end(record, begins);
        }
    }
}

// The exclusive prefix sum over the lanes.
MOEPACK_DEVICE int sum_before(int value) {
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        int other = __shfl_up_sync(~0u, sum, distance);
        if (int(threadIdx.x % WARP) >= distance) sum += other;
    }
    return sum - value;
}

}  // namespace moepack

using namespace moepack;

extern "C" __global__ void __launch_bounds__(WARPS * WARP) measure(Upload upload) {
    int count = 0;
    for_records(
        upload, [&](i64, bool, const Lanes&) { count = 0; }, [&](int, u32) { ++count; },
        [&](i64 record, bool begins) {
            int bytes = __shfl_sync(~0u, sum_before(count) + count, WARP - 1) + LANES + upload.state_bytes(begins);
            if (threadIdx.x % WARP == 0) upload.units[record] = ceil_div(bytes, UNIT);
        });
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP) write_records(Upload upload) {
    __shared__ u8 kept[WARPS][2][WARP][QUADS + 4];  // four more, to avoid bank conflicts
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, count[2];
    for_records(
        upload,
        [&](i64 record, bool begins, const Lanes& lanes) {
            u16* states = reinterpret_cast<u16*>(upload.records + i64(upload.starts[record]) * UNIT);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                count[i] = 0;
                if (begins) states[i * WARP + lane] = u16(lanes.state[i]);
            }
            u8* paths = reinterpret_cast<u8*>(states) + STATE_BYTES;
            if (begins && upload.dependent) paths[lane] = u8(path_byte(lanes.path[0], lanes.path[1]));
        },
        [&](int i, u32 byte) { kept[warp][i][lane][count[i]++] = u8(byte); },
        [&](i64 record, bool begins) {
            u8* counts = upload.records + i64(upload.starts[record]) * UNIT + upload.state_bytes(begins);
            u8* bytes = counts + LANES;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int before = sum_before(count[i]);
                counts[i * WARP + lane] = u8(count[i]);
                for (int j = 0; j < count[i]; ++j) bytes[before + j] = kept[warp][i][lane][j];
                bytes += __shfl_sync(~0u, before + count[i], WARP - 1);
            }
            int left = int(upload.records - bytes) & (UNIT - 1);
            if (lane < left) bytes[lane] = 0;
        });
}
#endif
