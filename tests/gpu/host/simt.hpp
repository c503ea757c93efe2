// Runs kernels on the host as they are written: a thread of the host for each of a block, which meet at barriers.
//
// Instead of the instructions of cuda/common/{ptx,barriers,warpgroups}.cuh there are functions of the same names:
// - bulk copies are made by a thread of their own, in random order, and count bytes at barriers with phases;
// - products of warpgroups run at the last moment, when their sums are waited for: whoever overwrites operand B before
//   that, or reads sums too early, gets other results.
#pragma once
#include <atomic>
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define __CUDACC__
#define __CUDA_ARCH_FEAT_SM90_ALL
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct Dimensions {
    int x, y;
};

inline thread_local Dimensions threadIdx;
inline Dimensions blockIdx, blockDim, gridDim;

#include "common/types.cuh"

namespace simt {
using namespace moepack;

inline int shared_bytes;

// What the lanes of a warp exchange.
struct Warp {
    std::barrier<> meeting{WARP};
    u32 word[WARP];
    u32 operands[64][WARP][4];  // of products one after the other, more than are under way
};

struct Block {
    std::vector<Warp> warps;
    std::barrier<> meeting;
    std::deque<std::barrier<>> pairs;
    explicit Block(int threads) : warps(threads / WARP), meeting(threads) {
        for (int i = 0; i < 15; ++i) pairs.emplace_back(2 * WARP);
    }
};

inline Block* block;

inline Warp& warp() {
    return block->warps[threadIdx.x / WARP];
}

// The words of all lanes, `use` of which gives the result.
template <class Use>
u32 exchange(u32 value, Use use) {
    Warp& w = warp();
    w.word[threadIdx.x % WARP] = value;
    w.meeting.arrive_and_wait();
    u32 result = use(w.word);
    w.meeting.arrive_and_wait();
    return result;
}

// Launches a kernel; its blocks run one after the other.
inline void launch(Dimensions grid, int threads, int shared, const std::function<void()>& kernel) {
    gridDim = grid, blockDim = {threads, 1}, shared_bytes = shared;
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
            Block one(threads);
            block = &one;
            std::vector<std::thread> all;
            for (int i = 0; i < threads; ++i)
                all.emplace_back([&, i] {
                    threadIdx = {i, 0};
                    kernel();
                });
            for (std::thread& thread : all) thread.join();
        }
}

template <class To, class From>
To bits_of(From from) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A barrier with phases, and the bytes that its phase waits for.
struct Phases {
    int arrivals = 0, pending = 0, bytes = 0, done = 0;

    void settle() {
        if (pending == 0 && bytes == 0) pending = arrivals, ++done;
    }
};

inline std::mutex mutex;
inline std::condition_variable changed;
inline std::map<u32, Phases> phases;
inline std::vector<std::function<void()>> copies;

// Makes the copies that are asked for, until the process ends.
inline void make_copies() {
    std::mt19937 random(1);
    std::unique_lock lock(mutex);
    for (;;) {
        changed.wait(lock, [] { return !copies.empty(); });
        std::swap(copies[random() % copies.size()], copies.back());
        copies.back()();
        copies.pop_back();
        changed.notify_all();
    }
}
}  // namespace simt

inline void __syncthreads() {
    simt::block->meeting.arrive_and_wait();
}
inline void __syncwarp() {
    simt::warp().meeting.arrive_and_wait();
}
inline float __uint_as_float(unsigned value) {
    return simt::bits_of<float>(value);
}
inline unsigned __float_as_uint(float value) {
    return simt::bits_of<unsigned>(value);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return simt::bits_of<T>(simt::exchange(simt::bits_of<unsigned>(value), [=](auto& word) { return word[lane]; }));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return __shfl_sync(mask, value, threadIdx.x % 32 ^ distance);
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return simt::exchange(value, [](auto& word) {
        unsigned most = 0;
        for (unsigned each : word) most = each > most ? each : most;
        return most;
    });
}

// What the headers name and the kernels here do not use.
int __clz(int);
int __popc(unsigned);
unsigned __umulhi(unsigned, unsigned);
unsigned __ballot_sync(unsigned, bool);
bool __any_sync(unsigned, bool);
int __syncthreads_count(bool);
bool __syncthreads_or(bool);
inline float __expf(float x) {
    return std::exp(x);
}
inline int atomicAdd(int* to, int value) {
    return std::atomic_ref(*to).fetch_add(value);
}
inline unsigned atomicAdd(unsigned* to, unsigned value) {
    return std::atomic_ref(*to).fetch_add(value);
}
float fmaxf(float, float) noexcept;
inline float rsqrtf(float x) {
    return 1 / std::sqrt(x);
}

