// Attention of queries over row-major keys and values. Scores are products of vectors of columns, which are summed over
// their lanes at the end.

#pragma once

#include <algorithm>
#include <cmath>

#include "gemm.h"

constexpr long MAX_QUERIES = LANES == 8 ? 2 : REGISTERS == 32 ? 8 : 4;  // rows whose sums are in registers together
constexpr long MAX_KEYS = LANES == 8 ? 72 : 192;                        // keys that stay in the L1 cache for all rows
constexpr long MIXED_KEYS = 3 * MAX_PANEL;                              // keys whose values stay there for all queries

extern "C" {

// The largest score of a query, and 1 / the sum of exp(score - peak): what turns its scores into weights.
struct SoftmaxTotals {
    float peak, factor;
};
}

namespace {

// Outputs whose sums are in registers together, for so many rows. Two rows of half vectors make a whole one.
constexpr int keys_at_once(long rows) {
    return rows == 2 && LANES == 8 ? 4 : std::min<int>(8, MAX_SUMS / static_cast<int>(rows));
}

// Rows in blocks of at most MAX_QUERIES, as even as possible. A block interleaves its rows: LANES numbers of the first
// row, LANES of the second, and so on, then the next LANES of the first. The end of each row is padded with zeros.
struct Packed {
    float *data;
    long rows, width;

    long num_blocks() const { return (rows + MAX_QUERIES - 1) / MAX_QUERIES; }
    long first(long block) const { return rows * block / num_blocks(); }
    const float *block(long index) const { return data + first(index) * padded(width); }

    // Inner steps of the products of all rows with `count` outputs, approximately.
    long inner_steps(long count) const {
        const long at_once = keys_at_once((rows + num_blocks() - 1) / num_blocks());
        return num_blocks() * ((count + at_once - 1) / at_once) * (width / LANES);
    }

    void put(long row, const float *values) const {
        long index = row * num_blocks() / rows;
        while (first(index + 1) <= row) index++;
        const long start = first(index), step = (first(index + 1) - start) * LANES;
        float *to = data + start * padded(width) + (row - start) * LANES;
        for (long i = 0; i < width; i += LANES, to += step) {
            const long some = std::min<long>(width - i, LANES);
            std::memcpy(to, values + i, some * sizeof(float));
            if (some < LANES) std::memset(to + some, 0, (LANES - some) * sizeof(float));
        }
    }
};

// Number of sums rounded up to whole vectors, or to half vectors where a vector has sixteen lanes.
constexpr int with_rest(int count) {
    const int step = LANES == 16 ? 8 : LANES;
    return (count + step - 1) / step * step;
}

// to[i] = the sum of the lanes of vector i, for COUNT vectors and the zero vectors that pad them.
template <int COUNT>
inline void store_totals(const Vec *all, float *to) {
    int i = 0;
    for (; i + LANES <= with_rest(COUNT); i += LANES) store(to + i, totals(all + i));
#if defined(__AVX512F__)
    if (i < COUNT) {
        const Half found = half_totals(all + i);
        std::memcpy(to + i, &found, sizeof(found));
    }
#endif
}

// scores[m * stride + n] = the sum of the lanes of sums[n * M + m].
template <int M, int N>
inline void put_totals(const Vec *sums, float *scores, long stride) {
#if defined(__AVX__) && !defined(__AVX512F__)
    if constexpr (M == 1 && N == LANES) return store(scores, totals(sums));
    if constexpr (M == 2 && N == 4) {
        const auto both = [&](int n) { return fold4(sums[n * M], sums[n * M + M - 1]); };
        const Vec found = fold1(fold2(both(0), both(1)), fold2(both(2), both(3)));
        std::memcpy(scores, &found, sizeof(Half));
        std::memcpy(scores + stride, reinterpret_cast<const float *>(&found) + 4, sizeof(Half));
        return;
    }
#endif
    float tile[with_rest(M * N)];
    store_totals<M * N>(sums, tile);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) scores[m * stride + n] = tile[n * M + m];
}

