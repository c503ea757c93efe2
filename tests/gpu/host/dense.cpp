// Runs the launch of cuda/dense.cu on the host.
//
// Usage: dense X TOKENS COLUMNS (ROWS WEIGHT BIAS) x 3: files of 16-bit values as the struct Dense describes them; "-" for
// missing ones. The standard output is the result.
#include "files.hpp"
#include "products.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

int main(int, char** a) {
    int tokens = std::atoi(a[2]), columns = std::atoi(a[3]), rows[3], all = 0;
    const u16 *weights[3], *biases[3];
    for (int i = 0; i < 3; ++i) {
        all += rows[i] = std::atoi(a[4 + 3 * i]);
        weights[i] = read<u16>(a[5 + 3 * i], size_t(rows[i]) * columns), biases[i] = read<u16>(a[6 + 3 * i], rows[i]);
    }
    std::vector<u16> out(size_t(tokens) * all, 0xffff);
    Dense dense = {weights[0], weights[1], weights[2], biases[0], biases[1], biases[2], rows[0], rows[1], rows[2], columns,
                   read<u16>(a[1], size_t(tokens) * columns), out.data(), tokens};
    simt::launch({all / 16, 1}, TEAM * WARP, 0, [&] { multiply(dense); });
    std::fwrite(out.data(), 2, out.size(), stdout);
}
