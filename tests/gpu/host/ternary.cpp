// Decodes an FSV8 row with the functions of cuda/ternary.cuh and prints its symbols, a byte each.
//
// Usage: ternary TABLE CODES COLUMNS SLOTS: files with the entries of a table and the codes of a row, padded to whole lanes.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "ternary.cuh"

using namespace moepack;

static std::vector<char> read(const char* path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

static u8 symbol(u32 kind) {
    // A level for each symbol: weights must be what the row's levels are.
    float value = weight(kind, levels(-0.75f, 1.5f));
    return value == 0 ? 0 : value == -0.75f ? 1 : value == 1.5f ? 2 : 3;
}

template <int SLOTS>
static void decode(const u8* table, const std::vector<char>& codes, std::vector<u8>& out) {
    u32 at = 0, previous = 0;
    for (size_t i = 0; i + CODES <= codes.size(); i += CODES) {
        Pair words;
        std::memcpy(&words, &codes[i], sizeof words);
        u32 entry[CODES];
        look_up(table, 0, words, previous, entry);
        for (u32 e : entry) {
            each_slot<SLOTS>(e, 1, at, [&](u32 column, u32 kind) {
                if (symbol(kind) && column < out.size()) out[column] = symbol(kind);
            });
            at = behind(e, 1, at);
        }
        previous = u8(codes[i + CODES - 1]);
    }
}

int main(int, char** arguments) {
    std::vector<char> table = read(arguments[1]), codes = read(arguments[2]);
    std::vector<u8> out(std::atoi(arguments[3]));
    const u8* entries = reinterpret_cast<const u8*>(table.data());
    if (std::atoi(arguments[4]) == 2) decode<2>(entries, codes, out);
    else decode<3>(entries, codes, out);
    return std::fwrite(out.data(), 1, out.size(), stdout) == out.size() ? 0 : 1;
}
