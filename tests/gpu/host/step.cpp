// Runs the launches of cuda/step.cu on the host.
//
// Usage: step X WEIGHT TYPE ROWS COLUMNS EPSILON THREADS LATE: X [ROWS, COLUMNS] and WEIGHT [COLUMNS] of a Type as they are
// stored; the standard output is the result in the same form. Or: step Q K TYPE ROWS COLUMNS 0 THREADS COS SIN Q_HEADS
// K_HEADS: Q [ROWS, Q_HEADS, COLUMNS] and so on; the output is the rotated queries, then the keys.
//
// Or: step add X ADDEND WEIGHT TYPE ROWS COLUMNS EPSILON THREADS LATE: the output is the sum, then its norm; ADDEND is f32.
// Or: step heads QKV Q_NORM K_NORM COS SIN TYPE SEQUENCES Q_HEADS K_HEADS COLUMNS ROTATED TURNS EPSILON CAPACITY PLACE:
// QKV [SEQUENCES, all heads, COLUMNS], COS [SEQUENCES, TURNS]; the output is the queries, then both buffers, which begin
// as zeros. With ROOMS behind them, the rows are tokens that are written by `Rooms`: ROOMS has the index of each row's
// buffers and its place; with NARROW behind that, in 8 bits.
#include <string>

#include "files.hpp"
#include "simt.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

// Rows of a file; none for "-".
static Activations rows_of(const char* path, int rows, int columns, Type type) {
    return {read<u8>(path, size_t(rows) * columns * (type == Type::f32 ? 4 : 2)), type, columns};
}

static void add(char** a) {
    Type type = Type(std::atoi(a[5]));
    int rows = std::atoi(a[6]), columns = std::atoi(a[7]);
    Activations x = rows_of(a[2], rows, columns, type), addend = rows_of(a[3], rows, columns, Type::f32);
    Activations weight = rows_of(a[4], 1, columns, type);
    std::vector<u8> out[2];
    for (auto& each : out) each.assign(size_t(rows) * columns * (type == Type::f32 ? 4 : 2), 0xff);
    simt::launch({rows, 1}, std::atoi(a[9]), 0, [&] {
        add_norm(x, addend, weight, std::strtof(a[8], nullptr), std::atoi(a[10]), out[0].data(), out[1].data());
    });
    for (auto& each : out) std::fwrite(each.data(), 1, each.size(), stdout);
}

static void prepare(int count, char** a) {
    Type type = Type(std::atoi(a[7]));
    int sequences = std::atoi(a[8]), queries = std::atoi(a[9]), keys = std::atoi(a[10]), columns = std::atoi(a[11]);
    int rotated = std::atoi(a[12]), turns = std::atoi(a[13]), capacity = std::atoi(a[15]), all = queries + 2 * keys;
    i64 place = std::atoi(a[16]), size = type == Type::f32 ? 4 : 2;
    Activations rows = rows_of(a[2], sequences * all, columns, type);
    auto from = [&](int head) {
        return Activations{static_cast<const u8*>(rows.data) + head * columns * size, type, columns};
    };
    std::vector<u8> out[3];
    bool narrow = count > 18;
    size_t row = columns * size, held = narrow ? columns + NARROW_SCALE : row;
    for (int i = 0; i < 3; ++i) out[i].assign(sequences * (i ? keys * capacity * held : queries * row), 0);
    std::vector<i64> keys_of, values_of, capacities(sequences, capacity);
    for (int i = 0; i < sequences; ++i) {
        size_t room = i * keys * capacity * held;
        keys_of.push_back(reinterpret_cast<i64>(out[1].data() + room));
        values_of.push_back(reinterpret_cast<i64>(out[2].data() + room));
    }
    Rooms rooms = {};
    if (count > 17) {
        i64* places = read<i64>(a[17], 2 * sequences);
        rooms = {keys_of.data(), values_of.data(), capacities.data(), places, places + sequences, narrow, 0};
    }
    Heads heads = {from(0), from(queries), from(queries + keys), rows_of(a[3], 1, columns, type),
                   rows_of(a[4], 1, columns, type), rows_of(a[5], sequences, turns, type),
                   rows_of(a[6], sequences, turns, type), &place, out[0].data(), out[1].data(), out[2].data(),
                   std::strtof(a[14], nullptr), queries, keys, all, all, all, capacity, rotated, rooms};
    simt::launch({ceil_div(sequences * all, 2), 1}, 64, 0, [&] { prepare_heads(heads, sequences * all); });
    for (auto& each : out) std::fwrite(each.data(), 1, each.size(), stdout);
}

int main(int count, char** a) {
    if (a[1] == std::string("add")) return add(a), 0;
    if (a[1] == std::string("heads")) return prepare(count, a), 0;
    Type type = Type(std::atoi(a[3]));
    int rows = std::atoi(a[4]), columns = std::atoi(a[5]), size = type == Type::f32 ? 4 : 2;
    if (count > 9) {
        int heads[2] = {std::atoi(a[10]), std::atoi(a[11])}, parts = (heads[0] + heads[1]) * rows * columns / 8;
        Activations given[4];
        for (int i = 0; i < 4; ++i)
            given[i] = {read<u8>(a[i < 2 ? 1 + i : 6 + i], size_t(i < 2 ? heads[i] : 1) * rows * columns * size), type, columns};
        std::vector<u8> out[2];
        for (int i = 0; i < 2; ++i) out[i].assign(size_t(heads[i]) * rows * columns * size, 0xff);
        int threads = std::atoi(a[7]);
        simt::launch({ceil_div(parts, threads), 1}, threads, 0, [&] {
            rotate(given[0], given[1], given[2], given[3], rows, heads[0], heads[1], out[0].data(), out[1].data());
        });
        for (auto& each : out) std::fwrite(each.data(), 1, each.size(), stdout);
        return 0;
    }
    Activations x = {read<u8>(a[1], size_t(rows) * columns * size), type, columns};
    Activations weight = {read<u8>(a[2], size_t(columns) * size), type, columns};
    std::vector<u8> out(size_t(rows) * columns * size, 0xff);
    float epsilon = std::strtof(a[6], nullptr);
    simt::launch({rows, 1}, std::atoi(a[7]), 0, [&] { rms_norm(x, weight, epsilon, std::atoi(a[8]), out.data()); });
    std::fwrite(out.data(), 1, out.size(), stdout);
}
