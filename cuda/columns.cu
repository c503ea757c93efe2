// Two loops over the columns of a block for integers in groups: GPTQ (`round_columns`, moepack/solvers/gptq.py) and
// coordinate descent (`descend`, moepack/solvers/integers.py).
//
// A thread has a row of an expert, and keeps what the columns of the block receive from each other in registers. The
// host adds what later blocks receive by matrix products. Matrices [experts, columns, rows] are stored columns first, so
// that the threads of a warp read adjacent values.
//
// A value is `scale * (code - middle) + offset`; codes are rounded half to even and clamped to 0 .. 2^bits - 1. Ternary
// rows have the codes -1, 0 and 1, and a level for each sign; a value beyond half a level is rounded to it.
#include "common/types.cuh"

namespace moepack {

struct Grid {
    const float* scales;   // [experts, rows, number]
    const float* offsets;  // the same, or null
    const int* groups;     // [experts, count], the group of each column
    int number, columns;   // groups of a row; from one expert to the next in `groups`, 0 if all have the same columns
    int middle, largest;  // the code of the value `offset`; the largest code
    const float* levels;  // [experts, rows, 2], the negative and the positive one of ternary rows; null for integers
};

struct Rounding {
    const float* free;     // [experts, count, rows], compensated for the columns before the block
    float* errors;         // the same; on input the original weights, on output their difference from the values
    float* values;         // the same, output
    float* left;           // the same, output: the compensated weights minus the values
    u8* codes;             // the same, output; of ternary rows i8
    const float* factors;  // [experts, count, count], of F
    Grid grid;
    i64 of_free, of_errors, of_values, of_left, of_codes;  // from one expert to the next
    i64 of_factors;
    int line;  // from one row of the factors to the next
    int rows, count;
};

struct Descent {
    const float* gradient;  // [experts, count, rows], (w - q) H with the changes before the block
    float* codes;           // the same, input and output
    float* changes;         // the same, output: the new values minus the old ones
    const float* factors;   // [experts, count, count], of H
    Grid grid;
    i64 of_gradient, of_codes, of_changes, of_factors;
    int line;
    int rows, count;
};

#if defined(__CUDACC__)
namespace columns {

constexpr int BLOCK = 16, THREADS = 128;

struct Nearest {
    float code, value;
};

// Parameters of the groups of a row, or its levels.
struct Row {
    const float *scales, *offsets, *levels;
    const int* groups;
    float middle, largest;

    MOEPACK_DEVICE Row(const Grid& grid, int expert, i64 row)
        : scales(grid.scales + row * grid.number),
          offsets(grid.offsets ? grid.offsets + row * grid.number : nullptr),
          levels(grid.levels ? grid.levels + row * 2 : nullptr),
          groups(grid.groups + i64(expert) * grid.columns),
          middle(float(grid.middle)),
          largest(float(grid.largest)) {}

    MOEPACK_DEVICE float value(float code, int column) const {
        int group = groups[column];
        return (code - middle) * scales[group] + (offsets ? offsets[group] : 0.0f);
    }

    MOEPACK_DEVICE Nearest nearest(float wanted, int column) const {
        if (levels) {
            float low = levels[0], high = levels[1];
            if (wanted > 0.5f * high) return {1, high};
            return wanted < 0.5f * low ? Nearest{-1, low} : Nearest{0, 0};
        }
        int group = groups[column];
        float scale = scales[group], offset = offsets ? offsets[group] : 0.0f;
        float steps = scale != 0 ? rintf((wanted - offset) / scale) : 0.0f;
        steps = fminf(fmaxf(steps, -middle), largest - middle);
        return {steps + middle, steps * scale + offset};
    }
};

MOEPACK_DEVICE void load(float (&factors)[BLOCK][BLOCK], const float* from, int line, int count) {
    for (int i = threadIdx.x; i < BLOCK * BLOCK; i += THREADS) {
        int row = i / BLOCK, column = i % BLOCK;
        factors[row][column] = row < count && column < count ? from[i64(row) * line + column] : 0.0f;
    }
    __syncthreads();
}

MOEPACK_DEVICE void round(const Rounding& r) {
    __shared__ float factors[BLOCK][BLOCK];
    int expert = blockIdx.y, row = blockIdx.x * THREADS + threadIdx.x;
    load(factors, r.factors + expert * r.of_factors, r.line, r.count);
    if (row >= r.rows) return;
    Row own(r.grid, expert, i64(expert) * r.rows + row);
    const float* free = r.free + expert * r.of_free + row;
    float* errors = r.errors + expert * r.of_errors + row;
    float received[BLOCK] = {};
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        if (i >= r.count) break;
        i64 at = i64(i) * r.rows;
        float wanted = free[at] + received[i];
        Nearest found = own.nearest(wanted, i);
        float error = errors[at] - found.value;
        errors[at] = error;
        r.values[expert * r.of_values + at + row] = found.value;
        r.left[expert * r.of_left + at + row] = wanted - found.value;
        r.codes[expert * r.of_codes + at + row] = u8(int(found.code));
#pragma unroll
        for (int j = i + 1; j < BLOCK; ++j) received[j] += error * factors[i][j];
    }
}

MOEPACK_DEVICE void descend(const Descent& d) {
    __shared__ float factors[BLOCK][BLOCK];
    int expert = blockIdx.y, row = blockIdx.x * THREADS + threadIdx.x;
    load(factors, d.factors + expert * d.of_factors, d.line, d.count);
    if (row >= d.rows) return;
    Row own(d.grid, expert, i64(expert) * d.rows + row);
    const float* gradient = d.gradient + expert * d.of_gradient + row;
    float* codes = d.codes + expert * d.of_codes + row;
    float received[BLOCK] = {};
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        if (i >= d.count) break;
        i64 at = i64(i) * d.rows;
        float before = own.value(codes[at], i);
        Nearest found = own.nearest(before + (gradient[at] - received[i]) / factors[i][i], i);
        float change = found.value - before;
        codes[at] = found.code;
        d.changes[expert * d.of_changes + at + row] = change;
#pragma unroll
        for (int j = i + 1; j < BLOCK; ++j) received[j] += change * factors[i][j];
    }
}

}  // namespace columns
#endif

}  // namespace moepack

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(128) round_columns(moepack::Rounding rounding) {
    moepack::columns::round(rounding);
}

extern "C" __global__ void __launch_bounds__(128) descend(moepack::Descent descent) {
    moepack::columns::descend(descent);
}
#endif