// scores[m * stride + n] = row m of a packed block times row n of `keys` (n, width).
template <int M, int N>
inline void dots(
    const float *block, const float *keys, long width, float *scores, long stride, const Prefetch &prefetch
) {
    Vec sums[with_rest(M * N)] = {};
    const long whole = width / LANES, each = prefetch.each;
    const char *line = prefetch.at;
    for (long k = 0; k < whole; k++) {
        Vec key[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) key[n] = load(keys + n * width + k * LANES);
        for (long i = 0; i < each; i++, line += LINE) __builtin_prefetch(line, 0, 2);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            Vec value = load(block + (k * M + m) * LANES);
            KEEP(value);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[n * M + m] = fused(value, key[n], sums[n * M + m]);
        }
    }
    if (const long rest = width % LANES) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const Vec key = load_part(keys + n * width + whole * LANES, rest);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
                sums[n * M + m] = fused(load(block + (whole * M + m) * LANES), key, sums[n * M + m]);
        }
    }
    put_totals<M, N>(sums, scores, stride);
}

// The same for `count` keys.
template <int M>
void some_dots(
    const float *block, const float *keys, long count, long width, float *scores, long stride, Prefetch &prefetch
) {
    constexpr int N = keys_at_once(M);
    const long steps = width / LANES;
    long n = 0;
    for (; n + N <= count; n += N, prefetch.advance(steps))
        dots<M, N>(block, keys + n * width, width, scores + n, stride, prefetch);
    if (N > 4)
        for (; n + 4 <= count; n += 4, prefetch.advance(steps))
            dots<M, 4>(block, keys + n * width, width, scores + n, stride, prefetch);
    for (; n < count; n++, prefetch.advance(steps))
        dots<M, 1>(block, keys + n * width, width, scores + n, stride, prefetch);
}

// scores[q * stride + p] for `count` keys p (count, width) and the queries q of a packed block.
void score(const Packed &queries, const float *keys, long count, float *scores, long stride, Prefetch prefetch) {
    using Some = void (*)(const float *, const float *, long, long, float *, long, Prefetch &);
    constexpr Some some_rows[] = {some_dots<1>, some_dots<2>, some_dots<3>, some_dots<4>,
                                  some_dots<5>, some_dots<6>, some_dots<7>, some_dots<8>};
    prefetch.distribute(queries.inner_steps(count));
    for (long start = 0; start < count; start += MAX_KEYS) {
        const long some = std::min(MAX_KEYS, count - start);
        for (long index = 0; index < queries.num_blocks(); index++) {
            const long first = queries.first(index), rows = queries.first(index + 1) - first;
            const float *from = keys + start * queries.width;
            float *to = scores + first * stride + start;
            some_rows[rows - 1](queries.block(index), from, some, queries.width, to, stride, prefetch);
        }
    }
}

// The rows of a block, in C vectors of type V, times N keys. Sums are those of `dots`: lane by lane, and then by halves.
template <class V, int C, int N>
inline void sum_lanes(const float *block, const float *keys, long width, Tile tile) {
    constexpr long rows = C * sizeof(V) / 4;
    V kept[5][N][C];  // sums of one lane, of two lanes, of four, ... that wait for the other half
    for (int number = 0; number < LANES; number++) {
        int lane = 0;  // lanes whose sums are added come one after the other: 0, 4, 2, 6, 1, ... of eight
        for (int half = LANES / 2, rest = number; half; half /= 2, rest /= 2) lane += rest % 2 * half;
        V sums[N][C] = {};
        for (long k = lane; k < width; k += LANES) add_column<V, C, N>(sums, block + k * rows, keys + k, width);
        int level = 0;
        for (; number >> level & 1; level++)
#pragma GCC unroll 24
            for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) sums[n][c] += kept[level][n][c];
#pragma GCC unroll 24
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                if (number < LANES - 1)
                    kept[level][n][c] = sums[n][c];
                else
                    store_as(tile.at + n * tile.step + c * (rows / C), sums[n][c]);
            }
    }
}

// scores[p * stride + q] = the scores of `score`, to the bit, for many queries, stored as columns.
void score_lanes(const Columns &queries, const float *keys, long count, float *scores, long stride) {
    const long width = queries.width;
    for (long start = 0; start < count; start += MAX_PANEL) {
        const long end = std::min(start + MAX_PANEL, count);
        queries.each_block([&](const Columns::Block &block) {
            with_vectors(block, [&](auto vectors) {
                using Rows = decltype(vectors);
                constexpr int N = outputs_at_once(Rows::COUNT);
                const Tile to{scores + block.first, stride};
                long n = start;
                for (; n + N <= end; n += N)
                    sum_lanes<typename Rows::V, Rows::COUNT, N>(block.data, keys + n * width, width, to.from(n));
                for (; n < end; n++)
                    sum_lanes<typename Rows::V, Rows::COUNT, 1>(block.data, keys + n * width, width, to.from(n));
            });
        });
    }
}

