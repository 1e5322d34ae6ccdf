// Float32 matrix products of some rows with a row-major weight. The rows are stored as columns: a vector holds one
// number of each row and is multiplied with one weight. No sum crosses lanes, and each row is summed number by number.
// Weights in bfloat16 (`uint16_t` here) are widened one by one, and everything else is the same.

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "prefetch.h"
#include "vectors.h"

// Numbers that are summed one after the other before their sum is added to the total. With so many, or with two halves
// of up to twice as many, products are bit-exactly those of MKL on AMD processors, so sampling rounds as training does.
constexpr long SLICE = 192;
constexpr long MOST_ROWS = REGISTERS == 32 ? 4 * LANES : 2 * LANES;  // rows whose sums are in registers together
constexpr long MAX_PANEL = 48;          // outputs computed between two stores
constexpr long PANEL_FLOATS = 1 << 15;  // of weights, which stay in the L2 cache for the next rows
constexpr long STEP = LINE / 4;         // numbers of a weight's row between two prefetches
constexpr long TILE = MAX_PANEL * MOST_ROWS;

namespace {

constexpr long in_grains(long rows) { return (rows + GRAIN - 1) / GRAIN * GRAIN; }

// Rows of the next block, where `left` rows (whole grains) remain.
constexpr long block_rows(long left) {
    for (long vectors = MOST_ROWS / LANES; vectors > 1; vectors--)
        if (left >= vectors * LANES) return vectors * LANES;
    // Few rows use small vectors.
    for (long grains = 3; grains > 1; grains--)
        if (left >= grains * GRAIN && REGISTERS == 32) return grains * GRAIN;
    return GRAIN;
}

// Outputs whose sums are in registers together, for so many vectors of rows. More would evict each other from the L1
// cache, where weight rows of many widths map to few sets.
constexpr int outputs_at_once(long vectors) { return std::min<int>(12, MAX_SUMS / static_cast<int>(vectors)); }

// Number of vectors in a block of so many rows.
constexpr long num_vectors(long rows) { return rows / (rows % LANES == 0 && rows > LANES ? LANES : GRAIN); }

// Rows of one width in blocks of whole grains, padded at the end. A block stores the first number of each of its rows,
// then the second of each, and so on.
struct Columns {
    float *data;
    long rows, width;

    struct Block {
        long first, rows;  // `rows` of whole grains
        float *data;
        long used;  // rows that are no padding
    };

    long padded_rows() const { return in_grains(rows); }
    long size() const { return padded_rows() * width; }

    // Calls `body` for each block in order.
    template <class Body>
    void each_block(Body body) const {
        for (long first = 0; first < rows;) {
            const long some = block_rows(padded_rows() - first);
            body(Block{first, some, data + first * width, std::min(some, rows - first)});
            first += some;
        }
    }

    // The block that holds a row.
    Block block_of(long row) const {
        Block found{};
        each_block([&](const Block &block) {
            if (block.first <= row) found = block;
        });
        return found;
    }

    // Inner steps of the products of all rows with `count` outputs.
    long inner_steps(long count) const {
        long steps = 0;
        each_block([&](const Block &block) {
            const long at_once = outputs_at_once(num_vectors(block.rows));
            steps += (count + at_once - 1) / at_once * (width / STEP);
        });
        return steps;
    }

