// Runs the launch of cuda/router.cu on the host.
//
// Usage: router LOGITS CORRECTION TYPE TOKENS EXPERTS TOP_K SIGMOID NORMALIZED SCALE: files of values as the struct Choice
// describes them; CORRECTION may be "-". The standard output is the index, then the weights.
#include "files.hpp"
#include "simt.hpp"

#include SOURCE

using namespace moepack;

alignas(128) u8 moepack::shared_memory[1];

int main(int, char** a) {
    Type type = Type(std::atoi(a[3]));
    int tokens = std::atoi(a[4]), experts = std::atoi(a[5]), top_k = std::atoi(a[6]);
    std::vector<i64> index(size_t(tokens) * top_k, -1);
    std::vector<float> weights(index.size(), NAN);
    Choice choice = {read<u8>(a[1], size_t(tokens) * experts * (type == Type::f32 ? 4 : 2)), type,
                     read<float>(a[2], experts), index.data(), weights.data(), tokens, experts, top_k,
                     std::atoi(a[7]), std::atoi(a[8]), std::strtof(a[9], nullptr)};
    simt::launch({tokens, 1}, WARP, 0, [&] { choose(choice); });
    std::fwrite(index.data(), sizeof(i64), index.size(), stdout);
    std::fwrite(weights.data(), sizeof(float), weights.size(), stdout);
}
