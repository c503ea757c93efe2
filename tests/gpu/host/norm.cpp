// Runs the launch of cuda/norm.cu on the host.
//
// Usage: norm X WEIGHT TYPE ROWS COLUMNS EPSILON THREADS: X [ROWS, COLUMNS] and WEIGHT [COLUMNS] of a Type as they are
// stored; the standard output is the result in the same form.
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

int main(int, char** a) {
    Type type = Type(std::atoi(a[3]));
    int rows = std::atoi(a[4]), columns = std::atoi(a[5]), size = type == Type::f32 ? 4 : 2;
    Activations x = {read(a[1], size_t(rows) * columns * size), type, columns};
    Activations weight = {read(a[2], size_t(columns) * size), type, columns};
    std::vector<u8> out(size_t(rows) * columns * size, 0xff);
    float epsilon = std::strtof(a[6], nullptr);
    simt::launch({rows, 1}, std::atoi(a[7]), 0, [&] { rms_norm(x, weight, epsilon, out.data()); });
    std::fwrite(out.data(), 1, out.size(), stdout);
}
