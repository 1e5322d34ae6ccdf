// Choosing a token of each row by a random number of its own, with its log-prob and the entropy of all of them: the
// logits are read twice and nothing of their size is written.
//
// Sums over BLOCK neighbouring tokens are taken in float32 and those over the vocabulary in float64, where a float32 sum
// would be wrong in the sixth digit.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "vectors.h"

namespace {

constexpr long BLOCK = 128;
constexpr double BELOW_ONE = 1.0 - 1.0 / (1LL << 52);
constexpr long SMALL = 1 << 16;  // logits that are done before other threads would have begun

struct Row {
    const float *logits;
    long count;
    float peak, temperature, inverse;

    float find_peak() const {
        Vec most = splat(logits[0]);
        long i = 0;
        for (; i + LANES <= count; i += LANES) {
            const Vec value = load(logits + i);
            most = value > most ? value : most;
        }
        float found = most[0];
        for (int lane = 1; lane < LANES; lane++) found = std::max(found, most[lane]);
        for (; i < count; i++) found = std::max(found, logits[i]);
        return found;
    }

    float scaled(float logit) const { return (logit - peak) / temperature; }

    // Weights of some tokens from `first` on, of LANES or the last ones; 0 behind those.
    Vec weigh(long first, Vec *exponents) const {
        const long left = count - first;
        *exponents = (load_some(logits + first, left) - peak) * inverse;
        Vec weights = exponential(*exponents);
        for (long lane = std::max(0L, left); lane < LANES; lane++) weights[lane] = 0.0f;
        return weights;
    }

    // The sum of a block's weights; `weighted` takes that of weights times exponents.
    float sum_block(long block, float *weighted) const {
        const long end = std::min(count, (block + 1) * BLOCK);
        Vec sums = {}, products = {};
        for (long i = block * BLOCK; i < end; i += LANES) {
            Vec exponents;
            const Vec weights = weigh(i, &exponents);
            sums += weights;
            // Nothing of a token that cannot come: its exponent may be minus infinity.
            products += weights == 0.0f ? weights : weights * exponents;
        }
        *weighted = total(products);
        return total(sums);
    }

    // The first token of a block at which the share of its weights exceeds `share`.
    long find(long block, double share) const {
        float weights[BLOCK + LANES];
        const long start = block * BLOCK, size = std::min(BLOCK, count - start);
        for (long i = 0; i < size; i += LANES) {
            Vec exponents, some = weigh(start + i, &exponents);
            std::memcpy(weights + i, &some, sizeof(some));
        }
        double total = 0.0, sum = 0.0;
        for (long i = 0; i < size; i++) total += weights[i];
        for (long i = 0; i < size; i++)
            if ((sum += weights[i]) > share * total) return start + i;
        return start + size - 1;  // weights that are no numbers
    }
};

}  // namespace

extern "C" {

// For logits (rows, vocabulary) divided by `temperature` and uniform `draws` (rows): the first tokens (rows) whose
// cumulative share exceeds them, their log-probs (rows), and the entropies (rows). 1 if there is no memory for it.
int groupgrad_choose(const float *logits, int64_t rows, int64_t vocabulary, float temperature, const double *draws,
                     int64_t *tokens, float *logprobs, float *entropies, int threads) {
    const long num_blocks = (vocabulary + BLOCK - 1) / BLOCK;
    if (rows * vocabulary < SMALL) threads = 1;
    const std::unique_ptr<double[]> memory(new (std::nothrow) double[threads * num_blocks]);
    if (!memory) return 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t index = 0; index < rows; index++) {
        double *cumulative = memory.get() + omp_get_thread_num() * num_blocks, total = 0.0, weighted = 0.0;
        Row row{logits + index * vocabulary, vocabulary, 0.0f, temperature, 1.0f / temperature};
        row.peak = row.find_peak();
        for (long block = 0; block < num_blocks; block++) {
            float products;
            cumulative[block] = total += row.sum_block(block, &products);
            weighted += products;
        }
        // A product may round up to the sum, which no token exceeds.
        const double target = std::min(draws[index], BELOW_ONE) * total;
        long block = std::upper_bound(cumulative, cumulative + num_blocks, target) - cumulative;
        block = std::min(block, num_blocks - 1);
        const double before = block ? cumulative[block - 1] : 0.0;
        const double share = (target - before) / (cumulative[block] - before);
        tokens[index] = row.find(block, std::min(std::max(share, 0.0), BELOW_ONE));
        logprobs[index] = static_cast<float>(row.scaled(row.logits[tokens[index]]) - std::log(total));
        entropies[index] = static_cast<float>(std::log(total) - weighted / total);
    }
    return 0;
}
}
