// Runs the launch of cuda/attention.cu on the host.
//
// Usage: attention SEQUENCES GROUPS GROUP CAPACITY SPLITS SCALE QUERIES KEYS VALUES MASK SINKS: files of 16-bit values as
// the struct Attention describes them; MASK and SINKS may be "-". The standard output is the result.
#include "files.hpp"
#include "products.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

int main(int, char** a) {
    int sequences = std::atoi(a[1]), groups = std::atoi(a[2]), group = std::atoi(a[3]), capacity = std::atoi(a[4]);
    int splits = std::atoi(a[5]), rows = sequences * groups * ceil_div(group, 8), heads = groups * group;
    size_t tokens = size_t(sequences) * groups * capacity;
    std::vector<u16> out(size_t(sequences) * heads * VALUE_WIDTH, 0xffff);
    std::vector<float4> parts(size_t(rows) * splits * 8 * VALUE_WIDTH / 4, float4{NAN, NAN, NAN, NAN});
    std::vector<float2> stats(size_t(rows) * splits * 8, float2{NAN, NAN});
    std::vector<int> arrived(rows);
    Attention attention = {
        read<u16>(a[7], size_t(sequences) * heads * KEY_WIDTH), read<u16>(a[8], tokens * KEY_WIDTH), read<u16>(a[9], tokens * VALUE_WIDTH),
        read<u16>(a[10], size_t(sequences) * capacity), read<u16>(a[11], heads), out.data(), &stats[0].x, &parts[0].x,
        arrived.data(), groups, group, capacity, std::strtof(a[6], nullptr)};
    for (int launch = 0; launch < 2; ++launch)  // the second one finds `arrived` as the first one left it
        simt::launch({splits, rows}, attention::WARPS * WARP, 0, [&] { attend(attention); });
    std::fwrite(out.data(), 2, out.size(), stdout);
}
