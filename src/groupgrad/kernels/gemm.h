// Matrix products of some rows in float32. The rows stand side by side ("columns"), one number of each in a vector, and
// a weight is multiplied with all of them: no sums across vectors, and each row's sums are taken number by number.
// Weights are read as they lie.

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "prefetch.h"
#include "vectors.h"

// Numbers that are summed one after the other before their sum goes to the others'. With so many, or with two halves of
// up to twice as many, products are those of MKL on AMD's processors to the last bit: sampling then rounds as training
// does.
constexpr long SLICE = 192;
constexpr long MOST_ROWS = REGISTERS == 32 ? 4 * LANES : 2 * LANES;  // rows that are summed at once
constexpr long MAX_PANEL = 48;          // outputs that are computed between two stores
constexpr long PANEL_FLOATS = 1 << 15;  // of weights: they wait in the second cache for the next rows
constexpr long STEP = LINE / 4;         // numbers of a weight's row that are taken before memory is asked for more
constexpr long TILE = MAX_PANEL * MOST_ROWS;

namespace {

constexpr long in_grains(long rows) { return (rows + GRAIN - 1) / GRAIN * GRAIN; }

// Rows of the next block where some (whole grains) are left.
constexpr long block_rows(long left) {
    for (long vectors = MOST_ROWS / LANES; vectors > 1; vectors--)
        if (left >= vectors * LANES) return vectors * LANES;
    // Small vectors for few rows.
    for (long grains = 3; grains > 1; grains--)
        if (left >= grains * GRAIN && REGISTERS == 32) return grains * GRAIN;
    return GRAIN;
}

// Outputs that are summed at once for so many vectors of rows. More would push each other out of the first cache, where
// rows of weights of many widths share few places.
constexpr int outputs_at_once(long vectors) { return std::min<int>(12, MAX_SUMS / static_cast<int>(vectors)); }

// Vectors of a block of so many rows.
constexpr long num_vectors(long rows) { return rows / (rows % LANES == 0 && rows > LANES ? LANES : GRAIN); }

// Some rows of one width, in blocks of whole grains, the last ones filled up: of each block the first numbers of all
// its rows, then the second ones, and so on.
struct Columns {
    float *data;
    long rows, width;

    struct Block {
        long first, rows;  // `rows` of whole grains
        float *data;
    };

    long padded_rows() const { return in_grains(rows); }
    long size() const { return padded_rows() * width; }

    // All blocks in order.
    template <class Body>
    void each_block(Body body) const {
        for (long first = 0; first < rows;) {
            const long some = block_rows(padded_rows() - first);
            body(Block{first, some, data + first * width});
            first += some;
        }
    }

    // The block that a row is in.
    Block block_of(long row) const {
        Block found{};
        each_block([&](const Block &block) {
            if (block.first <= row) found = block;
        });
        return found;
    }

    // Of the products of all rows with `count` outputs.
    long inner_steps(long count) const {
        long steps = 0;
        each_block([&](const Block &block) {
            const long at_once = outputs_at_once(num_vectors(block.rows));
            steps += (count + at_once - 1) / at_once * (width / STEP);
        });
        return steps;
    }

    // Write GRAIN rows from `row` on (a whole number of grains), columns `start` to `end` of each; null: zeros.
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

// Some outputs of a block of rows, as they are when they have been summed: values[n * rows + row].
struct Outputs {
    Columns::Block block;
    long first, count;
    const float *values;
};

// to[row * stride + n] for `rows` rows, as far as there are so many; plus a bias, or null.
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

// tile[n * rows + row] = the rows of a block, in C vectors of type V, times N rows of `weights`, over `length` columns;
// added to what is there if `more`.
template <class V, int C, int N>
inline void sum(
    const float *block, const float *weights, long stride, long length, bool more, float *tile, const Soon &soon
) {
    constexpr long rows = C * sizeof(V) / 4;
    V sums[N][C] = {};
    const char *line = soon.at;
    const long each = soon.each;
    const auto column = [&](long k) {
        V values[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) values[c] = load_as<V>(block + k * rows + c * (rows / C));
#pragma GCC unroll 24
        for (int n = 0; n < N; n++) {
            V weight = weights[n * stride + k] - V{};
            if (C > 1) KEEP(weight);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                sums[n][c] += weight * values[c];
                // Where little else goes on, GCC takes a multiplication and an addition for this, rounded apart.
                if (N * C <= 4) KEEP(sums[n][c]);
            }
        }
    };
    long k = 0;
    for (; k + STEP <= length; k += STEP) {
        // From the second cache into the first.
#pragma GCC unroll 24
        for (int n = 0; n < N; n++) __builtin_prefetch(weights + n * stride + k + 2 * STEP);
        for (long i = 0; i < each; i++, line += LINE) __builtin_prefetch(line, 0, 2);
#pragma GCC unroll 4
        for (long j = 0; j < STEP; j++) column(k + j);
    }
    for (; k < length; k++) column(k);
#pragma GCC unroll 24
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float *to = tile + n * rows + c * (rows / C);
            store_as(to, more ? load_as<V>(to) + sums[n][c] : sums[n][c]);
        }
}

