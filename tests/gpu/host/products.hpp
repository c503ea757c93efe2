// Products of a warp on tensor cores, and other exchanges of its lanes, for kernels that run under simt.hpp.
#pragma once
#include "simt.hpp"

namespace simt {

// The words of all lanes, as operands of a product or parts of a matrix.
inline u32 pieces[64][WARP][6];

// Calls use(words of the lanes) after all lanes of the warp have given theirs.
template <int N, class Use>
void gather(const u32 (&mine)[N], Use use) {
    auto& all = pieces[threadIdx.x / WARP];
    std::memcpy(all[threadIdx.x % WARP], mine, sizeof mine);
    warp().meeting.arrive_and_wait();
    use(all);
    warp().meeting.arrive_and_wait();
}

// mma.sync.m16n8k16: see the PTX manual for the places of values.
template <class ValueOf>
void product(float (&c)[4], const u32 (&mine)[6], ValueOf value_of) {
    gather(mine, [&](auto& all) {
        int lane = threadIdx.x % WARP;
        for (int i = 0; i < 4; ++i) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            for (int k = 0; k < 16; ++k) {
                int at = k % 8 / 2, shift = k % 2 * 16;
                u32 a = all[row % 8 * 4 + at][row / 8 + k / 8 * 2], b = all[column * 4 + at][4 + k / 8];
                c[i] += value_of(u16(a >> shift)) * value_of(u16(b >> shift));
            }
        }
    });
}
}  // namespace simt

inline bool __any_sync(unsigned, bool value) {
    return simt::exchange(value, [](auto& word) {
        unsigned any = 0;
        for (unsigned each : word) any |= each;
        return any;
    });
}
inline void __threadfence() {}

namespace moepack {
inline void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    simt::product(c, {a0, a1, a2, a3, b0, b1}, [](u16 bits) { return float(simt::bits_of<_Float16>(bits)); });
}
inline void multiply_add_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    simt::product(c, {a0, a1, a2, a3, b0, b1}, [](u16 bits) { return simt::bits_of<float>(u32(bits) << 16); });
}
inline u32 transpose(u32 pair) {
    u32 result = 0;
    simt::gather({pair}, [&](auto& all) {
        int lane = threadIdx.x % WARP, row = lane / 4, column = lane % 4 * 2;
        for (int i = 0; i < 2; ++i) result |= (all[(column + i) * 4 + row / 2][0] >> row % 2 * 16 & 0xffff) << 16 * i;
    });
    return result;
}
template <bool TRANSPOSED>
void load_matrices(u32 (&d)[4], Shared row) {
    simt::gather({u32(row)}, [&](auto& all) {
        int lane = threadIdx.x % WARP;
        for (int i = 0; i < 4; ++i) {
            u32 value[2];
            for (int j = 0; j < 2; ++j) {
                int of = lane / 4, at = lane % 4 * 2 + j;
                u32 from = all[i * 8 + (TRANSPOSED ? at : of)][0] + (TRANSPOSED ? of : at) * 2;
                value[j] = load<u16>(shared_memory + from);
            }
            d[i] = value[1] << 16 | value[0];
        }
    });
}
template <class Words>
Words load_shared_by_blocks(const Words* from) {
    return *from;
}
}  // namespace moepack
