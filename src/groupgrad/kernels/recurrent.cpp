// One token of each row in recurrent layers: states are updated where they are stored.

#include <omp.h>

#include <algorithm>

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
                const float factor = kept(k) * key[k];
                for (int i = 0; i < vectors; i++) added[i] += factor * read(state + k * value_width + first, i);
            }
            for (int i = 0; i < vectors; i++) added[i] = *strength * (read(value + first, i) - added[i]);
        } else {
            for (int i = 0; i < vectors; i++) added[i] = read(value + first, i);
        }
        for (long k = 0; k < key_width; k++) {
            float *row = state + k * value_width + first;
            for (int i = 0; i < vectors; i++) {
                const Vec now = kept(k) * read(row, i) + key[k] * added[i];
                sums[i] += query[k] * now;
                write(row, now, i);
            }
        }
        for (int i = 0; i < vectors; i++) write(output + first, sums[i], i);
    }
};

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
};

// S becomes diag(decay) S + k u', and the output is q' S, where u is v, or strength (v - k' diag(decay) S).
void groupgrad_state_step(const StateStep *call, int threads) {
    const StateStep &c = *call;
    const long size = c.key_width * c.value_width, repeat = c.heads / c.key_heads;
    const bool is_small = c.rows * c.heads * size < SMALL_STATES;
#pragma omp parallel for num_threads(is_small ? 1 : threads)
    for (long task = 0; task < c.rows * c.heads; task++) {
        const long row = task / c.heads, key_head = row * c.key_heads + task % c.heads / repeat;
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
        };
        for (long first = 0; first < c.value_width; first += COLUMNS) {
            const long count = std::min(COLUMNS, c.value_width - first);
            count == COLUMNS ? head.step<true>(first, count) : head.step<false>(first, count);
        }
    }
}

// A depthwise convolution of one input of each row with the last `width` - 1 ones, (rows, channels, width - 1), which
// move on by one. `channel_stride` and `row_stride` are those of the inputs; `bias` may be null.
void groupgrad_convolution_step(float *last, const float *inputs, const float *weight, const float *bias, float *outputs,
                                int64_t rows, int64_t channels, int64_t width, int64_t channel_stride,
                                int64_t row_stride, int threads) {
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
    }
}
}
