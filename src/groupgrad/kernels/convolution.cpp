// Causal depthwise convolutions of flat tokens, and their gradients. Channels are computed in blocks, each of which
// takes the tokens one after the other, so no number depends on the threads.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "vectors.h"

extern "C" {

// `convolution.py` mirrors it. A token's window is what its output is made of: the last `width` tokens up to itself,
// unless `windows` names others for it.
struct Convolution {
    int64_t tokens, channels, width;
    int64_t heads;           // tokens with windows of their own
    const int64_t *places;   // (heads), ascending
    const int64_t *windows;  // (heads, width), ending with the token itself; places from `tokens` on are in `before`
    const float *inputs;     // (tokens, channels)
    int64_t stride;          // between the inputs of two tokens
    const float *before;     // (..., channels)
    const float *weight;     // (width, channels)
    const float *bias;       // (channels), or null
    const float *gradient;   // of the outputs; null: outputs are computed, otherwise the gradients below
    float *outputs;          // (tokens, channels)
    float *of_inputs;        // (tokens, channels)
    float *of_before;        // like `before`, zeros at first
    float *of_weight;        // (width, channels)
    float *of_bias;          // (channels)
    int64_t gates;           // 1: outputs go through silu
};
}

namespace {

constexpr long CHANNELS = 64;            // of a block: whole cache lines, whose sums stay in the first cache
constexpr long SUMMED = 16;              // tokens whose gradients of weights are added up in single precision
constexpr long SMALL_INPUT = 1 << 14;    // numbers that take less time than starting other threads

// Channels from `first` on, `count` of them.
class Block {
    const Convolution &call;
    const long first, count, width = call.width;
    long head = 0;
    std::vector<const float *> inputs;
    std::vector<float *> gradients;

    // Finds the inputs of a token's window, and where their gradients go. Tokens come in ascending order.
    void find_window(long token) {
        const bool has_window = head < call.heads && call.places[head] == token;
        const int64_t *window = call.windows + head * width;
        for (long i = 0; i < width; i++) {
            const long place = has_window ? window[i] : token - width + 1 + i, beyond = place - call.tokens;
            const bool is_before = beyond >= 0;
            inputs[i] = (is_before ? call.before + beyond * call.channels : call.inputs + place * call.stride) + first;
            if (!call.gradient) continue;
            gradients[i] = (is_before ? call.of_before + beyond * call.channels
                                      : call.of_inputs + place * call.channels) + first;
        }
        head += has_window;
    }

    // The convolution at channels from `c` on, in the order of `groupgrad_convolution_step`.
    Vec sum(long c) const {
        const float *weight = call.weight + first + c;
        const long some = count - c, last = width - 1;
        Vec sum = call.bias ? load_some(call.bias + first + c, some) : Vec{};
        sum += load_some(weight + last * call.channels, some) * load_some(inputs[last] + c, some);
        for (long i = 0; i < last; i++)
            sum += load_some(weight + i * call.channels, some) * load_some(inputs[i] + c, some);
        return sum;
    }

    // Adds the gradients of a token, given those of its sums, to those of its window and to `of_weight`, the sums of
    // (width, CHANNELS). A token's own input has no gradient before.
    void add(long c, Vec gradient, float *of_weight) {
        const long some = count - c;
        for (long i = 0; i < width; i++) {
            float *sums = of_weight + i * CHANNELS + c;
            store(sums, load(sums) + gradient * load_some(inputs[i] + c, some));
            const Vec term = gradient * load_some(call.weight + i * call.channels + first + c, some);
            store_some(gradients[i] + c, i + 1 < width ? load_some(gradients[i] + c, some) + term : term, some);
        }
    }

public:
    Block(const Convolution &call, long first, long count)
        : call(call), first(first), count(count), inputs(call.width), gradients(call.width) {}

    void compute() {
        for (long token = 0; token < call.tokens; token++) {
            find_window(token);
            float *outputs = call.outputs + token * call.channels + first;
            for (long c = 0; c < count; c += LANES) {
                const Vec value = sum(c);
                store_some(outputs + c, call.gates ? value / (1.0f + exponential(-value)) : value, count - c);
            }
        }
    }

    void add_gradients() {
        // The last row is that of the bias.
        std::vector<float> sums((width + 1) * CHANNELS);
        std::vector<double> totals(sums.size());
        float *of_bias = sums.data() + width * CHANNELS;
        for (long token = 0; token < call.tokens; token++) {
            find_window(token);
            const float *of_outputs = call.gradient + token * call.channels + first;
            for (long c = 0; c < count; c += LANES) {
                Vec gradient = load_some(of_outputs + c, count - c);
                if (call.gates) {
                    const Vec value = sum(c), share = 1.0f / (1.0f + exponential(-value));
                    gradient *= share * (1.0f + value * (1.0f - share));
                }
                store(of_bias + c, load(of_bias + c) + gradient);
                add(c, gradient, sums.data());
            }
            if ((token + 1) % SUMMED && token + 1 < call.tokens) continue;
            for (size_t i = 0; i < sums.size(); i++) totals[i] += sums[i];
            std::fill(sums.begin(), sums.end(), 0.0f);
        }
        for (long i = 0; i <= width; i++) {
            float *to = i < width ? call.of_weight + i * call.channels : call.of_bias;
            if (to) std::copy_n(totals.begin() + i * CHANNELS, count, to + first);
        }
    }
};

}  // namespace

extern "C" {

void groupgrad_convolution(const Convolution *call, int threads) {
    const bool is_small = call->tokens * call->channels < SMALL_INPUT;
#pragma omp parallel for num_threads(is_small ? 1 : threads) schedule(dynamic)
    for (long first = 0; first < call->channels; first += CHANNELS) {
        Block block(*call, first, std::min<long>(CHANNELS, call->channels - first));
        call->gradient ? block.add_gradients() : block.compute();
    }
}
}
