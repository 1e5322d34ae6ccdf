// Sums over the tokens of a vocabulary, from logits in bits (logits times log2 e over the temperature).
//
// The weights of BLOCK neighbouring tokens are summed in float32. A weight is 2 to the power of its logit less the
// block's peak, a whole number. Blocks are summed one after the other in float64, so the sums do not depend on how many
// blocks a call has. A float32 sum over the vocabulary would be wrong in the sixth digit.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

constexpr long BLOCK = 128;
constexpr double NATS = 0.6931471805599453;  // in a bit
constexpr float LOWEST = -1e30f;             // lowest peak; finite, so that differences of peaks are never NaN

// 2 to the power of x within 2 units in the last place; 0 below the smallest normal number, NaN stays NaN.
inline Vec exponential2(Vec x) {
    const Vec lowest = splat(-126.0f), highest = splat(127.0f);
    Vec y = x < lowest ? lowest : x;
    y = y > highest ? highest : y;
    const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
    const Vec power = (y + shift) - shift, rest = y - power;
    Vec sum = splat(1.5252734e-5f);  // (ln 2)^k / k!
    sum = sum * rest + 1.5403530e-4f;
    sum = sum * rest + 1.3333558e-3f;
    sum = sum * rest + 9.6181291e-3f;
    sum = sum * rest + 5.5504109e-2f;
    sum = sum * rest + 0.24022651f;
    sum = sum * rest + 0.69314718f;
    sum = sum * rest + 1.0f;
    const Bits bits = (reinterpret_cast<Bits>(__builtin_convertvector(power, Whole)) + 127u) << 23;
    return x < lowest ? Vec{} : sum * reinterpret_cast<Vec>(bits);
}

// Sums of the weights 2^(bits - peak) of some tokens.
struct Weights {
    float peak, total, moment;  // `moment`: sum of weight * (bits - peak)
};

// Computes the weights of up to BLOCK tokens and stores them unless `to` is null. Logits times `factor` are in bits.
inline Weights weigh(const float *logits, long count, float factor, float *to) {
    Vec bits[BLOCK / LANES], most = splat(LOWEST);
    const long whole = count / LANES, rest = count % LANES;
    for (long i = 0; i < whole; i++) {
        bits[i] = load(logits + i * LANES) * factor;
        ROUND(bits[i]);
        most = bits[i] > most ? bits[i] : most;
    }
    float peak = most[0];
    for (int lane = 1; lane < LANES; lane++) peak = std::max(peak, static_cast<float>(most[lane]));
    for (long i = count - rest; i < count; i++) peak = std::max(peak, logits[i] * factor);
    peak = std::ceil(peak);
    Vec sums = {}, products = {};
    const auto add = [&](Vec less, Vec some) {
        sums += some;
        // A weight of 0 adds nothing; its logit may be minus infinity.
        products += some == 0.0f ? some : some * less;
    };
    for (long i = 0; i < whole; i++) {
        const Vec less = bits[i] - peak, some = exponential2(less);
        if (to) store(to + i * LANES, some);
        add(less, some);
    }
    if (rest) {
        Vec value = load_part(logits + count - rest, rest) * factor;
        ROUND(value);
        const Vec less = value - peak;
        Vec some = exponential2(less);
        for (long lane = rest; lane < LANES; lane++) some[lane] = 0.0f;
        if (to) store_some(to + count - rest, some, rest);
        add(less, some);
    }
    return {peak, total(sums), total(products)};
}

// Running sums over blocks, added one after the other.
struct Sums {
    double peak = LOWEST, total = 0.0, moment = 0.0;

    void add(const Weights &block) {
        if (block.peak > peak) {
            const double shrink = std::exp2(peak - block.peak);
            moment = shrink * (moment + (peak - block.peak) * total);
            total *= shrink;
            peak = block.peak;
        }
        const double lower = block.peak - peak, shrink = std::exp2(lower);
        total += shrink * block.total;
        moment += shrink * (block.moment + lower * block.total);
    }

    // Log-probs and entropies are in nats.
    float logprob(float bits) const { return static_cast<float>((bits - peak - std::log2(total)) * NATS); }
    float entropy() const { return static_cast<float>((std::log2(total) - moment / total) * NATS); }
    double normaliser() const { return peak + std::log2(total); }
};

// A logit in bits, rounded as `weigh` rounds it.
inline float in_bits(float logit, float factor) {
    volatile float bits = logit * factor;
    return bits;
}

}  // namespace
