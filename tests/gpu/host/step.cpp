// Runs the launches of cuda/step.cu on the host.
//
// Usage: step X WEIGHT TYPE ROWS COLUMNS EPSILON THREADS: X [ROWS, COLUMNS] and WEIGHT [COLUMNS] of a Type as they are
// stored; the standard output is the result in the same form. Or: step Q K TYPE ROWS COLUMNS 0 THREADS COS SIN Q_HEADS
// K_HEADS: Q [ROWS, Q_HEADS, COLUMNS] and so on; the output is the rotated queries, then the keys.
#include "simt.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

// The bytes of a file at a multiple of 16.
static u8* read(const char* path, size_t bytes) {
    u8* data = static_cast<u8*>(std::aligned_alloc(16, (bytes / 16 + 1) * 16));
    std::FILE* file = std::fopen(path, "rb");
    if (!file || std::fread(data, 1, bytes, file) != bytes) std::exit(1);
    std::fclose(file);
    return data;
}

int main(int count, char** a) {
    Type type = Type(std::atoi(a[3]));
    int rows = std::atoi(a[4]), columns = std::atoi(a[5]), size = type == Type::f32 ? 4 : 2;
    if (count > 8) {
        int heads[2] = {std::atoi(a[10]), std::atoi(a[11])}, parts = (heads[0] + heads[1]) * rows * columns / 8;
        Activations given[4];
        for (int i = 0; i < 4; ++i)
            given[i] = {read(a[i < 2 ? 1 + i : 6 + i], size_t(i < 2 ? heads[i] : 1) * rows * columns * size), type, columns};
        std::vector<u8> out[2];
        for (int i = 0; i < 2; ++i) out[i].assign(size_t(heads[i]) * rows * columns * size, 0xff);
        int threads = std::atoi(a[7]);
        simt::launch({ceil_div(parts, threads), 1}, threads, 0, [&] {
            rotate(given[0], given[1], given[2], given[3], rows, heads[0], heads[1], out[0].data(), out[1].data());
        });
        for (auto& each : out) std::fwrite(each.data(), 1, each.size(), stdout);
        return 0;
    }
    Activations x = {read(a[1], size_t(rows) * columns * size), type, columns};
    Activations weight = {read(a[2], size_t(columns) * size), type, columns};
    std::vector<u8> out(size_t(rows) * columns * size, 0xff);
    float epsilon = std::strtof(a[6], nullptr);
    simt::launch({rows, 1}, std::atoi(a[7]), 0, [&] { rms_norm(x, weight, epsilon, out.data()); });
    std::fwrite(out.data(), 1, out.size(), stdout);
}
