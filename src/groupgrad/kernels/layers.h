// The parts of a layer that decode steps and passes over many tokens share. A token's numbers are bit-exact whatever
// tokens are computed beside it.

#pragma once

#include <algorithm>
#include <cmath>

#include "gemm.h"

extern "C" {

struct Linear {
    const void *weight;  // (outputs, width), float32 or bfloat16
    const float *bias;   // (outputs) or null
};
}

namespace {

constexpr long SMALL = 1 << 21;       // multiplications that take less time than starting other threads
constexpr long SMALL_PART = 1 << 15;  // numbers that take less time than starting other threads

// Called by all threads: stores the rows that `from(row)` points to as columns.
template <class From>
void put_side_by_side(const Columns &output, From from) {
    constexpr long PART = 128;
    const long grains = output.padded_rows() / GRAIN, parts = (output.width + PART - 1) / PART;
#pragma omp for
    for (long task = 0; task < grains * parts; task++) {
        const long row = task % grains * GRAIN, start = task / grains * PART;
        const float *rows[GRAIN];
        for (long i = 0; i < GRAIN; i++) rows[i] = row + i < output.rows ? from(row + i) : nullptr;
        output.put(row, rows, start, std::min(output.width, start + PART));
    }
}

// Called by all threads: output (rows, stride) = input times the layer's weight, bfloat16 if `is_half`, plus its bias.
void linear(Worker &worker, const Columns &input, const Linear &layer, bool is_half, float *tile, float *output,
            long stride) {
    product(worker, input, {layer.weight, is_half}, tile, [&](const Outputs &outputs) {
        put_rows(outputs, input.rows, layer.bias, output, stride);
    });
}

// ------------------------------------------------------------------------------------------------ norms

// Norms are computed in float64: an error of the factor scales all numbers alike, so later sums do not average it out.
// The squares of every eighth number are summed, then the eight sums by halves.
constexpr long NORM_SUMS = 8;

typedef double Doubles __attribute__((vector_size(8 * NORM_SUMS)));
typedef float Floats __attribute__((vector_size(4 * NORM_SUMS)));

inline Doubles doubles(const float *from) { return __builtin_convertvector(load_as<Floats>(from), Doubles); }

// The factor of a vector of `width` numbers, from the eight sums of its squares.
inline double norm_factor(const double *squares, long width, float epsilon) {
    double sums[NORM_SUMS];
    std::memcpy(sums, squares, sizeof(sums));
    for (long half = NORM_SUMS / 2; half > 0; half /= 2)
        for (long i = 0; i < half; i++) sums[i] += sums[half + i];
    return 1.0 / std::sqrt(sums[0] / width + epsilon);
}

inline float normalised(float value, double factor, float weight) {
    return static_cast<float>(weight * (value * factor));
}

// Normalises a vector, and returns its factor.
double normalise(const float *input, const float *weight, long width, float epsilon, float *output) {
    Doubles sums = {};
    const long whole = width / NORM_SUMS * NORM_SUMS;
    for (long i = 0; i < whole; i += NORM_SUMS) {
        const Doubles value = doubles(input + i);
        sums += value * value;
    }
    double squares[NORM_SUMS];
    std::memcpy(squares, &sums, sizeof(sums));
    for (long i = whole; i < width; i++) squares[i - whole] += static_cast<double>(input[i]) * input[i];
    const double factor = norm_factor(squares, width, epsilon);
    for (long i = 0; i < width; i++) output[i] = normalised(input[i], factor, weight[i]);
    return factor;
}

// ------------------------------------------------------------------------------------------------ gates

// An activation x * sigmoid(inner(x)), and the derivative of `inner`.
struct Silu {
    static Vec inner(Vec x) { return x; }
    static Vec slope(Vec) { return splat(1.0f); }
};

// GELU with a hyperbolic tangent (arXiv:1606.08415, section 2): 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
struct TanhGelu {
    static constexpr float TWICE = 1.5957691216f, CUBE = 0.044715f;  // 2 * sqrt(2 / pi)
    static Vec inner(Vec x) { return TWICE * (x + CUBE * x * x * x); }
    static Vec slope(Vec x) {
        const Vec square = x * x, limit = splat(1e6f);  // from which on a product with 1 - sigmoid is 0
        return TWICE * (1.0f + 3.0f * CUBE * (square > limit ? limit : square));
    }
};

// to = activation(gates) * ups, of `count` numbers.
template <class Activation = Silu>
void gate_values(const float *gates, const float *ups, long count, float *to) {
    for (long i = 0; i < count; i += LANES) {
        const Vec gate = load_some(gates + i, count - i);
        const Vec value = gate / (1.0f + exponential(-Activation::inner(gate))) * load_some(ups + i, count - i);
        store_some(to + i, value, count - i);
    }
}

// Gradients of activation(gates) * ups with respect to both. `output`, unless null, gets activation(gates) * ups once
// more; it may be `gradient`.
template <class Activation>
void gate_gradients(const float *gradient, const float *gates, const float *ups, long count, float *of_gates,
                    float *of_ups, float *output) {
    for (long i = 0; i < count; i += LANES) {
        const long left = count - i;
        const Vec gate = load_some(gates + i, left), grad = load_some(gradient + i, left), up = load_some(ups + i, left);
        const Vec one_more = 1.0f + exponential(-Activation::inner(gate)), share = 1.0f / one_more;
        const Vec inner = gate * (1.0f - share) * Activation::slope(gate);
        store_some(of_gates + i, grad * up * share * (1.0f + inner), left);
        store_some(of_ups + i, grad * gate * share, left);
        if (output) store_some(output + i, gate / one_more * up, left);
    }
}

// to = max(values, 0)^2, of `count` numbers.
void square_positive(const float *values, long count, float *to) {
    for (long i = 0; i < count; i++) {
        const float positive = std::max(values[i], 0.0f);
        to[i] = positive * positive;
    }
}

// values *= 1 / (1 + exp(-gates)), of `count` numbers.
inline void multiply_by_sigmoid(const float *gates, long count, float *values) {
    for (long i = 0; i < count; i += LANES) {
        const Vec value = load_some(values + i, count - i) / (1.0f + exponential(-load_some(gates + i, count - i)));
        store_some(values + i, value, count - i);
    }
}

// ------------------------------------------------------------------------------------------------ rotary embeddings

// Rotary embedding, rounded as torch does: both products, then their sum.
void rotate(const float *cosines, const float *sines, long width, float *values) {
    const long half = width / 2;
    for (long i = 0; i < half; i += LANES) {
        const long count = half - i;
        const Vec one = load_some(values + i, count), other = load_some(values + half + i, count);
        Vec a = one * load_some(cosines + i, count), b = other * load_some(sines + i, count);
        Vec c = other * load_some(cosines + half + i, count), d = one * load_some(sines + half + i, count);
        ROUND(a);
        ROUND(b);
        ROUND(c);
        ROUND(d);
        store_some(values + i, a - b, count);
        store_some(values + half + i, c + d, count);
    }
}

}  // namespace
