// One token of each row in recurrent layers: states are updated where they are stored.

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace {

constexpr long COLUMNS = 64;             // of a state, whose sums stay in registers
constexpr int VECTORS = COLUMNS / LANES;
constexpr long SMALL_STATES = 1 << 14;   // numbers that take less time than starting other threads

// The state of one head, (key_width, value_width), and its token.
struct Head {
    float *state;
    const float *query, *key, *value, *decay;
    const float *strength;  // of the delta rule; null: the values are added as they are
    float *output;
    long key_width, value_width, decay_width;
    float query_factor, key_factor;

    float kept(long k) const { return decay[decay_width == 1 ? 0 : k]; }

    // Columns from `first` on, `count` of them, by vectors.
    template <bool IS_WHOLE>
    void step(long first, long count) const {
        const auto read = [&](const float *from, int i) {
            return IS_WHOLE ? load(from + i * LANES) : load_some(from + i * LANES, count - i * LANES);
        };
        const auto write = [&](float *to, Vec vector, int i) {
            IS_WHOLE ? store(to + i * LANES, vector) : store_some(to + i * LANES, vector, count - i * LANES);
        };
        const int vectors = IS_WHOLE ? VECTORS : static_cast<int>((count + LANES - 1) / LANES);
        Vec added[VECTORS], sums[VECTORS];
        for (int i = 0; i < VECTORS; i++) added[i] = sums[i] = Vec{};
        if (strength) {
            for (long k = 0; k < key_width; k++) {
                const float factor = kept(k) * (key[k] * key_factor);
                for (int i = 0; i < vectors; i++) added[i] += factor * read(state + k * value_width + first, i);
            }
            for (int i = 0; i < vectors; i++) added[i] = *strength * (read(value + first, i) - added[i]);
        } else {
            for (int i = 0; i < vectors; i++) added[i] = read(value + first, i);
        }
        for (long k = 0; k < key_width; k++) {
            float *row = state + k * value_width + first;
            const float key_now = key[k] * key_factor, query_now = query[k] * query_factor;
            for (int i = 0; i < vectors; i++) {
                const Vec now = kept(k) * read(row, i) + key_now * added[i];
                sums[i] += query_now * now;
                write(row, now, i);
            }
        }
        for (int i = 0; i < vectors; i++) write(output + first, sums[i], i);
    }
};

// 1 / the length of a vector.
float length_factor(const float *vector, long width, float epsilon) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < width; i++) sum += vector[i] * vector[i];
    return 1.0f / std::sqrt(sum + epsilon);
}

// x * sigmoid(x) in place.
void silu(float *values, long count) {
    for (long i = 0; i < count; i += LANES) {
        const Vec value = load_some(values + i, count - i);
        store_some(values + i, value / (1.0f + exponential(-value)), count - i);
    }
}

}  // namespace

extern "C" {

// `recurrent.py` mirrors it.
struct StateStep {
    int64_t rows, heads, key_heads, key_width, value_width, decay_width;  // decay_width: 1 or key_width
    float *states;                        // (rows, heads, key_width, value_width)
    const float *queries, *keys;          // (rows, key_heads, key_width)
    const float *values;                  // (rows, heads, value_width)
    const float *decays;                  // (rows, heads, decay_width)
    const float *strengths;               // (rows, heads) or null
    float *outputs;                       // (rows, heads, value_width)
    float scale, epsilon;  // queries are multiplied by `scale`; both have length 1 before unless `epsilon` is negative
};

// S becomes diag(decay) S + k u', and the output is q' S, where u is v, or strength (v - k' diag(decay) S).
void groupgrad_state_step(const StateStep *call, int threads) {
    const StateStep &c = *call;
    const long size = c.key_width * c.value_width, repeat = c.heads / c.key_heads;
    const bool is_small = c.rows * c.heads * size < SMALL_STATES;
#pragma omp parallel for num_threads(is_small ? 1 : threads)
    for (long task = 0; task < c.rows * c.heads; task++) {
        const long row = task / c.heads, key_head = row * c.key_heads + task % c.heads / repeat;
        const auto factor = [&](const float *vectors) {
            if (c.epsilon < 0.0f) return 1.0f;
            return length_factor(vectors + key_head * c.key_width, c.key_width, c.epsilon);
        };
        const Head head = {
            c.states + task * size,
            c.queries + key_head * c.key_width,
            c.keys + key_head * c.key_width,
            c.values + task * c.value_width,
            c.decays + task * c.decay_width,
            c.strengths ? c.strengths + task : nullptr,
            c.outputs + task * c.value_width,
            c.key_width,
            c.value_width,
            c.decay_width,
            factor(c.queries) * c.scale,
            factor(c.keys),
        };
        for (long first = 0; first < c.value_width; first += COLUMNS) {
            const long count = std::min(COLUMNS, c.value_width - first);
            count == COLUMNS ? head.step<true>(first, count) : head.step<false>(first, count);
        }
    }
}

// A depthwise convolution of one input of each row with the last `width` - 1 ones, (rows, channels, width - 1), which
// move on by one. `channel_stride` and `row_stride` are those of the inputs; `bias` may be null. With `gates` outputs
// go through silu.
void groupgrad_convolution_step(float *last, const float *inputs, const float *weight, const float *bias, float *outputs,
                                int64_t rows, int64_t channels, int64_t width, int64_t channel_stride,
                                int64_t row_stride, int gates, int threads) {
    const bool is_small = rows * channels * width < SMALL_STATES;
#pragma omp parallel for num_threads(is_small ? 1 : threads)
    for (long row = 0; row < rows; row++) {
        for (long channel = 0; channel < channels; channel++) {
            float *before = last + (row * channels + channel) * (width - 1);
            const float *factors = weight + channel * width;
            const float input = inputs[row * row_stride + channel * channel_stride];
            float sum = factors[width - 1] * input + (bias ? bias[channel] : 0.0f);
            for (long i = 0; i + 1 < width; i++) {
                sum += factors[i] * before[i];
                before[i] = i + 2 < width ? before[i + 1] : input;
            }
            outputs[row * channels + channel] = sum;
        }
        if (gates) silu(outputs + row * channels, channels);
    }
}
}
