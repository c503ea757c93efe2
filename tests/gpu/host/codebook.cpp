// Prints the codes of a chunk of a panel as cuda/codebook.cuh takes them: for each row, step, lane of four and part four
// bytes of a product's operand; then each row's codes one by one. Tables hold the codes themselves.
//
// Usage: codebook CHUNK, a file with the codes of 16 rows of 128 columns.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "codebook.cuh"

using namespace moepack;

int main(int, char** arguments) {
    std::ifstream file(arguments[1], std::ios::binary);
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const u8* chunk = reinterpret_cast<const u8*>(bytes.data());
    Table<BITS> table;
    for (int i = 0; i < Table<BITS>::WORDS; ++i) table.word[i] = 0x03020100 + i * 0x04040404;
    for (int row = 0; row < PANEL; ++row)
        for (int t = 0; t < 4; ++t) {
            u32 step[4];
            codes_of<BITS>(chunk, row, t, step);
            for (u32 codes : step)
                for (int part = 0; part < 2; ++part) {
                    u32 four = Selector<BITS>(codes).bytes(table, part);
                    std::fwrite(&four, 4, 1, stdout);
                }
        }
    for (int row = 0; row < PANEL; ++row)
        for (int column = 0; column < 128; ++column) std::putchar(int(code_of<BITS>(chunk, row, column)));
}
