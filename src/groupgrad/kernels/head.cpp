// Scores of tokens and their gradients, from a tile of the head's output: some tokens by a slice of the vocabulary. The
// sums are those of sampling (`choose.cpp`).

#include "softmax.h"

extern "C" {

// A tile and its inputs, (rows) unless noted otherwise; `head.py` mirrors it.
struct Tile {
    float *logits;  // (rows, count), overwritten
    int64_t rows, count;
    int64_t first;  // token id of the first column
    float factor;   // logits times this are in bits
    const int64_t *tokens;
    double *sums;   // (rows, 3): running peaks, totals and moments; null to skip them
    float *chosen;  // logits in bits of the tokens within the tile; null with `sums`
    // Gradient that overwrites the tile, unless `normaliser` is null. With p = 2^(bits - normaliser) a logit becomes
    //   p * (prob_factor + bits_factor * (bits - normaliser)), and the row's own token becomes token_gradient
    const float *normaliser, *prob_factor;
    const float *token_gradient;  // null: 0
    const float *bits_factor;   // null: none
};
}

namespace {

constexpr long SMALL = 1 << 15;  // logits that take less time than starting other threads

// Turns a block of a row's weights into the gradient in place; `bits` are their logits.
void gradient_block(float *weights, const float *bits, long count, float peak, const Tile &tile, int64_t row) {
    const float normaliser = tile.normaliser[row], scale = std::exp2(peak - normaliser);
    const float prob_factor = tile.prob_factor[row] * scale;
    if (!tile.bits_factor) {
        for (long i = 0; i < count; i++) weights[i] *= prob_factor;
        return;
    }
    const float bits_factor = tile.bits_factor[row] * scale;
    for (long i = 0; i < count; i++) {
        const float less = std::max(bits[i] - normaliser, -1e4f);  // a logit of minus infinity
        weights[i] *= prob_factor + bits_factor * less;
    }
}

}  // namespace

extern "C" {

void groupgrad_tile(const Tile *call, int threads) {
    const Tile &tile = *call;
#pragma omp parallel for num_threads(threads) if (tile.rows * tile.count >= SMALL)
    for (int64_t row = 0; row < tile.rows; row++) {
        float *logits = tile.logits + row * tile.count;
        const int64_t place = tile.tokens[row] - tile.first;
        const bool is_inside = place >= 0 && place < tile.count;
        Sums sums;
        if (tile.sums) {
            const double *known = tile.sums + 3 * row;
            sums.peak = known[0], sums.total = known[1], sums.moment = known[2];
            if (is_inside) tile.chosen[row] = in_bits(logits[place], tile.factor);
        }
        for (long start = 0; start < tile.count; start += BLOCK) {
            const long count = std::min<long>(BLOCK, tile.count - start);
            float *some = logits + start, bits[BLOCK];
            if (tile.normaliser && tile.bits_factor)
                for (long i = 0; i < count; i++) bits[i] = some[i] * tile.factor;
            const Weights weights = weigh(some, count, tile.factor, tile.normaliser ? some : nullptr);
            if (tile.sums) sums.add(weights);
            if (tile.normaliser) gradient_block(some, bits, count, weights.peak, tile, row);
        }
        if (tile.normaliser && is_inside) logits[place] = tile.token_gradient ? tile.token_gradient[row] : 0.0f;
        if (!tile.sums) continue;
        double *to = tile.sums + 3 * row;
        to[0] = sums.peak, to[1] = sums.total, to[2] = sums.moment;
    }
}

// Log-probs, entropies, and normalisers in bits of `rows` tokens, from their sums and their logits in bits.
void groupgrad_finish(const double *sums, const float *chosen, int64_t rows, float *logprobs, float *entropies,
                      float *normalisers) {
    for (int64_t row = 0; row < rows; row++) {
        Sums of;
        of.peak = sums[3 * row], of.total = sums[3 * row + 1], of.moment = sums[3 * row + 2];
        logprobs[row] = of.logprob(chosen[row]);
        entropies[row] = of.entropy();
        normalisers[row] = static_cast<float>(of.normaliser());
    }
}
}
