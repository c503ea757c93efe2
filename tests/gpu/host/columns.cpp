// Runs a launch of cuda/columns.cu on the host.
//
// Usage: columns KIND FREE ERRORS FACTORS SCALES OFFSETS GROUPS LEVELS EXPERTS ROWS COUNT NUMBER MIDDLE LARGEST. KIND is
// `round` or `descend`; the files are as the structs describe them, without gaps. ERRORS holds the codes of `descend`, and
// GROUPS one list per expert. The standard output is errors, values, left and codes of `round`, codes and changes of `descend`.
#include "files.hpp"
#include "simt.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

int main(int, char** a) {
    bool rounds = !std::strcmp(a[1], "round");
    int experts = std::atoi(a[9]), rows = std::atoi(a[10]), count = std::atoi(a[11]), number = std::atoi(a[12]);
    size_t weights = size_t(experts) * rows * count, parameters = size_t(experts) * rows * number;
    Grid grid = {read<float>(a[5], parameters), read<float>(a[6], parameters), read<int>(a[7], size_t(experts) * count),
                 number, count, std::atoi(a[13]), std::atoi(a[14]), read<float>(a[8], size_t(experts) * rows * 2)};
    float *free = read<float>(a[2], weights), *errors = read<float>(a[3], weights);
    float* factors = read<float>(a[4], size_t(experts) * count * count);
    std::vector<float> values(weights), left(weights);
    std::vector<u8> codes(weights);
    i64 one = i64(rows) * count, square = i64(count) * count;
    Dimensions blocks = {ceil_div(rows, columns::THREADS), experts};
    if (rounds) {
        Rounding r = {free, errors, values.data(), left.data(), codes.data(), factors, grid,
                      one, one, one, one, one, square, count, rows, count};
        simt::launch(blocks, columns::THREADS, 0, [&] { columns::round(r); });
    } else {
        Descent d = {free, errors, values.data(), factors, grid, one, one, one, square, count, rows, count};
        simt::launch(blocks, columns::THREADS, 0, [&] { columns::descend(d); });
    }
    std::fwrite(errors, sizeof(float), weights, stdout);
    std::fwrite(values.data(), sizeof(float), weights, stdout);
    if (rounds) {
        std::fwrite(left.data(), sizeof(float), weights, stdout);
        std::fwrite(codes.data(), 1, weights, stdout);
    }
}
