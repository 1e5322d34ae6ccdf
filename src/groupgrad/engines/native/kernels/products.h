// Matrix products of few rows in float32: some rows times some outputs are summed in registers, so that a weight read is
// used for all these rows. Weights are read as they lie; the rows are interleaved ("packed").

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

// What the vector registers hold, and how many there are.
#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // a Vec anywhere in memory
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t Order __attribute__((vector_size(16)));

#ifdef __clang__
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, Order{i, j, k, l})
#endif

// Compilers read a number from memory again for each multiplication, where one read would do; loads are as scarce.
#if defined(__AVX512F__)
#define KEEP(value) asm("" : "+v"(value))
#elif defined(__x86_64__)
#define KEEP(value) asm("" : "+x"(value))
#else
#define KEEP(value)
#endif

constexpr long MAX_ROWS = REGISTERS == 32 ? 8 : 4;   // rows that are summed at once
constexpr int MAX_SUMS = REGISTERS == 32 ? 24 : 12;  // sums in registers; the others hold what is multiplied
constexpr long MAX_PANEL = 192;                      // outputs that are computed between two stores
constexpr long PANEL_FLOATS = 1 << 15;               // of weights: they wait in the second cache for the next rows
constexpr long SLICE = 512;                          // columns that are multiplied before the next
constexpr long AHEAD = 1 << 13;                      // floats of weights that memory is asked for before their turn
constexpr long TILE = MAX_PANEL * MAX_ROWS + LANES;

namespace {

inline Vec load(const float *from) { return *reinterpret_cast<const Loose *>(from); }
inline void store(float *to, Vec value) { *reinterpret_cast<Loose *>(to) = value; }

// The first `count` numbers, then zeros: what lies behind them may not be ours, or not be finite.
inline Vec load_part(const float *from, long count) {
    Vec value = {};
    std::memcpy(&value, from, count * sizeof(float));
    return value;
}

inline long padded(long width) { return (width + LANES - 1) / LANES * LANES; }

inline Vec splat(float value) { return value - Vec{}; }

// Within 2 units in the last place; 0 below the smallest normal number, NaN stays NaN.
inline Vec exponential(Vec x) {
    const Vec lowest = splat(-87.3f), highest = splat(88.0f);
    Vec y = x < lowest ? lowest : x;
    y = y > highest ? highest : y;
    const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
    const Vec power = (y * 1.44269504f + shift) - shift;
    const Vec rest = (y - power * 0.693359375f) + power * 2.12194440e-4f;
    Vec sum = splat(1.0f / 5040);
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const Bits bits = (reinterpret_cast<Bits>(__builtin_convertvector(power, Whole)) + 127u) << 23;
    return x < lowest ? Vec{} : sum * reinterpret_cast<Vec>(bits);
}

// ------------------------------------------------------------------------------------------------ products

// Rows in blocks of at most MAX_ROWS, as even as can be. Within a block the numbers are interleaved: LANES of its first
// row, LANES of its second, and so on, then the next LANES of the first; each row's last ones are filled up with zeros.
struct Packed {
    float *data;
    long rows, width;