// scores[q * stride + p] = the same scores, each summed number by number.
void score_together(
    const Columns &queries, const float *keys, long count, float *tile, float *scores, long stride, Prefetch prefetch
) {
    prefetch.distribute(queries.inner_steps(count));
    for (long start = 0; start < count; start += MAX_PANEL) {
        const long some = std::min(MAX_PANEL, count - start);
        queries.each_block([&](const Columns::Block &block) {
            multiply(block, keys + start * queries.width, some, queries.width, tile, prefetch);
            put_rows(Outputs{block, start, some, tile}, queries.rows, nullptr, scores, stride);
        });
    }
}

// scores[p * stride + q] = the same scores, of each key with all queries.
void score_by_key(const Columns &queries, const float *keys, long count, float *scores, long stride) {
    Prefetch none;
    for (long start = 0; start < count; start += MAX_PANEL) {
        const long some = std::min(MAX_PANEL, count - start);
        queries.each_block([&](const Columns::Block &block) {
            const Tile tile{scores + start * stride + block.first, stride};
            multiply(block, keys + start * queries.width, some, queries.width, tile, none);
        });
    }
}

// ------------------------------------------------------------------------------------------------ weights and values

// The softmax of a query, whose scores come block by block: what the scores before have added up to, lane by lane.
struct RunningSoftmax {
    Vec sums = {};  // of exp(score - peak)
    float peak = -INFINITY;

    RunningSoftmax() = default;

    // The exponential of a sink, unless null, is added to the sum.
    explicit RunningSoftmax(const float *sink) {
        if (!sink) return;
        peak = *sink;
        sums[0] = 1.0f;
    }

    // Replaces `count` scores (whole vectors; not all -INFINITY) by exp(score - peak). Returns the factor of what has
    // been added up with the former peak.
    float add(float *scores, long count) {
        Vec most = splat(peak);
        for (long i = 0; i < count; i += LANES) {
            const Vec score = load(scores + i);
            most = score > most ? score : most;
        }
        const float highest = largest(most);
        const float factor = highest > peak ? exponential(splat(peak - highest))[0] : 1.0f;
        Vec more = {};
        peak = highest;
        for (long i = 0; i < count; i += LANES) {
            const Vec value = exponential(load(scores + i) - peak);
            store(scores + i, value);
            more += value;
        }
        sums = sums * factor + more;
        return factor;
    }

    SoftmaxTotals end() const { return {peak, 1.0f / total(sums)}; }
};

// The softmaxes of `count` queries (whole vectors), whose scores come key by key. Each is a `RunningSoftmax`, to the bit.
struct RunningSoftmaxes {
    long count;
    float *peaks, *factors, *sums;  // of each query; `sums` (LANES, count)

    static long size(long count) { return (2 + LANES) * count; }

    RunningSoftmaxes(long count, float *scratch)
        : count(count), peaks(scratch), factors(peaks + count), sums(factors + count) {}

    // The exponential of its sink, unless null, is added to the sum of query q.
    void start(long q, const float *sink) const {
        const RunningSoftmax one(sink);
        peaks[q] = one.peak;
        for (int lane = 0; lane < LANES; lane++) sums[lane * count + q] = one.sums[lane];
    }

    // Replaces the scores (keys, stride) of the keys from `first` to `end` of a block by exp(score - peak). `factors` are
    // then those of what has been added up with the former peaks. A query that sees none of the keys adds zeros.
    void add(float *scores, long stride, long first, long end) const {
        for (long q = 0; q < count; q += LANES) {
            const Vec before = load(peaks + q), nothing = splat(-INFINITY);
            Vec most = before;
            for (long k = first; k < end; k++) {
                const Vec score = load(scores + k * stride + q);
                most = score > most ? score : most;
            }
            const Vec peak = most == nothing ? Vec{} : most, factor = exponential(before - peak);
            store(peaks + q, most);
            store(factors + q, factor);
            for (long lane = 0; lane < LANES; lane++) {
                Vec more = {};
                for (long k = first + (lane - first % LANES + LANES) % LANES; k < end; k += LANES) {
                    float *at = scores + k * stride + q;
                    const Vec value = exponential(load(at) - peak);
                    store(at, value);
                    more += value;
                }
                float *sum = sums + lane * count + q;
                store(sum, load(sum) * factor + more);
            }
        }
    }

    SoftmaxTotals end(long q) const {
        RunningSoftmax one;
        one.peak = peaks[q];
        for (int lane = 0; lane < LANES; lane++) one.sums[lane] = sums[lane * count + q];
        return one.end();
    }
};

