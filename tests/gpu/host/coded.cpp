// Decodes the layout of coded integers for GPUs as the threads of a warp do, and prints the codes.
//
// Usage: coded FILE: [row blocks, 16, columns] i32 on the standard output, the columns in whole groups of 16.
//
// Each thread runs alone: what threads say to each other, the number of bytes of the lanes before, is counted here.
#include <cstdio>
#include <vector>

#include "coded.cuh"

using namespace moepack;

struct Section {
    u64 start, length;
};

struct Header {
    char magic[8];
    u64 experts, rows, columns, tables, of_segment, longest, row_scales;
    Section head, scales, tables_at, blocks, starts, firsts, corrections, records;
};

static std::vector<u8> file;

static const Header& header() {
    return *reinterpret_cast<const Header*>(file.data());
}

static u32 word(const Section& section, u64 number) {
    u32 value;
    std::memcpy(&value, file.data() + section.start + 4 * number, 4);
    return value;
}

static u32 half_code(u32 half) {
    return u32(half_value(u16(half)) * 16777216.0f);
}

struct Warp {
    Lanes lane[WARP];

    void enter(u8* record, bool begins) {
        for (int i = 0; begins && i < CODED_LANES; ++i)
            lane[i % WARP].chain[i / WARP].state = ONE | record[2 * i] | record[2 * i + 1] << 8;
        if (begins) record += STATES_BYTES;
        u32 before[CODED_LANES + 1] = {0};
        for (int i = 0; i < CODED_LANES; ++i) before[i + 1] = before[i] + record[i];
        for (int i = 0; i < WARP; ++i) lane[i].enter(record + CODED_LANES, {before[i], before[WARP + i]});
    }

    // Writes the codes of 16 columns of 16 rows that are `columns` apart.
    void decode(const Copies& copies, int lowest, int* to, u64 columns) {
        for (int thread = 0; thread < WARP; ++thread) {
            u32 a[4];
            lane[thread].decode(copies, 1, a);
            for (int row = 0; row < 2; ++row)
                for (int step = 0; step < 4; ++step)
                    to[(thread / 4 + 8 * row) * columns + 4 * step + thread % 4] =
                        int(half_code(a[row + step / 2 * 2] >> step % 2 * 16 & 0xffff)) + lowest;
        }
    }
};

// Adds the corrections of a segment, of which each thread finds its own in sixteen.
static void correct(u64 segment, int* to, u64 columns) {
    const Header& h = header();
    for (u32 at = word(h.firsts, segment), end = word(h.firsts, segment + 1); at < end; at += 16)
        for (int thread = 0; thread < WARP; ++thread) {
            u32 correction[4], a[4];
            for (int i = 0; i < 4; ++i) {
                u32 mine = at + thread % 4 * 2 + i / 2 * 8 + i % 2;
                correction[i] = mine < end ? word(h.corrections, mine) : 0;
            }
            correction_operand(correction, thread / 4, a);
            for (int i = 0; i < 8; ++i)
                to[(thread / 4 + i % 2 * 8) * columns + (correction[i / 4 * 2 + i / 2 % 2] & 0xfff)] +=
                    int(half_value(u16(a[i % 2 + i / 4 * 2] >> i / 2 % 2 * 16)) * 16777216.0f);
        }
}

int main(int, char** arguments) {
    std::FILE* from = std::fopen(arguments[1], "rb");
    if (!from) return 1;
    for (int byte; (byte = std::fgetc(from)) != EOF;) file.push_back(u8(byte));
    const Header& h = header();
    u64 groups = ceil_div(h.columns, u64(16)), chunks = ceil_div(groups, u64(16)), columns = 16 * groups;
    u64 segments = ceil_div(chunks, h.of_segment);
    std::vector<int> out(CODED_BLOCK * columns);
    for (u64 block = 0; block < h.blocks.length / 4; ++block) {
        u32 note = word(h.blocks, block);
        Copies copies = {file.data() + h.tables_at.start + (note & 63) * 4 * SLOTS, 4};
        Warp warp;
        for (u64 group = 0; group < groups; ++group) {
            u64 chunk = group / 16;
            u8* record = file.data() + h.records.start + 16 * u64(word(h.starts, block * chunks + chunk));
            if (group % 16 == 0) warp.enter(record, chunk % h.of_segment == 0);
            warp.decode(copies, int(note << 16) >> 24, out.data() + 16 * group, columns);
        }
        for (u64 i = 0; i < segments; ++i)
            correct(block * segments + i, out.data() + i * h.of_segment * CODED_CHUNK, columns);
        std::fwrite(out.data(), sizeof(int), out.size(), stdout);
    }
}
