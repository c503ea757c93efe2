// Runs the launches of cuda/trellis.cu on the host, block after block of columns.
//
// Usage: trellis SOURCE UPPER PIVOTS PRICES LISTS RUNS EXPERTS ROWS COLUMNS LISTS INDICES: files of values as the struct
// Trellis describes them. The standard output is the codes, then the compensated weights.
#include "files.hpp"
#include "simt.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

int main(int, char** a) {
    int experts = std::atoi(a[7]), rows = std::atoi(a[8]), columns = std::atoi(a[9]);
    int lists = std::atoi(a[10]), indices = std::atoi(a[11]);
    size_t weights = size_t(experts) * rows * columns;
    std::vector<int> codes(weights, -1);
    std::vector<u8> states(size_t(experts) * rows, 9);
    float *source = read<float>(a[1], weights), *work = read<float>(a[1], weights);
    Trellis t = {source, work, codes.data(), states.data(), read<float>(a[2], size_t(experts) * columns * columns),
                 read<float>(a[3], size_t(experts) * columns), read<float>(a[4], experts),
                 read<float>(a[5], size_t(lists) * indices * 2), read<int>(a[6], size_t(experts) * rows),
                 experts, rows, columns, indices, 0, 0, 0};
    for (int lane = 0, start = 0; lane < 4; ++lane) {
        int end = start + (columns + 3 - lane) / 4;
        t.first = 1;
        for (; start < end; start += t.count) {
            t.start = start, t.count = least(trellis::BLOCK, end - start);
            simt::launch({ceil_div(rows, trellis::ROWS), experts}, 64, 0, [&] { search(t); });
            if (int later = columns - start - t.count)
                simt::launch({ceil_div(later, trellis::TILE), ceil_div(rows, trellis::TILE) * experts},
                             trellis::TILE_THREADS, 0, [&] { spread(t); });
            t.first = 0;
        }
    }
    std::fwrite(codes.data(), sizeof(int), weights, stdout);
    std::fwrite(work, sizeof(float), weights, stdout);
}
