// Several decode steps in one call: the tokens of one step are the input of the next, until rows have ended.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

extern "C" {

// See decode.cpp and choose.cpp.
struct Model;
struct Rows;
int groupgrad_decode(const Model *model, const Rows *rows, const int64_t *tokens, const int64_t *positions,
                     float *logits, int threads);
int groupgrad_choose(const float *logits, int64_t rows, int64_t vocabulary, float factor, const double *draws,
                     int64_t *tokens, float *logprobs, float *entropies, int threads);

struct SamplingTables {
    const double *draws;                // (requests, longest)
    float *logprobs, *entropies;        // (requests, longest)
    int64_t longest;
    const int64_t *requests, *counts;   // of each row: its place in the tables, and the number of its tokens there
    const int64_t *ends;                // ids that end a row
    int64_t num_ends;
    int64_t idle;  // tokens that may be computed of rows that have ended
    float factor;  // logits times this are in bits
};

// Samples up to `steps` tokens (steps, n) for each row, from the newest `tokens` (n) at `positions` (n) on, and returns
// the number of steps, fewer if the next one would compute more than `idle` tokens behind the ends of rows. `logits` (n, vocabulary) are overwritten. Returns -1 without memory.
int64_t groupgrad_sample(const Model *model, const Rows *rows, const SamplingTables *tables, int64_t count,
                         int64_t vocabulary, const int64_t *tokens, const int64_t *positions, float *logits,
                         int64_t steps, int64_t *chosen, int threads) {
    const std::unique_ptr<double[]> draws(new (std::nothrow) double[count]);
    const std::unique_ptr<float[]> numbers(new (std::nothrow) float[2 * count]);
    const std::unique_ptr<int64_t[]> places(new (std::nothrow) int64_t[count]);
    const std::unique_ptr<bool[]> has_ended(new (std::nothrow) bool[count]());
    if (!draws || !numbers || !places || !has_ended) return -1;
    int64_t num_ended = 0, idle = 0;
    std::copy(positions, positions + count, places.get());
    for (int64_t step = 0; step < steps; step++, tokens = chosen, chosen += count) {
        const auto at = [&](int64_t row) {
            return tables->requests[row] * tables->longest + tables->counts[row] + step;
        };
        for (int64_t row = 0; row < count; row++) draws[row] = tables->draws[at(row)];
        if (groupgrad_decode(model, rows, tokens, places.get(), logits, threads)) return -1;
        if (groupgrad_choose(logits, count, vocabulary, tables->factor, draws.get(), chosen, numbers.get(),
                             numbers.get() + count, threads))
            return -1;
        for (int64_t row = 0; row < count; row++) {
            tables->logprobs[at(row)] = numbers[row];
            tables->entropies[at(row)] = numbers[count + row];
            places[row]++;
            const int64_t *end = tables->ends + tables->num_ends;
            if (has_ended[row] || std::find(tables->ends, end, chosen[row]) == end) continue;
            has_ended[row] = true;
            num_ended++;
        }
        idle += num_ended;
        if (idle > tables->idle || num_ended == count) return step + 1;
    }
    return steps;
}
}
