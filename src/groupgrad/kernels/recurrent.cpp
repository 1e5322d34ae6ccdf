// One token of each row in recurrent layers: states are updated where they are stored.

#include <omp.h>

#include "state_step.h"

namespace {

constexpr long SMALL_STATES = 1 << 14;  // numbers that take less time than starting other threads

}  // namespace

extern "C" {

// `recurrent.py` mirrors it.
struct StateStep {
    int64_t rows, heads, key_heads, key_width, value_width;
    float *states;                        // (rows, heads, key_width, value_width)
    const float *queries, *keys;          // (rows, key_heads, key_width)
    const float *values;                  // (rows, heads, value_width)
    const float *decays;                  // (rows, heads)
    const float *strengths;               // (rows, heads) or null
    float *outputs;                       // (rows, heads, value_width)
    float scale, epsilon;  // queries are multiplied by `scale`; both have length 1 before unless `epsilon` is negative
};

// S becomes decay S + k u', and the output is q' S, where u is v, or strength (v - decay k' S).
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
            c.decays[task],
            c.strengths ? c.strengths + task : nullptr,
            c.outputs + task * c.value_width,
            c.key_width,
            c.value_width,
            factor(c.queries) * c.scale,
            factor(c.keys),
        };
        head.step();
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
        float *output = outputs + row * channels, *before = last + row * channels * (width - 1);
        convolve(before, inputs + row * row_stride, channel_stride, weight, bias, channels, width, output);
        if (gates) silu(output, channels);
    }
}
}