// cap * tanh(score / cap) in place.
void cap_scores(float *scores, long count, float cap) {
    for (long i = 0; i < count; i += LANES) {
        const Vec x = load_some(scores + i, count - i) / cap, square = x * x, negative = -x;
        // Near 0 the quotient of exponentials has few exact digits, so a series is used there.
        Vec series = splat(62.0f / 2835);
        series = series * square - 17.0f / 315;
        series = series * square + 2.0f / 15;
        series = series * square - 1.0f / 3;
        series = x + x * square * series;
        const Vec shrunk = exponential(2.0f * (x > 0.0f ? negative : x)), large = (1.0f - shrunk) / (1.0f + shrunk);
        const Vec signed_large = x > 0.0f ? large : -large;
        store_some(scores + i, cap * (square < 0.0625f ? series : signed_large), count - i);
    }
}

// output[q] += sum over p of weights[q * stride + p] * values[p], for Q queries and V vectors of columns. With `Across`
// the weights are stored the other way round: weights[p * stride + q].
template <bool Across, int Q, int V>
inline void mix_columns(
    const float *weights, long stride, const float *values, long count, long width, float *output, Prefetch &prefetch
) {
    Vec sums[Q][V] = {};
    const long each = prefetch.each;
    const char *line = prefetch.at;
    for (long p = 0; p < count; p++) {
        Vec value[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            value[v] = load(values + p * width + v * LANES);
            KEEP(value[v]);
        }
        for (const char *end = line + each * LINE; line < end; line += LINE) __builtin_prefetch(line, 0, 2);
#pragma GCC unroll 6
        for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                const float weight = weights[Across ? p * stride + q : q * stride + p];
                sums[q][v] = fused(splat(weight), value[v], sums[q][v]);
            }
    }
#pragma GCC unroll 6
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            float *to = output + q * width + v * LANES;
            store(to, load(to) + sums[q][v]);
        }
    prefetch.advance(count);
}

// Vectors of columns whose sums are in registers together, for so many queries. Few sums wait for each other.
constexpr int columns_at_once(long queries) {
    return (REGISTERS == 32 ? 2 : 1) * (queries > 2 ? 2 : 4);
}

// The same for the columns from `start` on, V vectors at a time and then fewer.
template <bool Across, int Q, int V = columns_at_once(Q)>
void mix_some(
    const float *weights, long stride, const float *values, long count, long width, long start, float *output,
    Prefetch &prefetch
) {
    for (; start + V * LANES <= width; start += V * LANES)
        mix_columns<Across, Q, V>(weights, stride, values + start, count, width, output + start, prefetch);
    if constexpr (V > 1)
        return mix_some<Across, Q, V / 2>(weights, stride, values, count, width, start, output, prefetch);
    for (long d = start; d < width; d++)
        for (int q = 0; q < Q; q++) {
            float sum = 0.0f;
            for (long p = 0; p < count; p++)
                sum = fused(weights[Across ? p * stride + q : q * stride + p], values[p * width + d], sum);
            output[q * width + d] += sum;
        }
}

// output (queries, width) += weights (queries, stride) times values (count, width). With `Across` weights are
// (count, stride), and their transpose is multiplied. Each output is summed value by value, in order, over MIXED_KEYS
// values, whose sum is added to the others.
template <bool Across = false>
void mix(
    long queries, const float *weights, long stride, const float *values, long count, long width, float *output,
    Prefetch prefetch = {}
) {
    const long step = Across ? 1 : stride, next = Across ? stride : 1;
    const long passes = std::max(1L, width / (columns_at_once(queries) * LANES));  // over the values, for six queries
    prefetch.distribute((queries + 5) / 6 * passes * count);
    for (long start = 0; start < count; start += MIXED_KEYS) {
        const long some = std::min(MIXED_KEYS, count - start);
        const float *from = weights + start * next, *part = values + start * width;
        long q = 0;
        for (; q + 6 <= queries; q += 6)
            mix_some<Across, 6>(from + q * step, stride, part, some, width, 0, output + q * width, prefetch);
        for (; q + 4 <= queries; q += 4)
            mix_some<Across, 4>(from + q * step, stride, part, some, width, 0, output + q * width, prefetch);
        for (; q + 2 <= queries; q += 2)
            mix_some<Across, 2>(from + q * step, stride, part, some, width, 0, output + q * width, prefetch);
        for (; q < queries; q++)
            mix_some<Across, 1>(from + q * step, stride, part, some, width, 0, output + q * width, prefetch);
    }
}

}  // namespace
