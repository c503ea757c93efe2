// Prints the values of records as cuda/channels.cuh decodes them: of each record both halves, [2, groups x 64] f32.
//
// Usage: channels FILE HALF_BYTES GROUPS RECORD_BYTES, a file of records.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "channels.cuh"

using namespace moepack;
using Values = Piece<BITS>;

int main(int, char** arguments) {
    std::ifstream file(arguments[1], std::ios::binary);
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    Records records = {};
    records.half_bytes = std::atoi(arguments[2]), records.groups = std::atoi(arguments[3]);
    records.bytes = std::atoi(arguments[4]);
    std::vector<float> half(records.groups * Values::GROUP);
    for (size_t at = 0; at < bytes.size(); at += records.bytes)
        for (int number = 0; number < 2; ++number) {
            const u8* record = reinterpret_cast<const u8*>(bytes.data()) + at;
            for (int piece = 0; piece < records.groups * Values::OF_GROUP; ++piece) {
                float value[Values::COLUMNS], scale = Values::scale(records, record, number, piece);
                Values::load(record + number * records.half_bytes, piece).values(value);
                for (int i = 0; i < Values::COLUMNS; ++i) half[Values::column(piece, i / 4) + i % 4] = scale * value[i];
            }
            std::fwrite(half.data(), 4, half.size(), stdout);
        }
}
