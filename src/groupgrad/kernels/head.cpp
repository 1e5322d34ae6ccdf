// Scores of tokens and their gradients, from a tile of the head's output: some tokens by some of the vocabulary, with the
// sums that choosing a token makes.

#include "softmax.h"

extern "C" {

// All of `rows` tokens but what is said otherwise; `modeling/scoring/head_tiles.py` mirrors it.
struct Tile {
    float *logits;  // (rows, count), to be overwritten
    int64_t rows, count;
    int64_t first;  // token of the vocabulary that the first column stands for
    float factor;   // of logits in bits
    const int64_t *tokens;
    double *sums;   // (rows, 3): peaks, totals and moments so far; null: nothing is summed
    float *chosen;  // of the tokens within the tile, their logits in bits; null with `sums`
    // What the tile becomes: nothing if `normaliser` is null, and otherwise of each probability p = 2^(bits - normaliser)
    //   p * (of_chances + of_bits * (bits - normaliser)), and of_token more for a row's own token
    const float *normaliser, *of_chances;
    const float *of_token;  // null: a row's own token becomes 0
    const float *of_bits;   // null: none
};
}

namespace {

constexpr long SMALL = 1 << 15;  // logits that are done before other threads would have begun

// The gradient of a block of a row's weights, in their place; `bits` are the logits that they were made of.
void pull_block(float *weights, const float *bits, long count, float peak, const Tile &tile, int64_t row) {
    const float normaliser = tile.normaliser[row], scale = std::exp2(peak - normaliser);
    const float of_chances = tile.of_chances[row] * scale;
    if (!tile.of_bits) {
        for (long i = 0; i < count; i++) weights[i] *= of_chances;
        return;
    }
    const float of_bits = tile.of_bits[row] * scale;
    for (long i = 0; i < count; i++) {
        const float less = std::max(bits[i] - normaliser, -1e4f);  // of a token that cannot come
        weights[i] *= of_chances + of_bits * less;
    }
}

}  // namespace

extern "C" {

void groupgrad_tile(const Tile *call, int threads) {
    const Tile &tile = *call;
#pragma omp parallel for num_threads(threads) if (tile.rows * tile.count >= SMALL)
    for (int64_t row = 0; row < tile.rows; row++) {
        float *logits = tile.logits + row * tile.count;
        const int64_t own = tile.tokens[row] - tile.first;
        const bool is_inside = own >= 0 && own < tile.count;
        Sums sums;
        if (tile.sums) {
            const double *known = tile.sums + 3 * row;
            sums.peak = known[0], sums.total = known[1], sums.moment = known[2];
            if (is_inside) tile.chosen[row] = in_bits(logits[own], tile.factor);
        }
        for (long start = 0; start < tile.count; start += BLOCK) {
            const long count = std::min<long>(BLOCK, tile.count - start);
            float *some = logits + start, bits[BLOCK];
            if (tile.normaliser && tile.of_bits)
                for (long i = 0; i < count; i++) bits[i] = some[i] * tile.factor;
            const Weights weights = weigh(some, count, tile.factor, tile.normaliser ? some : nullptr);
            if (tile.sums) sums.add(weights);
            if (tile.normaliser) pull_block(some, bits, count, weights.peak, tile, row);
        }
        if (tile.normaliser && is_inside) logits[own] = tile.of_token ? logits[own] + tile.of_token[row] : 0.0f;
        if (!tile.sums) continue;
        double *to = tile.sums + 3 * row;
        to[0] = sums.peak, to[1] = sums.total, to[2] = sums.moment;
    }
}

// Of `rows` tokens with these sums and these logits in bits: log-probs, entropies, and normalisers in bits.
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
