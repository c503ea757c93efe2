// Channel records (docs/format.md, section 10) in the layout for kernels: *pieces* that a lane loads at once.
//
// Layout: the bytes on disk. A record has two *halves*, a gate row and a down column, each padded to groups of 64
// columns, followed by the scales of both. A piece is two *fours* of neighboring columns. They are consecutive, or, for
// 4-bit values, 32 columns apart and sharing bytes.
//
// Codes are converted to f32 by placing them in the lowest byte of 2^23; one subtraction removes the exponent and the
// middle.
#pragma once
#include "common/ptx.cuh"
#include "common/types.cuh"

namespace moepack {

struct Records {
    const u8* data;           // address of the first channel of the first expert
    const u8* resident_data;  // address of the resident channels, expert by expert
    const float* thresholds;  // per expert
    i64 bytes;                // per record
    int half_bytes;           // bytes of values per half
    int groups;               // per half
    int channels;             // per expert
    int resident;             // leading channels per expert that are in GPU memory; the others are on the host

    MOEPACK_BOTH const u8* at(i64 expert, int channel) const {
        if (channel < resident) return resident_data + (expert * resident + channel) * bytes;
        return data + (expert * channels + channel) * bytes;
    }

    // Whether a record is in GPU memory, given the number of experts.
    MOEPACK_BOTH bool has_resident(const u8* record, int experts) const {
        return record >= resident_data && record < resident_data + i64(experts) * resident * bytes;
    }
};

MOEPACK_BOTH float float_of(u32 bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

template <int SIZE>  // bits of a value
struct Piece {
    static constexpr int GROUP = 64, COLUMNS = 8, BYTES = SIZE, WORDS = SIZE / 4, OF_GROUP = GROUP / COLUMNS;

    u32 word[WORDS];

    // The first column of each four.
    static MOEPACK_BOTH int column(int piece, int four) {
        return SIZE == 4 ? piece / OF_GROUP * GROUP + piece % OF_GROUP * 4 + four * 32 : piece * 8 + four * 4;
    }

    // The value of byte i of a word.
    static MOEPACK_BOTH float byte_value(u32 bytes, int i, int middle) {
        return float_of(permute(bytes, 0x4b000000, 0x7650 + i)) - float((1 << 23) + middle);
    }

    MOEPACK_BOTH void values(float (&value)[COLUMNS]) const {
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (int i = 0; i < COLUMNS; ++i) {
            u32 bits = word[i * WORDS / COLUMNS];
            if (SIZE == 16) value[i] = float_of(i % 2 ? bits & 0xffff0000 : bits << 16);
            if (SIZE == 8) value[i] = byte_value(bits ^ 0x80808080, i % 4, 128);
            if (SIZE == 4) value[i] = byte_value(bits >> (i / 4 * 4) & 0x0f0f0f0f, i % 4, 8);
        }
    }

    // The scale of a piece's codes; `half` is 0 for the gate row, 1 for the down column.
    static MOEPACK_BOTH float scale(const Records& records, const u8* record, int half, int piece) {
        if (SIZE == 16) return 1;
        const u16* scales = reinterpret_cast<const u16*>(record + 2 * records.half_bytes);
        return float_of(u32(scales[half * records.groups + piece / OF_GROUP]) << 16);
    }

    static MOEPACK_BOTH Piece load(const u8* half, int piece) {
        Piece loaded;
#if defined(__CUDA_ARCH__)
        const u8* from = half + piece * BYTES;
        if constexpr (SIZE == 16) {
            Quad quad = load_quad(from);
            loaded.word[0] = quad.x, loaded.word[1] = quad.y, loaded.word[2] = quad.z, loaded.word[3] = quad.w;
        } else if constexpr (SIZE == 8) {
            Pair pair = *reinterpret_cast<const Pair*>(from);
            loaded.word[0] = pair.x, loaded.word[1] = pair.y;
        } else {
            loaded.word[0] = *reinterpret_cast<const u32*>(from);
        }
#else
        std::memcpy(loaded.word, half + piece * BYTES, BYTES);
#endif
        return loaded;
    }
};

}  // namespace moepack
