// Matrix products of few rows in float32: some rows times some outputs are summed in registers, so that a weight read is
// used for all these rows. Weights are read as they lie; the rows are interleaved ("packed").

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "vectors.h"

constexpr long MAX_ROWS = REGISTERS == 32 ? 8 : 4;   // rows that are summed at once
constexpr int MAX_SUMS = REGISTERS == 32 ? 24 : 12;  // sums in registers; the others hold what is multiplied
constexpr long MAX_PANEL = 192;                      // outputs that are computed between two stores
constexpr long PANEL_FLOATS = 1 << 15;               // of weights: they wait in the second cache for the next rows
constexpr long SLICE = 512;                          // columns that are multiplied before the next
constexpr long LINE = 64;                            // bytes that memory brings at a time
constexpr long TILE = MAX_PANEL * MAX_ROWS + LANES;

namespace {

// Outputs that are summed at once for some rows.
constexpr int outputs_at_once(long rows) { return std::min<int>(8, MAX_SUMS / static_cast<int>(rows)); }

// Rows in blocks of at most MAX_ROWS, as even as can be. Within a block the numbers are interleaved: LANES of its first
// row, LANES of its second, and so on, then the next LANES of the first; each row's last ones are filled up with zeros.
struct Packed {
    float *data;
    long rows, width;

    long num_blocks() const { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
    long first(long block) const { return rows * block / num_blocks(); }
    const float *block(long index) const { return data + first(index) * padded(width); }

    // Of the products of all rows with `count` outputs, roughly.
    long inner_steps(long count) const {
        const long at_once = outputs_at_once((rows + num_blocks() - 1) / num_blocks());
        return num_blocks() * ((count + at_once - 1) / at_once) * (width / LANES);
    }

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

// Memory that is asked for while something else is multiplied, so that it comes all the time and not in bursts: cache
// lines at up to two places, `each` of them in an inner step.
struct Soon {
    const char *at = nullptr, *then = nullptr;
    long lines = 0, more = 0;
    int each = 0;

    void add(const float *from, long floats) {
        const char *place = reinterpret_cast<const char *>(from);
        const long count = (floats * 4 + LINE - 1) / LINE;
        if (lines)
            then = place, more = count;
        else
            at = place, lines = count;
    }

    // Over so many inner steps.
    void spread(long steps) { each = steps ? static_cast<int>((lines + more + steps - 1) / steps) : 0; }

    void passed(long steps) {
        if (!each) return;
        at += steps * each * LINE, lines -= steps * each;
        if (lines > 0) return;
        at = then, lines = more, more = 0;
        if (lines <= 0) each = 0;
    }
};

// Sums are made a vector of them at a time, or half a vector where one is of sixteen.
constexpr int with_rest(int count) {
    const int step = LANES == 16 ? 8 : LANES;
    return (count + step - 1) / step * step;
}

// to[i] = the sum of vector i, of COUNT vectors and the empty ones behind; added to what is there if `more`.
template <int COUNT>
inline void add_totals(const Vec *all, bool more, float *to) {
    int i = 0;
    for (; i + LANES <= with_rest(COUNT); i += LANES) {
        const Vec found = totals(all + i);
        store(to + i, more ? found + load(to + i) : found);
    }
#if defined(__AVX512F__)
    if (i < COUNT) {
        Half before = {}, found = half_totals(all + i);
        if (more) std::memcpy(&before, to + i, sizeof(before));
        found += before;
        std::memcpy(to + i, &found, sizeof(found));
    }
#endif
}

// tile[n * M + m] = row m of a packed block times row n of `weights`, over `width` columns of `stride`; added to what is
// there if `more`. Up to LANES - 1 numbers behind are overwritten, or nothing is added to them.
template <int M, int N>
inline void dots(
    const float *block, const float *weights, long stride, long width, bool more, float *tile, const Soon &soon
) {
    Vec sums[with_rest(M * N)] = {};
    const long whole = width / LANES, each = soon.each;
    const char *line = soon.at;
    for (long k = 0; k < whole; k++) {
        Vec weight[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const float *from = weights + n * stride + k * LANES;
            weight[n] = load(from);
            // From the second cache into the first. Few rows have no time to spare for it.
            if (M > 2) __builtin_prefetch(from + N * stride);
        }
        for (long i = 0; i < each; i++, line += LINE) __builtin_prefetch(line, 0, 2);
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
    add_totals<M * N>(sums, more, tile);
}

template <int M>
void panel(const float *block, const float *weights, long count, long width, float *tile, Soon &soon) {
    constexpr int N = outputs_at_once(M);
    // A slice of the rows' numbers stays in the first cache, under all weights that go past it.
    for (long start = 0; start < width; start += SLICE) {
        const float *slice = block + start * M, *from = weights + start;
        const long some = std::min(SLICE, width - start), steps = some / LANES;
        long n = 0;
        for (; n + N <= count; n += N, soon.passed(steps))
            dots<M, N>(slice, from + n * width, width, some, start > 0, tile + n * M, soon);
        if (N > 4)
            for (; n + 4 <= count; n += 4, soon.passed(steps))
                dots<M, 4>(slice, from + n * width, width, some, start > 0, tile + n * M, soon);
        for (; n < count; n++, soon.passed(steps))
            dots<M, 1>(slice, from + n * width, width, some, start > 0, tile + n * M, soon);
    }
}

// tile[n * rows + m] for `count` outputs n and the rows m of a block.
void multiply(long rows, const float *block, const float *weights, long count, long width, float *tile, Soon &soon) {
    using Panel = void (*)(const float *, const float *, long, long, float *, Soon &);
    constexpr Panel panels[] = {panel<1>, panel<2>, panel<3>, panel<4>, panel<5>, panel<6>, panel<7>, panel<8>};
    panels[rows - 1](block, weights, count, width, tile, soon);
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
    return size > 32 ? (size + 47) / 48 * 48 : (size + 15) / 16 * 16;
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
    void go(const Packed &input, Body body) {
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

// All threads: input times the weight of the plan's next product; `use(row, n, count, values, stride)` for each row and
// some of its outputs from n on.
template <class Use>
void product(Turn &turn, const Packed &input, const float *weight, float *tile, Use use) {
    turn.go(input, [&](long start, long count, Soon &soon) {
        for (long index = 0; index < input.num_blocks(); index++) {
            const long first = input.first(index), rows = input.first(index + 1) - first;
            multiply(rows, input.block(index), weight + start * input.width, count, input.width, tile, soon);
            for (long m = 0; m < rows; m++) use(first + m, start, count, tile + m, rows);
        }
    });
}

}  // namespace
