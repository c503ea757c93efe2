// Decodes the layout of coded integers for GPUs as the threads of a warp do, and prints the codes.
//
// Usage: coded FILE [paths]: [row blocks, 16, columns] i32 on the standard output, the columns in whole groups of 16;
// with `paths` as kernels decode that follow paths of dependent codes.
//
// Each thread runs alone: what threads say to each other, the number of bytes of the lanes before, is counted here.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "coded.cuh"
#include "coded_halves.cuh"

using namespace moepack;

struct Section {
    u64 start, length;
};

struct Header {
    char magic[8];
    u64 experts, rows, columns, tables, of_segment, longest, row_scales;
    Section head, scales, columns_at, tables_at, blocks, starts, firsts, corrections, records;
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

// The word of a row block.
struct Note {
    u32 word;

    int lowest() const {
        return int(word << 16) >> 24;
    }

    bool dependent() const {
        return word >> 16 & 1;
    }
};

template <bool PATHS>
struct Warp {
    Note note;
    int lanes;  // that have rows
    Lanes<PATHS> lane[WARP];
    u32 path[CODED_LANES] = {0};  // states that the codes lead to

    void enter(u8* record, bool begins) {
        for (int i = 0; begins && i < CODED_LANES; ++i)
            lane[i % WARP].chain[i / WARP].state = ONE | record[2 * i] | record[2 * i + 1] << 8;
        if (begins) record += STATES_BYTES;
        for (int i = 0; begins && i < WARP; ++i) {
            lane[i].paths.enter(note.dependent() ? record[i] : 0);
            if (note.dependent() && record[i] != path_byte(path[i], path[i + WARP])) std::exit(2);
        }
        if (begins && note.dependent()) record += PATHS_BYTES;
        u32 before[CODED_LANES + 1] = {0};
        for (int i = 0; i < CODED_LANES; ++i) before[i + 1] = before[i] + record[i];
        for (int i = 0; i < WARP; ++i) lane[i].enter(record + CODED_LANES, {before[i], before[WARP + i]});
    }

    // Writes the codes of 16 columns of 16 rows that are `columns` apart.
    void decode(const Copies& copies, int* to, u64 columns) {
        u32 words[2][WARP];  // the symbols of each thread's rows
        u32 halves[HALVES_GROUP / 4];
        for (int thread = 0; thread < WARP; ++thread) {
            u32 a[4];
            lane[thread].decode(copies, 1, a);
            for (int row = 0; row < 2; ++row) words[row][thread] = symbols_of_row(a, row);
            for (int i = 0; i < 4; ++i) halves[halves_at(thread / 4 + i % 2 * 8, thread % 4) / 4 + i / 2] = code_pair(a[i]);
            for (int row = 0; row < 2; ++row)
                for (int step = 0; step < 4; ++step) {
                    int symbol = half_code(a[row + step / 2 * 2] >> step % 2 * 16 & 0xffff);
                    to[(thread / 4 + 8 * row) * columns + 4 * step + thread % 4] =
                        symbol * (note.dependent() ? 2 : 1) + note.lowest();
                    follow(thread + WARP * row, symbol);
                }
        }
        for (int row = 0; row < 2; ++row) compare_turned(words[row], to + 8 * row * columns, columns);
        for (int i = 0; i < CODED_BLOCK * CODED_GROUP; ++i) {
            int row = i / 16, column = i % 16, at = halves_at(row, column % 4) / 2 + column / 4;
            if (int(half_value(reinterpret_cast<u16*>(halves)[at])) != to[row * columns + column]) std::exit(5);
        }
    }

    // The f16 codes of a word of operand A.
    u32 code_pair(u32 symbols) const {
        u16 factor = half_bits(note.dependent() ? 2.0f : 1.0f), lowest = half_bits(float(note.lowest()));
        return codes_of(symbols, factor * 0x10001u, lowest * 0x10001u);
    }

    // Compares the codes that threads get by transposition with those that they have decoded.
    void compare_turned(const u32 (&word)[WARP], const int* to, u64 columns) const {
        float factor = note.dependent() ? 2 : 1, offset = float(note.lowest()) - ABOVE * factor;
        u32 half[WARP];
        for (int thread = 0; thread < WARP; ++thread)
            half[thread] = permute(word[thread], word[thread ^ 2], far_selector(thread));
        for (int thread = 0; thread < WARP; ++thread)
            for (int j = 0; j < 4; ++j) {
                u32 turned = permute(half[thread], half[thread ^ 1], near_selector(thread)), bits = bits_above(turned, j);
                float above;
                std::memcpy(&above, &bits, sizeof above);
                float code = std::fma(above, factor, offset);
                if (code != to[thread / 4 * columns + thread % 4 * 4 + j]) std::exit(4);
            }
    }

    // Goes on by a half.
    void follow(int lane, int half) {
        if (!note.dependent() || lane >= lanes) return;
        u32 even = path[lane] % 2 ? 127 - half : half;
        if (even % 2) std::exit(3);
        path[lane] = next_state(path[lane], even / 2 % 2);
    }
};

// Adds the corrections of a segment, of which each thread finds its own in sixteen.
static void correct(u64 segment, Note note, int* to, u64 columns) {
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
                    int(half_value(u16(a[i % 2 + i / 4 * 2] >> i / 2 % 2 * 16)) * 16777216.0f) *
                    (note.dependent() ? 2 : 1);
        }
}

template <bool PATHS>
static void decode_all() {
    const Header& h = header();
    u64 groups = ceil_div(h.columns, u64(16)), chunks = ceil_div(groups, u64(16)), columns = 16 * groups;
    u64 segments = ceil_div(chunks, h.of_segment);
    std::vector<int> out(CODED_BLOCK * columns);
    for (u64 block = 0; block < h.blocks.length / 4; ++block) {
        Note note = {word(h.blocks, block)};
        Copies copies = {file.data() + h.tables_at.start + (note.word & 63) * 4 * SLOTS, 4};
        u64 first = block % ceil_div(h.rows, u64(CODED_BLOCK)) * CODED_BLOCK;
        Warp<PATHS> warp = {note, int(least(h.rows - first, u64(CODED_BLOCK))) * 4};
        for (u64 group = 0; group < groups; ++group) {
            u64 chunk = group / 16;
            u8* record = file.data() + h.records.start + 16 * u64(word(h.starts, block * chunks + chunk));
            if (group % 16 == 0) warp.enter(record, chunk % h.of_segment == 0);
            warp.decode(copies, out.data() + 16 * group, columns);
        }
        for (u64 i = 0; i < segments; ++i)
            correct(block * segments + i, note, out.data() + i * h.of_segment * CODED_CHUNK, columns);
        std::fwrite(out.data(), sizeof(int), out.size(), stdout);
    }
}

int main(int count, char** arguments) {
    std::FILE* from = std::fopen(arguments[1], "rb");
    if (!from) return 1;
    for (int byte; (byte = std::fgetc(from)) != EOF;) file.push_back(u8(byte));
    if (count > 2) decode_all<true>();
    else decode_all<false>();
}
