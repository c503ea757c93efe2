// Runs the launch of cuda/attention.cu on the host.
//
// Usage: attention SEQUENCES GROUPS GROUP CAPACITY SPLITS SCALE QUERIES KEYS VALUES MASK SINKS: files of 16-bit values as
// the struct Attention describes them; MASK and SINKS may be "-". The standard output is the result.
//
// With WINDOW ROOMS behind them, each sequence reads its keys and values by `Rooms`, in 8 bits if NARROW: ROOMS has the
// index of each sequence's buffers in KEYS and VALUES and the place of its last token, 64-bit.
#include "files.hpp"
#include "products.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

int main(int count, char** a) {
    int sequences = std::atoi(a[1]), groups = std::atoi(a[2]), group = std::atoi(a[3]), capacity = std::atoi(a[4]);
    int splits = std::atoi(a[5]), rows = sequences * groups * ceil_div(group, 8), heads = groups * group;
    size_t tokens = size_t(sequences) * groups * capacity;
    std::vector<u16> out(size_t(sequences) * heads * VALUE_WIDTH, 0xffff);
    std::vector<float4> parts(size_t(rows) * splits * 8 * VALUE_WIDTH / 4, float4{NAN, NAN, NAN, NAN});
    std::vector<float2> stats(size_t(rows) * splits * 8, float2{NAN, NAN});
    std::vector<int> arrived(rows);
    u8* keys = read<u8>(a[8], tokens * attention::KEY_ROW);
    u8* values = read<u8>(a[9], tokens * attention::VALUE_ROW);
    std::vector<i64> keys_of, values_of, capacities(sequences, capacity);
    for (int i = 0; i < sequences; ++i) {
        size_t room = size_t(i) * groups * capacity;
        keys_of.push_back(reinterpret_cast<i64>(keys + room * attention::KEY_ROW));
        values_of.push_back(reinterpret_cast<i64>(values + room * attention::VALUE_ROW));
    }
    Rooms rooms = {};
    if (count > 12) {
        i64* places = read<i64>(a[13], 2 * sequences);
        rooms = {keys_of.data(), values_of.data(), capacities.data(), places, places + sequences, NARROW, std::atoi(a[12])};
    }
    Attention attention = {
        read<u16>(a[7], size_t(sequences) * heads * KEY_WIDTH), reinterpret_cast<u16*>(keys),
        reinterpret_cast<u16*>(values),
        read<u16>(a[10], size_t(sequences) * capacity), read<u16>(a[11], heads), out.data(), &stats[0].x, &parts[0].x,
        arrived.data(), groups, group, capacity, rooms, std::strtof(a[6], nullptr)};
    for (int launch = 0; launch < 2; ++launch)  // the second one finds `arrived` as the first one left it
        simt::launch({splits, rows}, attention::WARPS * WARP, 0, [&] { attend(attention); });
    std::fwrite(out.data(), 2, out.size(), stdout);
}