    // Writes columns `start` to `end` of GRAIN rows from `row` on (a whole number of grains); null rows are zeros.
    void put(long row, const float *const *from, long start, long end) const {
        const Block block = block_of(row);
        float *to = block.data + (row - block.first);
        long k = start;
        bool is_full = true;
        for (long i = 0; i < GRAIN; i++) is_full &= from[i] != nullptr;
        for (; is_full && k + GRAIN <= end; k += GRAIN) {
            Grain all[GRAIN];
            for (int i = 0; i < GRAIN; i++) all[i] = load_as<Grain>(from[i] + k);
            transpose(all);
            for (int i = 0; i < GRAIN; i++) store_as(to + (k + i) * block.rows, all[i]);
        }
        for (; k < end; k++)
            for (long i = 0; i < GRAIN; i++) to[k * block.rows + i] = from[i] ? from[i][k] : 0.0f;
    }
};

// Outputs of a block of rows in the order of their sums: values[n * rows + row].
struct Outputs {
    Columns::Block block;
    long first, count;
    const float *values;
};

// to[row * stride + n] for the outputs of the first `rows` rows, plus a bias unless null.
void put_rows(const Outputs &outputs, long rows, const float *bias, float *to, long stride) {
    const long step = outputs.block.rows, some = std::min(step, rows - outputs.block.first);
    for (long row = 0; row < some; row += GRAIN) {
        float *place = to + (outputs.block.first + row) * stride + outputs.first;
        const float *from = outputs.values + row;
        long n = 0;
        for (; row + GRAIN <= some && n + GRAIN <= outputs.count; n += GRAIN) {
            Grain all[GRAIN];
            for (int i = 0; i < GRAIN; i++) all[i] = load_as<Grain>(from + (n + i) * step);
            transpose(all);
            const Grain add = bias ? load_as<Grain>(bias + outputs.first + n) : Grain{};
            for (int i = 0; i < GRAIN; i++) store_as(place + i * stride + n, all[i] + add);
        }
        for (; n < outputs.count; n++)
            for (long i = 0; i < std::min<long>(GRAIN, some - row); i++)
                place[i * stride + n] = from[n * step + i] + (bias ? bias[outputs.first + n] : 0.0f);
    }
}

// Where products of a block of rows go: that of output n and a row to at[n * step + row].
struct Tile {
    float *at;
    long step;

    Tile from(long n) const { return {at + n * step, step}; }
};

// The vector of integers that is as wide as V.
template <class V>
using BitsOf = typename std::conditional<sizeof(V) == sizeof(Vec), Bits, GrainBits>::type;

// Number K of a row of weights, in all lanes. Of bfloat16 numbers K is 0 or 1, and both have to be there: one load with
// a shift or a mask takes as long as the load of a float32 number.
template <class V, int K>
inline V weight_of(const float *weights) { return weights[K] - V{}; }
template <class V, int K>
inline V weight_of(const uint16_t *weights) {
    uint32_t pair;
    std::memcpy(&pair, weights, sizeof(pair));
    const BitsOf<V> both = pair + BitsOf<V>{};
    return reinterpret_cast<V>(K ? both & 0xFFFF0000u : both << 16);
}

// sums[n] += column K of a block's rows, in C vectors of type V, times number K of row n of `weights`.
template <class V, int C, int N, int K = 0, class W>
inline __attribute__((always_inline)) void add_column(
    V (&sums)[N][C], const float *column, const W *weights, long stride
) {
    constexpr long rows = C * sizeof(V) / 4;
    V values[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) values[c] = load_as<V>(column + K * rows + c * (rows / C));
#pragma GCC unroll 24
    for (int n = 0; n < N; n++) {
        V weight = weight_of<V, K>(weights + n * stride);
        if (C > 1) KEEP(weight);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[n][c] = fused(weight, values[c], sums[n][c]);
    }
}

// The rows of a block, in C vectors of type V, times N rows of `weights`, over `length` columns. Adds to the tile if
// `more`.
template <class V, int C, int N, class W>
inline void sum(
    const float *block, const W *weights, long stride, long length, bool more, Tile tile, const Prefetch &prefetch
) {
    constexpr long rows = C * sizeof(V) / 4;
    V sums[N][C] = {};
    const char *line = prefetch.at;
    const long each = prefetch.each;
    long k = 0;
    for (; k + STEP <= length; k += STEP) {
        // From the L2 cache into the L1 cache.
#pragma GCC unroll 24
        for (int n = 0; n < N; n++) __builtin_prefetch(weights + n * stride + k + 2 * LINE / sizeof(W));
        for (long i = 0; i < each; i++, line += LINE) __builtin_prefetch(line, 0, 2);
#pragma GCC unroll 2
        for (long j = k; j < k + STEP; j += 2) {
            add_column<V, C, N, 0>(sums, block + j * rows, weights + j, stride);
            add_column<V, C, N, 1>(sums, block + j * rows, weights + j, stride);
        }
    }
    for (; k < length; k++) {
        float numbers[N];
        for (int n = 0; n < N; n++) numbers[n] = widened(weights[n * stride + k]);
        add_column<V, C, N>(sums, block + k * rows, numbers, 1);
    }
#pragma GCC unroll 24
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float *to = tile.at + n * tile.step + c * (rows / C);
            store_as(to, more ? load_as<V>(to) + sums[n][c] : sums[n][c]);
        }
}