namespace moepack {
extern u8 shared_memory[];

constexpr u64 KEEP = 0;
float4 load_of_block(Shared, int);
// A launch runs one block at a time, so clusters have one.
u64 load_number_of_block(Shared, int);
template <bool>
void wait_for_cluster();
void copy_async(Shared, const void*);
void copy_async(Shared, const void*, int);
void commit_copies();
template <int>
void wait_copies();
inline void publish_operands() {}
u64 read_once();

inline u64 read_once() {
    return 0;
}
inline void wait_for_launch_before() {}
inline void let_next_launch_begin() {}
inline u32 shared_size() {
    return u32(simt::shared_bytes);
}
inline Shared shared_address(const void* pointer) {
    return Shared(static_cast<const u8*>(pointer) - shared_memory);
}
template <class Words>
Words load(const void* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return words;
}
inline Quad load_quad(const void* from) {
    return load<Quad>(from);
}
inline u32 load_word(const void* from) {
    return load<u32>(from);
}
inline Pair load_pair(const void* from) {
    return load<Pair>(from);
}
inline u32 to_half2(float low, float high) {
    return simt::bits_of<u16>(_Float16(high)) << 16 | simt::bits_of<u16>(_Float16(low));
}
inline u32 to_bf16x2(float low, float high) {
    auto rounded = [](float value) {
        u32 bits = simt::bits_of<u32>(value);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return rounded(high) << 16 | rounded(low);
}
inline void store_value(void* out, i64 at, float value, bool wide) {
    if (wide) static_cast<float*>(out)[at] = value;
    else static_cast<u16*>(out)[at] = u16(to_bf16x2(value, 0));
}
inline void store_eight(void* out, i64 at, const float (&value)[8], int count, bool wide, bool) {
    for (int i = 0; i < count; ++i) store_value(out, at + i, value[i], wide);
}

inline void meet(int pair) {
    simt::block->pairs[pair].arrive_and_wait();
}
inline void make_barrier(Shared barrier, int arrivals) {
    std::lock_guard lock(simt::mutex);
    simt::phases[barrier] = {arrivals, arrivals};
}
inline void publish_barriers() {}
inline void arrive_expecting(Shared barrier, int bytes) {
    std::lock_guard lock(simt::mutex);
    simt::Phases& phases = simt::phases.at(barrier);
    if (--phases.pending < 0) std::abort();
    phases.bytes += bytes;
    phases.settle();
    simt::changed.notify_all();
}
inline void arrive(Shared barrier) {
    arrive_expecting(barrier, 0);
}
inline void wait_for_phase(Shared barrier, int parity) {
    {
        std::unique_lock lock(simt::mutex);
        simt::changed.wait(lock, [&] { return (simt::phases.at(barrier).done & 1) != parity; });
    }
    __syncwarp();
}
inline void copy_bulk(Shared to, const void* from, int bytes, Shared barrier, u64) {
    if (bytes % 16 || int(to) % 16 || reinterpret_cast<u64>(from) % 16) std::abort();
    std::lock_guard lock(simt::mutex);
    simt::copies.push_back([=] {
        std::memcpy(shared_memory + int(to), from, bytes);
        simt::phases.at(barrier).bytes -= bytes;
        simt::phases.at(barrier).settle();
    });
    simt::changed.notify_all();
}

// Operand B: see cuda/common/warpgroups.cuh.
struct Described {
    const u8* first;
    int columns;

    Described(const void* first, int columns) : first(static_cast<const u8*>(first)), columns(columns) {}

    Described after(int bytes) const {
        return {first + bytes, columns};
    }

    float value(int k, int column) const {
        return load<_Float16>(first + k / 8 * columns * 16 + column / 8 * 128 + column % 8 * 16 + k % 8 * 2);
    }
};

// Products that were begun since `end_products`, and those before, a group for each of its calls.
using Products = std::vector<std::function<void()>>;
inline thread_local Products latest;
inline thread_local unsigned begun;
inline thread_local std::vector<Products> groups;

template <int N>
void multiply_add(float (&c)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, const Described& b, bool adds) {
    int lane = threadIdx.x % WARP;
    auto& operands = simt::warp().operands[begun++ % 64];
    u32 mine[4] = {a0, a1, a2, a3};
    std::memcpy(operands[lane], mine, sizeof mine);
    latest.push_back([=, &c, &operands] {
        for (int i = 0; i < 4 * N; ++i) {
            float sum = adds ? c[i / 4][i % 4] : 0;
            int column = i / 4 * 8 + lane % 4 * 2 + i % 2, row = i % 4 / 2;
            for (int k = 0; k < 16; ++k) {
                u32 pair = operands[lane / 4 * 4 + k % 8 / 2][row + k / 8 * 2];
                sum += float(simt::bits_of<_Float16>(u16(pair >> k % 2 * 16))) * b.value(k, column);
            }
            c[i / 4][i % 4] = sum;
        }
    });
    for (int i = 0; i < 4 * N; ++i) c[i / 4][i % 4] = adds ? c[i / 4][i % 4] : 0;
}
template <int COUNT, int N>
void begin_products(u32 (&)[COUNT], float (&)[N][4]) {
    if (!latest.empty()) std::abort();
}
inline void end_products() {
    groups.emplace_back();
    groups.back().swap(latest);
}
inline void run_groups(size_t left) {
    __syncwarp();
    while (groups.size() > left) {
        for (auto& product : groups.front()) product();
        groups.erase(groups.begin());
    }
}
template <int N>
void wait_products_before(float (&)[N][4]) {
    run_groups(1);
}
template <int N>
void wait_products(float (&)[N][4]) {
    end_products();
    run_groups(0);
}
template <int>
void leave_registers() {}
template <int>
void take_registers() {}
}  // namespace moepack