    long num_blocks() const { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
    long first(long block) const { return rows * block / num_blocks(); }
    const float *block(long index) const { return data + first(index) * padded(width); }

    // Write `count` numbers of a row from column `column` on.
    void put(long row, long column, const float *values, long count) const {
        long index = row * num_blocks() / rows;
        while (first(index + 1) <= row) index++;
        const long start = first(index), step = (first(index + 1) - start) * LANES;
        float *to = data + start * padded(width) + (row - start) * LANES;
        for (long i = 0; i < count;) {
            const long at = column + i, some = std::min(count - i, LANES - at % LANES);
            std::memcpy(to + at / LANES * step + at % LANES, values + i, some * sizeof(float));
            i += some;
        }
        if (column + count == width && width % LANES)
            std::memset(to + width / LANES * step + width % LANES, 0, (LANES - width % LANES) * sizeof(float));
    }
};

inline Four quarter(Vec value) {
    Four parts[LANES / 4], sum;
    std::memcpy(parts, &value, sizeof(value));
    sum = parts[0];
    for (int i = 1; i < LANES / 4; i++) sum += parts[i];
    return sum;
}

// The sum of each of four.
inline Four totals(Four a, Four b, Four c, Four d) {
    const Four ab = PICK(a, b, 0, 4, 1, 5) + PICK(a, b, 2, 6, 3, 7);
    const Four cd = PICK(c, d, 0, 4, 1, 5) + PICK(c, d, 2, 6, 3, 7);
    return PICK(ab, cd, 0, 1, 4, 5) + PICK(ab, cd, 2, 3, 6, 7);
}

// tile[n * M + m] = row m of a packed block times row n of `weights`, over `width` columns of `stride`; added to what is
// there if `more`. Up to three numbers behind are overwritten.
template <int M, int N>
inline void dots(const float *block, const float *weights, long stride, long width, bool more, float *tile) {
    Vec sums[(M * N + 3) / 4 * 4] = {};
    const long whole = width / LANES;
    for (long k = 0; k < whole; k++) {
        Vec weight[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const float *from = weights + n * stride + k * LANES;
            weight[n] = load(from);
            // What memory is asked for early comes at its full rate. Few rows have no time to spare for the near one.
            if (M > 2) __builtin_prefetch(from + N * stride);
            __builtin_prefetch(from + AHEAD, 0, 2);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            Vec value = load(block + (k * M + m) * LANES);
            KEEP(value);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[n * M + m] += value * weight[n];
        }
    }
    if (const long rest = width % LANES) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const Vec weight = load_part(weights + n * stride + whole * LANES, rest);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[n * M + m] += load(block + (whole * M + m) * LANES) * weight;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M * N; i += 4) {
        Four four = totals(quarter(sums[i]), quarter(sums[i + 1]), quarter(sums[i + 2]), quarter(sums[i + 3]));
        if (more) {
            Four before;
            std::memcpy(&before, tile + i, sizeof(four));
            four += before;
        }
        std::memcpy(tile + i, &four, sizeof(four));
    }
}

template <int M>
void panel(const float *block, const float *weights, long count, long width, float *tile) {
    constexpr int N = std::min(8, MAX_SUMS / M);
    // A slice of the rows' numbers stays in the first cache, under all weights that go past it.
    for (long start = 0; start < width; start += SLICE) {
        const float *slice = block + start * M, *from = weights + start;
        const long some = std::min(SLICE, width - start);
        long n = 0;
        for (; n + N <= count; n += N) dots<M, N>(slice, from + n * width, width, some, start > 0, tile + n * M);
        if (N > 4)
            for (; n + 4 <= count; n += 4) dots<M, 4>(slice, from + n * width, width, some, start > 0, tile + n * M);
        for (; n < count; n++) dots<M, 1>(slice, from + n * width, width, some, start > 0, tile + n * M);
    }
}

// tile[n * rows + m] for `count` outputs n and the rows m of a block.
void multiply(long rows, const float *block, const float *weights, long count, long width, float *tile) {
    using Panel = void (*)(const float *, const float *, long, long, float *);
    constexpr Panel panels[] = {panel<1>, panel<2>, panel<3>, panel<4>, panel<5>, panel<6>, panel<7>, panel<8>};
    panels[rows - 1](block, weights, count, width, tile);
}

// Outputs that a thread computes at a time: their weights fit into its cache, and there is work for all threads.
long panel_size(long outputs, long width) {
    const long share = outputs / (4 * omp_get_num_threads()) + 1;
    const long size = std::min({PANEL_FLOATS / width + 1, share, MAX_PANEL});
    return size > 32 ? (size + 47) / 48 * 48 : (size + 15) / 16 * 16;
}

// All threads: input times weight, `use(row, n, count, values, stride)` for each row and some of its outputs from n on.
// Threads do not wait for each other at the end.
template <class Use>
void product(const Packed &input, const float *weight, long outputs, float *tile, Use use) {
    const long size = panel_size(outputs, input.width), blocks = input.num_blocks();
#pragma omp for schedule(dynamic) nowait
    for (long start = 0; start < outputs; start += size) {
        const long count = std::min(size, outputs - start);
        for (long index = 0; index < blocks; index++) {
            const long first = input.first(index), rows = input.first(index + 1) - first;
            multiply(rows, input.block(index), weight + start * input.width, count, input.width, tile);
            for (long m = 0; m < rows; m++) use(first + m, start, count, tile + m, rows);
        }
    }
}

}  // namespace