// Rows that leave half of a small vector empty. With vectors of sixteen lanes they share one with three more outputs.
constexpr long FEW_ROWS = LANES == 16 ? 4 : 0;

#if defined(__AVX512F__)
inline __m128 four_of(const float *weights) { return _mm_loadu_ps(weights); }
inline __m128 four_of(const uint16_t *weights) {
    const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(weights));
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16));
}

// Four numbers of each of four rows of `weights`, row by row.
template <class W>
inline Vec quad_of(const W *weights, long stride) {
    __m512 all = _mm512_castps128_ps512(four_of(weights));
    all = _mm512_mask_broadcast_f32x4(all, 0x00F0, four_of(weights + stride));
    all = _mm512_mask_broadcast_f32x4(all, 0x0F00, four_of(weights + 2 * stride));
    return _mm512_mask_broadcast_f32x4(all, 0xF000, four_of(weights + 3 * stride));
}

// sums[n] += column K of a block times number K of each row in quads[n].
template <int K, int N>
inline __attribute__((always_inline)) void add_quads(Vec (&sums)[N], const float *block, const Vec (&quads)[N]) {
    const Vec values = _mm512_broadcast_f32x4(_mm_loadu_ps(block + K * GRAIN));
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[n] = fused(_mm512_permute_ps(quads[n], K * 0x55), values, sums[n]);
}

// What `sum` computes, to the bit, of a block with few rows times 4 * N rows of `weights`. A vector holds the sums of
// four rows with one output, then with the next, up to the fourth.
template <int N, class W>
inline void sum_quads(
    const float *block, const W *weights, long stride, long length, bool more, Tile tile, const Prefetch &prefetch
) {
    Vec sums[N] = {};
    const char *line = prefetch.at;
    const long each = prefetch.each;
    long k = 0;
    for (; k + STEP <= length; k += STEP) {
#pragma GCC unroll 12
        for (int n = 0; n < 4 * N; n++) __builtin_prefetch(weights + n * stride + k + 2 * LINE / sizeof(W));
        for (long i = 0; i < each; i++, line += LINE) __builtin_prefetch(line, 0, 2);
#pragma GCC unroll 4
        for (long j = k; j < k + STEP; j += 4) {
            const float *columns = block + j * GRAIN;
            Vec quads[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) quads[n] = quad_of(weights + 4 * n * stride + j, stride);
            add_quads<0>(sums, columns, quads);
            add_quads<1>(sums, columns, quads);
            add_quads<2>(sums, columns, quads);
            add_quads<3>(sums, columns, quads);
        }
    }
    for (; k < length; k++) {
        Vec quads[N];
        float numbers[N * LANES] = {};
        for (int n = 0; n < 4 * N; n++) numbers[4 * n] = widened(weights[n * stride + k]);
        for (int n = 0; n < N; n++) quads[n] = load(numbers + n * LANES);
        add_quads<0>(sums, block + k * GRAIN, quads);
    }
    for (int n = 0; n < 4 * N; n++) {
        float *to = tile.at + n * tile.step;
        const __m128 found = load_as<__m128>(reinterpret_cast<const float *>(sums) + 4 * n);
        store_as(to, _mm256_zextps128_ps256(more ? load_as<__m128>(to) + found : found));
    }
}
#endif

