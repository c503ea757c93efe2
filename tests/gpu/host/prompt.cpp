// Runs the launch of cuda/prompt.cu on the host.
//
// Usage: prompt SEQUENCES ROWS GROUPS GROUP WINDOW SCALE QUERIES SINKS PLACES KEYS VALUES CAPACITY [KEYS VALUES CAPACITY]:
// files of 16-bit values as the struct Prompt describes them; SINKS may be "-". PLACES has the sequence and the place of
// each row, 64-bit. Each sequence has its own keys and values, in 8 bits if NARROW. The standard output is the result.
#include "files.hpp"
#include "products.hpp"

namespace moepack {
// Copies that were begun, by the groups of this thread; they are made when they are waited for.
inline thread_local std::vector<std::function<void()>> begun_copies;
inline thread_local std::vector<std::vector<std::function<void()>>> copy_groups;

void copy_async(Shared to, const void* from, int bytes) {
    if (to % 16 || reinterpret_cast<u64>(from) % 16) std::abort();
    begun_copies.push_back([=] {
        std::memset(shared_memory + to, 0, 16);
        std::memcpy(shared_memory + to, from, bytes);
    });
}
void commit_copies() {
    copy_groups.emplace_back().swap(begun_copies);
}
template <int LATEST>
void wait_copies() {
    for (; copy_groups.size() > LATEST; copy_groups.erase(copy_groups.begin()))
        for (auto& copy : copy_groups.front()) copy();
}
}  // namespace moepack

#include SOURCE

using namespace moepack;

constexpr int SHARED = NARROW ? 4 * prompt::STAGE + 4 * prompt::CODES : 8 * prompt::STAGE;
alignas(128) u8 moepack::shared_memory[SHARED];

int main(int, char** a) {
    int sequences = std::atoi(a[1]), rows = std::atoi(a[2]), groups = std::atoi(a[3]), group = std::atoi(a[4]);
    size_t size = size_t(rows) * groups * group * WIDTH;
    std::vector<u16> out(size, 0xffff);
    i64* places = read<i64>(a[9], 2 * rows);
    std::vector<i64> keys, values, capacity;
    for (int i = 0; i < sequences; ++i) {
        capacity.push_back(std::atoi(a[12 + 3 * i]));
        size_t bytes = size_t(groups) * capacity.back() * prompt::ROW;
        keys.push_back(reinterpret_cast<i64>(read<u8>(a[10 + 3 * i], bytes)));
        values.push_back(reinterpret_cast<i64>(read<u8>(a[11 + 3 * i], bytes)));
    }
    Prompt prompt = {read<u16>(a[7], size), read<u16>(a[8], groups * group), out.data(),
                     {keys.data(), values.data(), capacity.data(), places, places + rows, NARROW, std::atoi(a[5])},
                     groups, group, std::strtof(a[6], nullptr)};
    Dimensions grid = {rows / prompt::ROWS, groups * ceil_div(group, HEADS)};
    simt::launch(grid, prompt::WARPS * WARP, SHARED, [&] { attend(prompt); });
    std::fwrite(out.data(), 2, out.size(), stdout);
}
