// Runs the launches of a projection, or of gate and up projections together, of a layer with many tokens
// (cuda/common/grouped.cuh) on the host: those of FORMAT in SOURCE.
//
// Usage: grouped WEIGHTS OFFSET BLOCK_BYTES X TYPE TOKENS ROWS COLUMNS BLOCKS DEPTH INDEX TOP_K EXPERTS PRODUCT GATED
// [SECOND]: activations [TOKENS, COLUMNS, rounded up to 8] of a Type as it is stored; INDEX [TOKENS, TOP_K] i64; PRODUCT
// columns per product (16, 32, 64, 96); SECOND the weights of `up`. The standard output is the place of each slot (i32),
// then [places, ROWS] f32, and [TOKENS, ROWS] f32, the sums over the experts of a token.
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

// A copy at a multiple of 128 bytes, which lives as long as the process; without data, bytes of NaN.
template <class T>
static T* aligned(const void* from, size_t size) {
    u8* to = static_cast<u8*>(std::aligned_alloc(128, (size / 128 + 1) * 128));
    std::memset(to, 0xff, size);
    if (from) std::memcpy(to, from, size);
    return reinterpret_cast<T*>(to);
}

static std::vector<u8> first, second;

static FORMAT::Matrix matrix_of(const std::vector<u8>& weights, int offset, int block_bytes) {
    FORMAT::Matrix matrix = {};
    matrix.data = aligned<u8>(weights.data() + offset, weights.size() - offset), matrix.block_bytes = block_bytes;
    return matrix;
}

int main(int, char** a) {
    int tokens = std::atoi(a[6]), rows = std::atoi(a[7]), columns = std::atoi(a[8]), blocks = std::atoi(a[9]);
    int depth = std::atoi(a[10]), top_k = std::atoi(a[12]), experts = std::atoi(a[13]), product = std::atoi(a[14]);
    bool gated = std::atoi(a[15]);
    std::vector<u8> x = read(a[4]), index = read(a[11]);
    FORMAT::Matrix one = matrix_of(read(a[1]), std::atoi(a[2]), std::atoi(a[3])), two = one;
    if (gated) two = matrix_of(read(a[16]), std::atoi(a[2]), std::atoi(a[3]));
    int slots = tokens * top_k, tiles = least(slots, slots / product + experts), places = tiles * product;
    Routes routes = {aligned<int>(nullptr, 4), aligned<int>(nullptr, 4 * tiles), aligned<int>(nullptr, 4 * tiles),
                     aligned<int>(nullptr, 4 * places), aligned<int>(nullptr, 4 * slots)};
    int chunks = ceil_div(columns, CHUNK), of_tile = gated ? TILE_BLOCKS / 2 : TILE_BLOCKS;
    Layout layout = {{aligned<u8>(x.data(), x.size()), Type(std::atoi(a[5])), ceil_div(columns, 8) * 8}, routes};
    layout.cells = aligned<u8>(nullptr, size_t(places) * chunks * cell_bytes<FORMAT>(1));
    layout.scales = aligned<float>(nullptr, 4 * places), layout.units = nullptr;
    layout.chunks = chunks, layout.columns = product, layout.top_k = top_k;
    Grouped grouped = {routes, layout.cells, layout.scales, aligned<float>(nullptr, size_t(4) * places * rows)};
    grouped.rows = rows, grouped.chunks = chunks, grouped.row_tiles = ceil_div(ceil_div(rows, BLOCK_ROWS), of_tile);
    float* out = aligned<float>(nullptr, size_t(4) * tokens * rows);
    std::vector<float> ones(slots, 1.0f);
    std::memset(shared_memory, 0xff, sizeof shared_memory);
    std::thread(simt::make_copies).detach();

    const i64* chosen = aligned<i64>(index.data(), index.size());
    simt::launch({1, 1}, ROUTE_THREADS, 0, [&] { route(routes, chosen, slots, experts, product); });
    simt::launch({places / LAYOUT_PLACES, 1}, LAYOUT_THREADS, 0, [&] { lay_out(layout); });
    auto multiply = [&]<int N>() {
        int shared = depth * Ring<FORMAT, N>::STAGE + (gated ? of_tile * Gating<N>::BYTES : 0);
        simt::launch({blocks, 1}, LINEAR_THREADS, shared, [&] {
            if (gated) multiply_grouped<FORMAT, N, true>(grouped, one, two);
            else multiply_grouped<FORMAT, N, false>(grouped, one, one);
        });
    };
    if (product == 16) multiply.operator()<2>();
    else if (product == 32) multiply.operator()<4>();
    else if (product == 64) multiply.operator()<8>();
    else multiply.operator()<12>();
    simt::launch({ceil_div(rows, 1024), tokens}, 256, 0,
                 [&] { add(routes.place, ones.data(), grouped.out, out, top_k, rows); });
    std::fwrite(routes.place, 4, slots, stdout);
    std::fwrite(grouped.out, 4, size_t(places) * rows, stdout);
    std::fwrite(out, 4, size_t(tokens) * rows, stdout);
    std::fflush(stdout);
    std::_Exit(0);
}
