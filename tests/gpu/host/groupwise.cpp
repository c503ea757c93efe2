// Runs Groupwise::Source::fetch and ::multiply for the 32 lanes of a warp on the host, and prints the weights that they multiply.
//
// Usage: groupwise FILE OFFSET BLOCK_BYTES BLOCKS COLUMNS: for each block of 16 rows and each column the products of its
// chunk with a token that is one in that column, [BLOCKS, 16, COLUMNS] f32 on the standard output.
//
// A product needs the operands of all lanes: each chunk runs twice, once to record them and once to use the results. Eight
// tokens are eight columns, so that a chunk takes sixteen such pairs.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "groupwise.cu"

using namespace moepack;

struct Operands {
    u32 a[4], b[2];
};

static std::vector<Operands> recorded[WARP];
static size_t next_product[WARP];
static int this_lane;
static bool recording;

static float half_of(u32 pair, int i) {
    return half_value(u16(pair >> (16 * i)));
}

// The 16 values of a row of operand A, and of a column of B, in the order of k.
static float value_of_a(size_t product, int row, int k) {
    const Operands& o = recorded[row % 8 * 4 + k % 8 / 2][product];
    return half_of(o.a[row / 8 + k / 8 * 2], k % 2);
}

static float value_of_b(size_t product, int k, int column) {
    const Operands& o = recorded[column * 4 + k % 8 / 2][product];
    return half_of(o.b[k / 8], k % 2);
}

void moepack::multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (recording) return recorded[this_lane].push_back({{a0, a1, a2, a3}, {b0, b1}});
    size_t product = next_product[this_lane]++;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k)
            c[i] += value_of_a(product, this_lane / 4 + i / 2 * 8, k) * value_of_b(product, k, this_lane % 4 * 2 + i % 2);
}

void moepack::copy_async(Shared to, const void* from, int bytes, u64) {
    std::memset(to, 0, 16);
    std::memcpy(to, from, bytes);
}

// Cells of eight tokens, which are one in columns 8 * part to 8 * part + 7 of the chunk.
static void write_cells(std::vector<u8>& cells, int part) {
    cells.assign(8 * (VALUE_BYTES + 4 * Groupwise::NOTES), 0);
    float* notes = reinterpret_cast<float*>(cells.data() + 8 * VALUE_BYTES);
    static const int order[4] = {0, 2, 1, 3};
    for (int token = 0; token < 8; ++token) {
        int column = 8 * part + token;
        Place place = Groupwise::place(column / 4);
        u8* to = cells.data() + (place.step * 8 + token) * STEP_BYTES + place.lane * 16 + place.half * 8;
        reinterpret_cast<u16*>(to)[order[column % 4]] = half_bits(1);
        notes[token * Groupwise::NOTES] = 1;
        if (Groupwise::SUMS) notes[token * Groupwise::NOTES + 1 + column / Groupwise::WIDTH] = 1;
    }
}

static void multiply_chunk(const u8* stage, int part, float (&values)[16][8]) {
    std::vector<u8> cells;
    write_cells(cells, part);
    for (int lane = 0; lane < WARP; ++lane) recorded[lane].clear(), next_product[lane] = 0;
    for (bool record : {true, false})
        for (int lane = 0; lane < WARP; ++lane) {
            recording = record, this_lane = lane;
            float sum[1][4] = {};
            Groupwise::multiply<1>(Groupwise::Lane(lane), stage, cells.data(), 8, sum);
            for (int i = 0; i < 4; ++i) values[lane / 4 * 2 + i / 2][lane % 4 * 2 + i % 2] = sum[0][i];
        }
}

int main(int, char** arguments) {
    long offset = std::atol(arguments[2]), block_bytes = std::atol(arguments[3]);
    int blocks = std::atoi(arguments[4]), columns = std::atoi(arguments[5]);
    std::vector<u8> data(blocks * block_bytes);
    std::FILE* file = std::fopen(arguments[1], "rb");
    if (!file || std::fseek(file, offset, SEEK_SET) || std::fread(data.data(), 1, data.size(), file) != data.size()) return 1;
    std::fclose(file);
    Groupwise::Matrix matrix = {data.data(), block_bytes};
    alignas(16) static u8 stage[Groupwise::STAGE];
    std::vector<float> out(size_t(16) * columns);
    for (int block = 0; block < blocks; ++block) {
        for (int chunk = 0; chunk * CHUNK < columns; ++chunk) {
            for (int lane = 0; lane < WARP; ++lane) Groupwise::Source(matrix, block, chunk, lane).fetch(stage, 0);
            for (int part = 0; part < CHUNK / 8; ++part) {
                float values[16][8];
                multiply_chunk(stage, part, values);
                for (int row = 0; row < 16; ++row)
                    for (int i = 0, column; i < 8; ++i)
                        if ((column = chunk * CHUNK + part * 8 + i) < columns) out[row * columns + column] = values[row][i];
            }
        }
        std::fwrite(out.data(), 4, out.size(), stdout);
    }
}