template <class V, int C, bool IS_FEW = false, class W>
void sum_panel(const float *block, const W *weights, long count, long width, Tile tile, Prefetch &prefetch) {
    constexpr int N = outputs_at_once(C);
    constexpr long rows = C * sizeof(V) / 4;
    const long slice = width > SLICE && width <= 2 * SLICE ? (width + 1) / 2 : SLICE;
    for (long start = 0; start < width; start += slice) {
        const float *part = block + start * rows;
        const W *from = weights + start;
        const long length = std::min(slice, width - start), steps = length / STEP;
        long n = 0;
        const auto go = [&](auto outputs) {
            constexpr int SOME = decltype(outputs)::value;
            for (; n + SOME <= count; n += SOME, prefetch.advance(steps)) {
#if defined(__AVX512F__)
                if constexpr (IS_FEW && SOME % 4 == 0) {
                    sum_quads<SOME / 4>(part, from + n * width, width, length, start > 0, tile.from(n), prefetch);
                    continue;
                }
#endif
                if constexpr (sizeof(W) == 2 && rows < 32) {  // few multiplications to hide the widening behind
                    float wide[SOME * SLICE];
                    for (long i = 0; i < SOME; i++) widen(from + (n + i) * width, length, wide + i * SLICE);
                    sum<V, C, SOME>(part, wide, SLICE, length, start > 0, tile.from(n), prefetch);
                    continue;
                }
                sum<V, C, SOME>(part, from + n * width, width, length, start > 0, tile.from(n), prefetch);
            }
        };
        go(std::integral_constant<int, N>());
        if (N > 4) go(std::integral_constant<int, 4>());
        go(std::integral_constant<int, 1>());
    }
}

// Vectors of a block of rows: so many of type V.
template <class V_, int COUNT_>
struct RowVectors {
    using V = V_;
    static constexpr int COUNT = COUNT_;
};

// Calls `body` with the `RowVectors` that hold the rows of a block.
template <class Body>
void with_vectors(const Columns::Block &block, Body body) {
    if (block.rows == 4 * LANES) return body(RowVectors<Vec, 4>());
    if (block.rows == 3 * LANES && LANES > GRAIN) return body(RowVectors<Vec, 3>());
    if (block.rows == 2 * LANES && block.rows > 3 * GRAIN) return body(RowVectors<Vec, 2>());
    if (block.rows == 3 * GRAIN) return body(RowVectors<Grain, 3>());
    if (block.rows == 2 * GRAIN) return body(RowVectors<Grain, 2>());
    body(RowVectors<Grain, 1>());
}

// The rows of a block times the `count` rows of `weights` (count, width).
template <class W>
void multiply(const Columns::Block &block, const W *weights, long count, long width, Tile tile, Prefetch &prefetch) {
    if (block.used <= FEW_ROWS) return sum_panel<Grain, 1, true>(block.data, weights, count, width, tile, prefetch);
    with_vectors(block, [&](auto vectors) {
        using Rows = decltype(vectors);
        sum_panel<typename Rows::V, Rows::COUNT>(block.data, weights, count, width, tile, prefetch);
    });
}

// tile[n * block.rows + row] = the same products.
void multiply(const Columns::Block &block, const float *weights, long count, long width, float *tile,
              Prefetch &prefetch) {
    multiply(block, weights, count, width, Tile{tile, block.rows}, prefetch);
}

// A row-major weight (outputs, width).
struct Weight {
    const void *data;
    bool is_half;  // bfloat16

    const char *bytes(long first) const { return static_cast<const char *>(data) + first * (is_half ? 2 : 4); }