template <class V, int C>
void sum_panel(const float *block, const float *weights, long count, long width, float *tile, Soon &soon) {
    constexpr int N = outputs_at_once(C);
    constexpr long rows = C * sizeof(V) / 4;
    const long slice = width > SLICE && width <= 2 * SLICE ? (width + 1) / 2 : SLICE;
    for (long start = 0; start < width; start += slice) {
        const float *part = block + start * rows, *from = weights + start;
        const long length = std::min(slice, width - start), steps = length / STEP;
        long n = 0;
        for (; n + N <= count; n += N, soon.passed(steps))
            sum<V, C, N>(part, from + n * width, width, length, start > 0, tile + n * rows, soon);
        if (N > 4)
            for (; n + 4 <= count; n += 4, soon.passed(steps))
                sum<V, C, 4>(part, from + n * width, width, length, start > 0, tile + n * rows, soon);
        for (; n < count; n++, soon.passed(steps))
            sum<V, C, 1>(part, from + n * width, width, length, start > 0, tile + n * rows, soon);
    }
}

// tile[n * rows + row] for `count` outputs n, rows of `weights` (count, width), and the rows of a block.
void multiply(const Columns::Block &block, const float *weights, long count, long width, float *tile, Soon &soon) {
    const auto with = [&](auto panel) { panel(block.data, weights, count, width, tile, soon); };
    if (block.rows == 4 * LANES) return with(sum_panel<Vec, 4>);
    if (block.rows == 3 * LANES && LANES > GRAIN) return with(sum_panel<Vec, 3>);
    if (block.rows == 2 * LANES && block.rows > 3 * GRAIN) return with(sum_panel<Vec, 2>);
    if (block.rows == 3 * GRAIN) return with(sum_panel<Grain, 3>);
    if (block.rows == 2 * GRAIN) return with(sum_panel<Grain, 2>);
    with(sum_panel<Grain, 1>);
}

// ------------------------------------------------------------------------------------------------ panels of a step

// A product of a step, or two of the same input that go together: weights (outputs, width), in panels of `size` outputs.
struct Product {
    const float *weight, *twin;
    long outputs, width, size, first;  // `first`: the number of its first panel in the step

    long num_panels() const { return (outputs + size - 1) / size; }
};

// Outputs that a thread computes at a time: their weights fit into its cache beside the next ones, and there is work for
// all threads.
long panel_size(long outputs, long width, int threads) {
    const long share = outputs / (4 * threads) + 1, size = std::min({PANEL_FLOATS / width + 1, share, MAX_PANEL});
    return (size + 23) / 24 * 24;
}

// The products of a step in order. A thread takes its next panel, be it of the next product, before it computes the one
// that it has: so it knows whose weights memory has to bring meanwhile.
struct Plan {
    Product *products;
    long count = 0, num_panels = 0;
    std::atomic<long> taken{0};

    explicit Plan(Product *memory) : products(memory) {}

    void add(const float *weight, const float *twin, long outputs, long width, int threads) {
        products[count] = {weight, twin, outputs, width, panel_size(outputs, width, threads), num_panels};
        num_panels += products[count++].num_panels();
    }
};

// Where a thread is in a plan.
class Turn {
    Plan &plan;
    long next_panel, next_product = 0, product = 0;

public:
    explicit Turn(Plan &plan) : plan(plan), next_panel(plan.taken++) {}

    // All threads: `body(start, count, soon)` for some of the outputs of the plan's next product each. Threads do not
    // wait for each other at the end.
    template <class Body>
    void go(const Columns &input, Body body) {
        const Product &now = plan.products[product++];
        const long end = now.first + now.num_panels();
        while (next_panel < end) {
            const long start = (next_panel - now.first) * now.size, count = std::min(now.size, now.outputs - start);
            next_panel = plan.taken++;
            Soon soon = next();
            soon.spread(input.inner_steps(count) * (now.twin ? 2 : 1));
            body(start, count, soon);
        }
    }

private:
    // The weights of the next panel.
    Soon next() {
        if (next_panel >= plan.num_panels) return {};
        while (next_panel >= plan.products[next_product].first + plan.products[next_product].num_panels()) next_product++;
        const Product &then = plan.products[next_product];
        const long start = (next_panel - then.first) * then.size, count = std::min(then.size, then.outputs - start);
        Soon soon;
        soon.add(then.weight + start * then.width, count * then.width);
        if (then.twin) soon.add(then.twin + start * then.width, count * then.width);
        return soon;
    }
};

// All threads: input times the weight of the plan's next product; `use(outputs)` for a block of rows at a time.
template <class Use>
void product(Turn &turn, const Columns &input, const float *weight, float *tile, Use use) {
    turn.go(input, [&](long start, long count, Soon &soon) {
        input.each_block([&](const Columns::Block &block) {
            multiply(block, weight + start * input.width, count, input.width, tile, soon);
            use(Outputs{block, start, count, tile});
        });
    });
}

}  // namespace
