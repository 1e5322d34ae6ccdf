// Samples a token for each row from a random number, with its log-prob and the entropy of the distribution. The logits
// are read once, and nothing of their size is written.

#include <omp.h>

#include <memory>
#include <new>

#include "softmax.h"

namespace {

constexpr double BELOW_ONE = 1.0 - 1.0 / (1LL << 52);
constexpr long SMALL = 1 << 16;  // logits that take less time than starting other threads

struct Row {
    const float *logits;
    long count;
    float factor;

    Weights weigh_block(long block, float *to) const {
        return weigh(logits + block * BLOCK, std::min(BLOCK, count - block * BLOCK), factor, to);
    }

    // The first token of a block at which the share of its weights exceeds `share`.
    long find(long block, double share) const {
        float weights[BLOCK];
        const long start = block * BLOCK, size = std::min(BLOCK, count - start);
        weigh_block(block, weights);
        double total = 0.0, sum = 0.0;
        for (long i = 0; i < size; i++) total += weights[i];
        for (long i = 0; i < size; i++)
            if ((sum += weights[i]) > share * total) return start + i;
        return start + size - 1;  // all weights are NaN
    }
};

}  // namespace

extern "C" {

// For each row of logits (rows, vocabulary), which times `factor` are in bits: the first token whose cumulative
// probability exceeds the uniform number of `draws` (rows), its log-prob and the entropy. Returns 1 without memory.
int groupgrad_choose(const float *logits, int64_t rows, int64_t vocabulary, float factor, const double *draws,
                     int64_t *tokens, float *logprobs, float *entropies, int threads) {
    const long num_blocks = (vocabulary + BLOCK - 1) / BLOCK;
    if (rows * vocabulary < SMALL) threads = 1;
    const std::unique_ptr<Weights[]> memory(new (std::nothrow) Weights[threads * num_blocks]);
    if (!memory) return 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t index = 0; index < rows; index++) {
        const Row row{logits + index * vocabulary, vocabulary, factor};
        Weights *blocks = memory.get() + omp_get_thread_num() * num_blocks;
        Sums sums;
        for (long block = 0; block < num_blocks; block++) sums.add(blocks[block] = row.weigh_block(block, nullptr));
        // Rounded up to the total, the target would exceed the cumulative sum of every token.
        const double target = std::min(draws[index], BELOW_ONE) * sums.total;
        double before = 0.0, mass = 0.0;
        long block = 0;
        for (;; block++, before += mass) {
            mass = std::exp2(blocks[block].peak - sums.peak) * blocks[block].total;
            if (before + mass > target || block + 1 == num_blocks) break;
        }
        const double share = (target - before) / mass;
        tokens[index] = row.find(block, std::min(std::max(share, 0.0), BELOW_ONE));
        logprobs[index] = sums.logprob(in_bits(row.logits[tokens[index]], factor));
        entropies[index] = sums.entropy();
    }
    return 0;
}

// The log-probs (rows) and entropies (rows) of given `tokens` (rows).
void groupgrad_score(const float *logits, int64_t rows, int64_t vocabulary, float factor, const int64_t *tokens,
                     float *logprobs, float *entropies, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows * vocabulary >= SMALL)
    for (int64_t index = 0; index < rows; index++) {
        const Row row{logits + index * vocabulary, vocabulary, factor};
        Sums sums;
        for (long block = 0; block * BLOCK < vocabulary; block++) sums.add(row.weigh_block(block, nullptr));
        logprobs[index] = sums.logprob(in_bits(row.logits[tokens[index]], factor));
        entropies[index] = sums.entropy();
    }
}
}
