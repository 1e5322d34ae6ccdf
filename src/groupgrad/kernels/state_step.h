// One token of a row in a recurrent layer: its convolution, and the step of its states.

#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace {

constexpr long COLUMNS = 64;             // of a state, whose sums stay in registers
constexpr int VECTORS = COLUMNS / LANES;

// The state of one head, (key_width, value_width), and its token.
struct Head {
    float *state;
    const float *query, *key, *value;
    float decay;
    const float *strength;  // of the delta rule; null: the values are added as they are
    float *output;
    long key_width, value_width;
    float query_factor, key_factor;

    void step() const {
        for (long first = 0; first < value_width; first += COLUMNS) {
            const long count = std::min(COLUMNS, value_width - first);
            count == COLUMNS ? step_columns<true>(first, count) : step_columns<false>(first, count);
        }
    }

private:
    // Columns from `first` on, `count` of them, by vectors.
    template <bool IS_WHOLE>
    void step_columns(long first, long count) const {
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
                const float factor = decay * (key[k] * key_factor);
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
                const Vec now = decay * read(row, i) + key_now * added[i];
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

// log(1 + exp(x)), which is x where float32 has no more digits.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// A depthwise convolution of a row's input with the last `width` - 1 ones, (channels, width - 1), which move on by one.
// `stride` is that between the inputs of neighbouring channels. Outputs may lie where the inputs do if that is 1.
void convolve(float *last, const float *inputs, long stride, const float *weight, const float *bias, long channels,
              long width, float *outputs) {
    for (long channel = 0; channel < channels; channel++) {
        float *before = last + channel * (width - 1);
        const float *factors = weight + channel * width;
        const float input = inputs[channel * stride];
        float sum = factors[width - 1] * input + (bias ? bias[channel] : 0.0f);
        for (long i = 0; i + 1 < width; i++) {
            sum += factors[i] * before[i];
            before[i] = i + 2 < width ? before[i + 1] : input;
        }
        outputs[channel] = sum;
    }
}

}  // namespace
