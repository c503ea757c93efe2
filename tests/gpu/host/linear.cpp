// Runs the launches of a linear layer (cuda/common/linear.cuh) on the host: those of FORMAT in SOURCE.
//
// Usage: linear WEIGHTS OFFSET BLOCK_BYTES X TYPE TOKENS ROWS COLUMNS BLOCKS DEPTH OWN: activations [TOKENS, COLUMNS,
// rounded up to 8] of a Type as it is stored; BLOCKS blocks, rings of DEPTH items, OWN whether blocks make their own
// cells; [TOKENS, ROWS] f32 on the standard output.
#include "simt.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[256 << 10];

static std::vector<u8> read(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    if (!file) std::exit(1);
    std::fseek(file, 0, SEEK_END);
    std::vector<u8> data(std::ftell(file));
    std::rewind(file);
    if (std::fread(data.data(), 1, data.size(), file) != data.size()) std::exit(1);
    std::fclose(file);
    return data;
}

// A copy at a multiple of 128 bytes, which lives as long as the process.
static u8* aligned(const u8* from, size_t size) {
    u8* to = static_cast<u8*>(std::aligned_alloc(128, (size / 128 + 1) * 128));
    std::memset(to, 0xff, size);
    if (from) std::memcpy(to, from, size);
    return to;
}

int main(int, char** arguments) {
    std::vector<u8> weights = read(arguments[1]), x = read(arguments[4]);
    int number[12];
    for (int i = 2; i < 12; ++i) number[i] = i == 4 ? 0 : std::atoi(arguments[i]);
    Linear<FORMAT> p = {};
    p.tokens = number[6], p.rows = number[7], p.blocks = number[9], p.ahead = 2;
    p.columns = p.tokens <= 8 ? 8 : p.tokens <= 16 ? 16 : p.tokens <= 32 ? 32 : 64;
    p.chunks = ceil_div(number[8], CHUNK), p.items = p.chunks * ceil_div(p.rows, TILE_ROWS);
    p.x = {aligned(x.data(), x.size()), Type(number[5]), ceil_div(number[8], 8) * 8};
    p.matrix.data = aligned(weights.data() + number[2], weights.size() - number[2]);
    p.matrix.block_bytes = number[3];
    p.own = number[11] ? least(ceil_div(p.items, p.blocks), p.chunks) : 0;
    size_t outputs = size_t(p.tokens) * p.rows;
    p.cells = aligned(nullptr, size_t(p.chunks) * cell_bytes<FORMAT>(p.columns));
    p.scales = reinterpret_cast<float*>(aligned(nullptr, 4 * p.tokens));
    p.out = reinterpret_cast<float*>(aligned(nullptr, 4 * outputs));
    p.parts = reinterpret_cast<float*>(aligned(nullptr, 4 * outputs * (p.chunks * p.blocks / p.items + 2)));
    std::memset(shared_memory, 0xff, sizeof shared_memory);
    std::thread(simt::make_copies).detach();

    if (!p.own) simt::launch({2, p.tokens}, 512, 0, [&] { prepare(p); });
    auto multiply = [&]<int N>() {
        int shared = number[10] * Ring<FORMAT, N>::STAGE + p.own * Ring<FORMAT, N>::CELLS;
        simt::launch({p.blocks, 1}, LINEAR_THREADS, shared, [&] { multiply_linear<FORMAT, N>(p); });
    };
    if (p.columns == 8) multiply.operator()<1>();
    else if (p.columns == 16) multiply.operator()<2>();
    else if (p.columns == 32) multiply.operator()<4>();
    else multiply.operator()<8>();
    simt::launch({ceil_div(p.rows, TILE_ROWS), p.tokens}, TILE_ROWS, 0, [&] { add(p); });
    std::fwrite(p.out, 4, outputs, stdout);
    std::fflush(stdout);
    std::_Exit(0);
}