    // tile[n * block.rows + row] = the rows of a block times `count` of the weight's rows, from `first` on.
    void multiply_with(const Columns::Block &block, long first, long count, long width, float *tile,
                       Prefetch &prefetch) const {
        const Tile to{tile, block.rows};
        const char *from = bytes(first * width);
        if (is_half) return multiply(block, reinterpret_cast<const uint16_t *>(from), count, width, to, prefetch);
        multiply(block, reinterpret_cast<const float *>(from), count, width, to, prefetch);
    }
};

// ------------------------------------------------------------------------------------------------ panels of a step

// A product of a step with weights (outputs, width), in panels of `size` outputs. `twin` is the weight of a second
// product of the same input that is computed with it, or null.
struct Product {
    Weight weight, twin;
    long outputs, width, size, first;  // `first`: the number of its first panel in the step

    long num_panels() const { return (outputs + size - 1) / size; }
};

// Outputs that a thread computes at a time. Their weights fit into its cache beside those of the next panel, and all
// threads have work.
long panel_size(long outputs, long width, int threads) {
    const long share = outputs / (4 * threads) + 1, size = std::min({PANEL_FLOATS / width + 1, share, MAX_PANEL});
    return (size + 23) / 24 * 24;
}

// The products of a step in order. A thread takes its next panel, possibly of the next product, before it computes the
// current one, so that it can prefetch the next panel's weights meanwhile.
struct WorkPlan {
    Product *products;
    long count = 0, num_panels = 0;
    std::atomic<long> taken{0};

    explicit WorkPlan(Product *memory) : products(memory) {}

    void add(const Weight &weight, const Weight &twin, long outputs, long width, int threads) {
        products[count] = {weight, twin, outputs, width, panel_size(outputs, width, threads), num_panels};
        num_panels += products[count++].num_panels();
    }
};

// A thread's progress in a plan.
class Worker {
    WorkPlan &plan;
    long next_panel, next_product = 0, product = 0;

public:
    explicit Worker(WorkPlan &plan) : plan(plan), next_panel(plan.taken++) {}

    // Called by all threads: each calls `body(start, count, prefetch)` for some outputs of the plan's next product.
    // There is no barrier at the end.
    template <class Body>
    void go(const Columns &input, Body body) {
        const Product &now = plan.products[product++];
        const long end = now.first + now.num_panels();
        while (next_panel < end) {
            const long start = (next_panel - now.first) * now.size, count = std::min(now.size, now.outputs - start);
            next_panel = plan.taken++;
            Prefetch prefetch = next();
            prefetch.distribute(input.inner_steps(count) * (now.twin.data ? 2 : 1));
            body(start, count, prefetch);
        }
    }

private:
    // The weights of the next panel.
    Prefetch next() {
        if (next_panel >= plan.num_panels) return {};
        const auto end = [](const Product &product) { return product.first + product.num_panels(); };
        while (next_panel >= end(plan.products[next_product])) next_product++;
        const Product &then = plan.products[next_product];
        const long start = (next_panel - then.first) * then.size, count = std::min(then.size, then.outputs - start);
        Prefetch prefetch;
        for (const Weight *weight : {&then.weight, &then.twin}) {
            const char *from = weight->bytes(start * then.width), *end = weight->bytes((start + count) * then.width);
            if (weight->data) prefetch.add_bytes(from, end - from);
        }
        return prefetch;
    }
};

// Called by all threads: input times the weight of the plan's next product. Calls `use(outputs)` per block of rows.
template <class Use>
void product(Worker &worker, const Columns &input, const Weight &weight, float *tile, Use use) {
    worker.go(input, [&](long start, long count, Prefetch &prefetch) {
        input.each_block([&](const Columns::Block &block) {
            weight.multiply_with(block, start, count, input.width, tile, prefetch);
            use(Outputs{block, start, count, tile});
        });
    });
}

}  // namespace
