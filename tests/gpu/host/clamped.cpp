// Runs the launches of cuda/clamped.cu on the host.
//
// Usage: clamped gate GATE UP EXPERT BIAS TYPE ROWS COLUMNS EXPERTS STRIDE UP_AT ALPHA LIMIT, or clamped sum OUTPUTS PLACE
// EXPERT WEIGHTS BIAS TYPE TOKENS TOP_K COLUMNS EXPERTS PLACES: files of values as the structs describe them; PLACE and
// BIAS may be "-". The standard output is the result; values that are not written are NaN.
#include <string>

#include "files.hpp"
#include "simt.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

static std::vector<float> gated(char** a) {
    Type type = Type(std::atoi(a[6]));
    int rows = std::atoi(a[7]), columns = std::atoi(a[8]), experts = std::atoi(a[9]);
    size_t values = size_t(rows) * columns, size = type == Type::f32 ? 4 : 2;
    std::vector<float> inner(values, NAN);
    Clamped clamped = {read<float>(a[2], values), read<float>(a[3], values), read<i64>(a[4], rows),
                       read<u8>(a[5], size * experts * 2 * columns), type, inner.data(), columns, experts,
                       std::atoi(a[10]), std::atoi(a[11]), std::strtof(a[12], nullptr), std::strtof(a[13], nullptr)};
    simt::launch({rows, ceil_div(columns, 4 * 32)}, 32, 0, [&] { gate(clamped); });
    return inner;
}

static std::vector<float> summed(char** a) {
    Type type = Type(std::atoi(a[7]));
    int tokens = std::atoi(a[8]), top_k = std::atoi(a[9]), columns = std::atoi(a[10]), experts = std::atoi(a[11]);
    size_t slots = size_t(tokens) * top_k, size = type == Type::f32 ? 4 : 2, places = std::atoi(a[12]);
    std::vector<float> out(size_t(tokens) * columns, NAN);
    Biased biased = {read<float>(a[2], places * columns), read<int>(a[3], slots), read<i64>(a[4], slots),
                     read<float>(a[5], slots), read<u8>(a[6], size * experts * columns), type, out.data(), top_k,
                     columns, experts};
    simt::launch({tokens, ceil_div(columns, 4 * 32)}, 32, 0, [&] { sum(biased); });
    return out;
}

int main(int, char** a) {
    std::vector<float> out = a[1] == std::string("gate") ? gated(a) : summed(a);
    std::fwrite(out.data(), sizeof(float), out.size(), stdout);
}
