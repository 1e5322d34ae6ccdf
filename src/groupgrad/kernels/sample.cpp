// Several decode steps in one go: what is chosen in one step goes into the next, until a row ends.

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

struct Choosing {
    const double *draws;                // (requests, longest)
    float *logprobs, *entropies;        // (requests, longest)
    int64_t longest;
    const int64_t *requests, *counts;   // of each row: its place in the tables, and the tokens it has there
    const int64_t *ends;                // tokens that end a row
    int64_t num_ends;
    float factor;  // of logits in bits
};

// Up to `steps` tokens (steps, n) for each row, from the newest `tokens` (n) at `positions` (n) on, and how many: fewer if
// a row ends before. `logits` (n, vocabulary) are overwritten. -1 if there is no memory for it.
int64_t groupgrad_sample(const Model *model, const Rows *rows, const Choosing *choosing, int64_t count,
                         int64_t vocabulary, const int64_t *tokens, const int64_t *positions, float *logits,
                         int64_t steps, int64_t *chosen, int threads) {
    const std::unique_ptr<double[]> draws(new (std::nothrow) double[count]);
    const std::unique_ptr<float[]> numbers(new (std::nothrow) float[2 * count]);
    const std::unique_ptr<int64_t[]> places(new (std::nothrow) int64_t[count]);
    if (!draws || !numbers || !places) return -1;
    std::copy(positions, positions + count, places.get());
    for (int64_t step = 0; step < steps; step++, tokens = chosen, chosen += count) {
        const auto at = [&](int64_t row) {
            return choosing->requests[row] * choosing->longest + choosing->counts[row] + step;
        };
        for (int64_t row = 0; row < count; row++) draws[row] = choosing->draws[at(row)];
        if (groupgrad_decode(model, rows, tokens, places.get(), logits, threads)) return -1;
        if (groupgrad_choose(logits, count, vocabulary, choosing->factor, draws.get(), chosen, numbers.get(),
                             numbers.get() + count, threads))
            return -1;
        bool has_ended = false;
        for (int64_t row = 0; row < count; row++) {
            choosing->logprobs[at(row)] = numbers[row];
            choosing->entropies[at(row)] = numbers[count + row];
            places[row]++;
            const int64_t *end = choosing->ends + choosing->num_ends;
            has_ended |= std::find(choosing->ends, end, chosen[row]) != end;
        }
        if (has_ended) return step + 1;
    }
    return steps;
}
}
