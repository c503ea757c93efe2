// Runs the launch of cuda/draw.cu on the host.
//
// Usage: draw LOGITS DRAWS TYPE ROWS COLUMNS THREADS: files of values as the struct Draw describes them. The standard
// output is the tokens, 64-bit.
#include "files.hpp"
#include "simt.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

u64 moepack::load_number_of_block(Shared, int) {
    std::abort();
}

template <bool>
void moepack::wait_for_cluster() {
    std::abort();
}

int main(int, char** a) {
    Type type = Type(std::atoi(a[3]));
    int rows = std::atoi(a[4]), columns = std::atoi(a[5]);
    std::vector<i64> tokens(rows, -7);
    Draw draw = {read<u8>(a[1], size_t(rows) * columns * (type == Type::f32 ? 4 : 2)), type,
                 read<double>(a[2], 5 * rows), tokens.data(), rows, columns, 1};
    simt::launch({rows, 1}, std::atoi(a[6]), 0, [&] { choose(draw); });
    std::fwrite(tokens.data(), sizeof(i64), tokens.size(), stdout);
}
