// The gated delta rule or Mamba-2 over rows that may share prompts, and their gradients. Rows are cut into chunks, inside
// which everything is a matrix product; a state passes from chunk to chunk. Mamba-2 writes its values as they are. Nothing but the output is kept for the gradient,
// which computes the states of a row again. Rows of one prompt are computed one after the other in each head, so no
// number depends on the threads, and none on the rows beside it.

#include <cmath>

#include "memory.h"
#include "strided.h"

extern "C" {

// Consecutive tokens behind a prompt of `prompt_length` tokens, or without one. A row that is not behind a prompt begins
// with state `initial` of those given. The state behind a row is state `final` of those wanted. -1: zeros, not wanted.
struct RecurrentRow {
    int64_t start, length, prompt_start, prompt_length, initial, final;
};

struct DeltaRule {
    int64_t heads, key_heads, key_width, value_width;
    StridedTensor queries, keys, values;
    const float *decays, *strengths;  // (tokens, heads); of decays the logarithm; no strengths: Mamba-2
    const float *initials;            // states (number, heads, key_width, value_width), as all below
    float *outputs, *finals;          // (tokens, heads, value_width), and states
    const float *gradient;            // of the outputs; null: outputs are computed, otherwise the gradients below
    const float *of_finals;           // given like `gradient`; null: zeros
    StridedTensor of_queries, of_keys, of_values;
    float *of_decays, *of_strengths, *of_initials;
    float scale, epsilon;  // queries are multiplied by `scale`, both have length 1 before unless `epsilon` is negative
};
}

namespace {

constexpr long CHUNK = 64;  // tokens

// The tokens of a chunk in one head. With S before the chunk, G the sums of the logarithms of decays and b strengths:
// written U = b (V - e^G K S - B U), output e^G Q S + P U, state behind e^G(end) S + (e^(G(end) - G) K)' U, where B and
// P are the products of keys and queries with earlier keys, times the decay in between. Mamba-2 writes U = V.
struct ChunkParts {
    Matrix queries, keys, keys_across, written, raw, between, key_products, query_products;
    float query_factors[CHUNK], key_factors[CHUNK];  // by which their lengths became 1
    double sums[CHUNK];                              // of the logarithms of decays
    float since[CHUNK], until[CHUNK], strengths[CHUNK], kept;
    long start, tokens;
};

class GatedDeltaRule {
    const DeltaRule &call;
    const bool is_delta = call.strengths != nullptr;
    const long key_width = call.key_width, value_width = call.value_width, repeat = call.heads / call.key_heads;
    Matrix state, prompt_state, mixed;
    ChunkParts parts;
    // Of the gradient alone.
    Matrix of_outputs, of_written, of_raw, written_across, of_queries, of_keys, other, of_key_products,
        of_query_products, state_across, of_state, of_state_across, of_prompt_state, states, raws;

public:
    static long chunks(long tokens) { return (tokens + CHUNK - 1) / CHUNK; }

    static long scratch_size(const DeltaRule &call, long longest) {
        const long key = Scratch::size(CHUNK, call.key_width), value = Scratch::size(CHUNK, call.value_width);
        const long square = Scratch::size(CHUNK, CHUNK), state = Scratch::size(call.key_width, call.value_width);
        const long across = Scratch::size(call.key_width, CHUNK);
        const long some = 2 * key + across + 3 * value + 3 * square + 2 * state;
        if (!call.gradient) return Memory::whole(some);
        const long value_across = Scratch::size(call.value_width, CHUNK);
        const long state_across = Scratch::size(call.value_width, call.key_width);
        return Memory::whole(some + 3 * value + value_across + 3 * key + 2 * square + 2 * state + 2 * state_across +
                             chunks(longest) * (state + value));
    }

    GatedDeltaRule(const DeltaRule &call, long longest, float *memory) : call(call) {
        std::fill(memory, memory + scratch_size(call, 0), 0.0f);
        Scratch scratch(memory);
        parts.queries = scratch.take(CHUNK, key_width), parts.keys = scratch.take(CHUNK, key_width);
        parts.keys_across = scratch.take(key_width, CHUNK);
        parts.written = scratch.take(CHUNK, value_width), parts.raw = scratch.take(CHUNK, value_width);
        mixed = scratch.take(CHUNK, value_width);
        for (Matrix *square : {&parts.between, &parts.key_products, &parts.query_products})
            *square = scratch.take(CHUNK, CHUNK);
        state = scratch.take(key_width, value_width), prompt_state = scratch.take(key_width, value_width);
        if (!call.gradient) return;
        of_outputs = scratch.take(CHUNK, value_width), of_written = scratch.take(CHUNK, value_width);
        of_raw = scratch.take(CHUNK, value_width), written_across = scratch.take(value_width, CHUNK);
        of_queries = scratch.take(CHUNK, key_width), of_keys = scratch.take(CHUNK, key_width);
        other = scratch.take(CHUNK, key_width);
        of_key_products = scratch.take(CHUNK, CHUNK), of_query_products = scratch.take(CHUNK, CHUNK);
        of_state = scratch.take(key_width, value_width), of_prompt_state = scratch.take(key_width, value_width);
        state_across = scratch.take(value_width, key_width), of_state_across = scratch.take(value_width, key_width);
        states = scratch.take(chunks(longest) * key_width, value_width);
        raws = scratch.take(chunks(longest) * CHUNK, value_width);
    }

    // The outputs of rows behind one prompt, and of that if it is among them; or of one row without a prompt.
    void compute(const RecurrentRow *rows, long count, long head) {
        for (const RecurrentRow *row = rows; row < rows + count; row++) {
            begin(*row, head);
            for (long at = 0; at < row->length; at += CHUNK) {
                prepare(row->start + at, std::min<long>(CHUNK, row->length - at), head);
                read_values(head);
                write_into_state();
                put_outputs(head);
            }
            put_state(state, row->final, head, call.finals);
            if (!row->prompt_length) std::swap(state, prompt_state);
        }
    }

    // The gradients of the same rows. Gradients of queries and keys are added to those of the heads before `head`
    // that share them.
    void add_gradients(const RecurrentRow *rows, long count, long head) {
        of_prompt_state.clear(key_width);
        const bool has_prompt = count > 1 && !rows->prompt_length;
        if (has_prompt) {
            collect_states(*rows, head, true);
            std::swap(state, prompt_state);
        }
        for (const RecurrentRow *row = rows + has_prompt; row < rows + count; row++) {
            collect_states(*row, head, false);
            read_state(call.of_finals, row->final, head, of_state);
            add_row(*row, head);
            add(of_state, of_prompt_state);
        }
        if (has_prompt) {
            collect_states(*rows, head, false);
            read_state(call.of_finals, rows->final, head, of_state);
            add(of_prompt_state, of_state);
            add_row(*rows, head);
            std::swap(of_state, of_prompt_state);
        }
        put_state(of_prompt_state, rows->initial, head, call.of_initials);
    }

private:
    void copy(const Matrix &from, const Matrix &to) const {
        std::memcpy(to.data, from.data, key_width * from.stride * sizeof(float));
    }

    void add(const Matrix &from, const Matrix &to) const {
        for (long k = 0; k < key_width; k++)
            for (long v = 0; v < value_width; v++) to.row(k)[v] += from.row(k)[v];
    }

    long place_of_state(long number, long head) const {
        return (number * call.heads + head) * key_width * value_width;
    }

    // Copies a head's state of that number to `to`; zeros if there is none.
    void read_state(const float *states, long number, long head, const Matrix &to) const {
        if (!states || number < 0) return to.clear(key_width);
        const float *from = states + place_of_state(number, head);
        for (long k = 0; k < key_width; k++) std::copy_n(from + k * value_width, value_width, to.row(k));
    }

    // Copies `from` to a head's state of that number, if that is wanted.
    void put_state(const Matrix &from, long number, long head, float *states) const {
        if (!states || number < 0) return;
        float *to = states + place_of_state(number, head);
        for (long k = 0; k < key_width; k++) std::copy_n(from.row(k), value_width, to + k * value_width);
    }

    // Puts the state before a row into `state`.
    void begin(const RecurrentRow &row, long head) const {
        if (row.prompt_length) return copy(prompt_state, state);
        read_state(call.initials, row.initial, head, state);
    }

    // Reads keys, queries, decays and strengths of a chunk, and makes their products.
    void prepare(long start, long tokens, long head) {
        ChunkParts &p = parts;
        p.start = start, p.tokens = tokens;
        double sum = 0.0;
        for (long i = 0; i < tokens; i++) {
            const long place = (start + i) * call.heads + head;
            p.sums[i] = sum += call.decays[place];
            if (is_delta) p.strengths[i] = call.strengths[place];
        }
        for (long i = 0; i < tokens; i++) {
            p.since[i] = static_cast<float>(std::exp(p.sums[i]));
            p.until[i] = static_cast<float>(std::exp(sum - p.sums[i]));
        }
        p.kept = static_cast<float>(std::exp(sum));
        read(call.queries, start, head / repeat, tokens, key_width, p.queries);
        read(call.keys, start, head / repeat, tokens, key_width, p.keys);
        normalise(p.queries, p.query_factors, call.scale);
        normalise(p.keys, p.key_factors, 1.0f);
        transpose(p.keys, tokens, key_width, p.keys_across);
        if (is_delta)
            multiply<RESULT_LOWER>(rows_of(p.keys), p.keys_across, tokens, tokens, key_width, p.key_products);
        multiply<RESULT_LOWER>(rows_of(p.queries), p.keys_across, tokens, tokens, key_width, p.query_products);
        for (long i = 0; i < tokens; i++) decay_products(i);
    }

    void normalise(const Matrix &vectors, float *factors, float scale) const {
        for (long i = 0; i < parts.tokens; i++) {
            float *vector = vectors.row(i);
            const bool is_given = call.epsilon < 0.0f;
            factors[i] = is_given ? 1.0f : 1.0f / std::sqrt(dot(vector, vector, key_width) + call.epsilon);
            const float factor = factors[i] * scale;
            for (long d = 0; d < key_width; d++) vector[d] *= factor;
        }
    }

    // Multiplies the products of token i by the decay in between, and makes those with later tokens zero.
    void decay_products(long i) {
        float *between = parts.between.row(i);
        float *of_key = parts.key_products.row(i), *of_query = parts.query_products.row(i);
        for (long j = 0; j <= i; j++) between[j] = static_cast<float>(parts.sums[i] - parts.sums[j]);
        for (long j = 0; j <= i; j += LANES) store(between + j, exponential(load(between + j)));
        for (long j = 0; j <= i; j++) of_query[j] *= between[j];
        std::fill(of_query + i + 1, of_query + CHUNK, 0.0f);
        if (!is_delta) return;
        for (long j = 0; j < i; j++) of_key[j] *= between[j];
        std::fill(of_key + i, of_key + CHUNK, 0.0f);
    }

    // What the tokens write, of the values and of the state before them.
    void read_values(long head) {
        ChunkParts &p = parts;
        if (!is_delta) return read(call.values, p.start, head, p.tokens, value_width, p.written);
        multiply<FULL>(rows_of(p.keys), state, p.tokens, value_width, key_width, mixed);
        read(call.values, p.start, head, p.tokens, value_width, p.raw);
        for (long i = 0; i < p.tokens; i++)
            for (long v = 0; v < value_width; v++) p.raw.row(i)[v] -= p.since[i] * mixed.row(i)[v];
        for (long first = 0; first < p.tokens; first += SOLVED) {
            const long some = std::min(SOLVED, p.tokens - first);
            multiply<FULL>(rows_of(p.key_products.from(first)), p.written, some, value_width, first, p.raw.from(first),
                           Into::SUBTRACT);
            for (long i = first; i < first + some; i++) {
                float *raw = p.raw.row(i), *written = p.written.row(i);
                for (long j = first; j < i; j++) {
                    const float factor = p.key_products.row(i)[j], *earlier = p.written.row(j);
                    for (long v = 0; v < value_width; v++) raw[v] -= factor * earlier[v];
                }
                for (long v = 0; v < value_width; v++) written[v] = p.strengths[i] * raw[v];
            }
        }
    }

    // The state behind the chunk; the products of queries with the state before it are in `mixed`.
    void write_into_state() {
        ChunkParts &p = parts;
        if (!call.gradient) multiply<FULL>(rows_of(p.queries), state, p.tokens, value_width, key_width, mixed);
        Matrix decayed = p.raw;  // free in the forward pass
        if (call.gradient) decayed = mixed;
        for (long i = 0; i < p.tokens; i++)
            for (long v = 0; v < value_width; v++) decayed.row(i)[v] = p.until[i] * p.written.row(i)[v];
        state.scale(key_width, value_width, p.kept);
        multiply<FULL>(rows_of(p.keys_across), decayed, key_width, value_width, p.tokens, state, Into::ADD);
    }

    void put_outputs(long head) {
        ChunkParts &p = parts;
        for (long i = 0; i < p.tokens; i++)
            for (long v = 0; v < value_width; v++) mixed.row(i)[v] *= p.since[i];
        multiply<LOWER>(rows_of(p.query_products), p.written, p.tokens, value_width, p.tokens, mixed, Into::ADD);
        const StridedTensor outputs{call.outputs, call.heads * value_width, value_width, 1};
        write(mixed, p.start, head, p.tokens, value_width, outputs);
    }

    // The states before the chunks of a row, and what tokens write divided by their strength; with `to_end` also the
    // state behind the row, in `state`.
    void collect_states(const RecurrentRow &row, long head, bool to_end) {
        begin(row, head);
        for (long chunk = 0; chunk < chunks(row.length); chunk++) {
            copy(state, states.from(chunk * key_width));
            prepare(row.start + chunk * CHUNK, std::min<long>(CHUNK, row.length - chunk * CHUNK), head);
            read_values(head);
            if (is_delta) std::memcpy(raws.row(chunk * CHUNK), parts.raw.data, CHUNK * raws.stride * sizeof(float));
            if (to_end || chunk + 1 < chunks(row.length)) write_into_state();
        }
    }

    // The gradients of a row, of whose final state the gradient is in `of_state`; afterwards that of its first one.
    void add_row(const RecurrentRow &row, long head) {
        for (long chunk = chunks(row.length) - 1; chunk >= 0; chunk--) {
            prepare(row.start + chunk * CHUNK, std::min<long>(CHUNK, row.length - chunk * CHUNK), head);
            const Matrix raw = raws.from(chunk * CHUNK), before = states.from(chunk * key_width);
            if (!is_delta) read_values(head);
            for (long i = 0; is_delta && i < parts.tokens; i++)
                for (long v = 0; v < value_width; v++)
                    parts.written.row(i)[v] = parts.strengths[i] * raw.row(i)[v];
            add_chunk(raw, before, head);
        }
    }

    void add_chunk(const Matrix &raw, const Matrix &before, long head) {
        ChunkParts &p = parts;
        const StridedTensor gradient{const_cast<float *>(call.gradient), call.heads * value_width, value_width, 1};
        double of_sums[CHUNK] = {}, of_end = p.kept * sum_of_products(before);
        read(gradient, p.start, head, p.tokens, value_width, of_outputs);
        transpose(before, key_width, value_width, state_across);
        transpose(of_state, key_width, value_width, of_state_across);
        transpose(p.written, p.tokens, value_width, written_across);
        // Of what is written: by the state behind, the outputs, and later tokens.
        multiply<FULL>(rows_of(p.keys), of_state, p.tokens, value_width, key_width, of_written);
        of_written.scale_rows(p.tokens, value_width, p.until);
        const Factor reading = columns_of(p.query_products);
        multiply<UPPER>(reading, of_outputs, p.tokens, value_width, p.tokens, of_written, Into::ADD);
        if (is_delta) solve_back();
        for (long i = 0; is_delta && i < p.tokens; i++)
            call.of_strengths[(p.start + i) * call.heads + head] = dot(of_written.row(i), raw.row(i), value_width);
        write(is_delta ? of_raw : of_written, p.start, head, p.tokens, value_width, call.of_values);
        // Of queries and keys, by the states before and behind.
        multiply<FULL>(rows_of(of_outputs), state_across, p.tokens, key_width, value_width, of_queries);
        of_queries.scale_rows(p.tokens, key_width, p.since);
        if (is_delta) multiply<FULL>(rows_of(of_raw), state_across, p.tokens, key_width, value_width, of_keys);
        multiply<FULL>(rows_of(p.written), of_state_across, p.tokens, key_width, value_width, other);
        for (long i = 0; i < p.tokens; i++) {
            float *of_key = of_keys.row(i), *by_end = other.row(i);
            const double ended = p.until[i] * dot(p.keys.row(i), by_end, key_width);
            of_sums[i] += dot(p.queries.row(i), of_queries.row(i), key_width);
            of_sums[i] -= ended;
            of_end += ended;
            if (is_delta) of_sums[i] -= p.since[i] * dot(p.keys.row(i), of_key, key_width);
            for (long d = 0; d < key_width; d++)
                of_key[d] = p.until[i] * by_end[d] - (is_delta ? p.since[i] * of_key[d] : 0.0f);
        }
        add_products(of_sums);
        put_gradients(of_sums, of_end, head);
        pass_back();
    }

    // The sum of the products of the state before a chunk and of the gradient of that behind it.
    double sum_of_products(const Matrix &before) const {
        double sum = 0.0;
        for (long k = 0; k < key_width; k++) sum += dot(before.row(k), of_state.row(k), value_width);
        return sum;
    }

    // From the last token to the first: a token's gradient misses what later ones read of its writing.
    void solve_back() {
        ChunkParts &p = parts;
        for (long end = p.tokens; end > 0; end -= (end - 1) % SOLVED + 1) {
            const long first = (end - 1) / SOLVED * SOLVED;
            const Matrix below = p.key_products.from(end);
            multiply<FULL>(Factor{below.data + first, 1, below.stride}, of_raw.from(end), end - first, value_width,
                           p.tokens - end, of_written.from(first), Into::SUBTRACT);
            for (long j = end - 1; j >= first; j--) {
                float *gradient = of_written.row(j), *raw = of_raw.row(j);
                for (long i = j + 1; i < end; i++) {
                    const float factor = p.key_products.row(i)[j], *later = of_raw.row(i);
                    for (long v = 0; v < value_width; v++) gradient[v] -= factor * later[v];
                }
                for (long v = 0; v < value_width; v++) raw[v] = p.strengths[j] * gradient[v];
            }
        }
    }

    // Gradients of queries and keys by their products inside the chunk, and of the decays in between.
    void add_products(double *of_sums) {
        ChunkParts &p = parts;
        const long tokens = p.tokens;
        multiply<RESULT_LOWER>(rows_of(of_outputs), written_across, tokens, tokens, value_width, of_query_products);
        if (is_delta)
            multiply<RESULT_LOWER>(rows_of(of_raw), written_across, tokens, tokens, value_width, of_key_products);
        for (long i = 0; i < tokens; i++) {
            float *of_query = of_query_products.row(i), *of_key = of_key_products.row(i);
            const float *query = p.query_products.row(i), *key = p.key_products.row(i), *between = p.between.row(i);
            float along[CHUNK];
            double sum = 0.0;
            for (long j = 0; j < i; j++) along[j] = of_query[j] * query[j] - (is_delta ? of_key[j] * key[j] : 0.0f);
            for (long j = 0; j < i; j++) sum += along[j];
            for (long j = 0; j < i; j++) of_sums[j] -= along[j];
            of_sums[i] += sum;
            for (long j = 0; j <= i; j++) of_query[j] *= between[j];
            std::fill(of_query + i + 1, of_query + CHUNK, 0.0f);
            if (!is_delta) continue;
            for (long j = 0; j < i; j++) of_key[j] *= -between[j];
            std::fill(of_key + i, of_key + CHUNK, 0.0f);
        }
        multiply<LOWER>(rows_of(of_query_products), p.keys, tokens, key_width, tokens, of_queries, Into::ADD);
        multiply<UPPER>(columns_of(of_query_products), p.queries, tokens, key_width, tokens, of_keys, Into::ADD);
        if (!is_delta) return;
        multiply<LOWER>(rows_of(of_key_products), p.keys, tokens, key_width, tokens, of_keys, Into::ADD);
        multiply<UPPER>(columns_of(of_key_products), p.keys, tokens, key_width, tokens, of_keys, Into::ADD);
    }

    void put_gradients(const double *of_sums, double of_end, long head) {
        ChunkParts &p = parts;
        double sum = of_end;
        for (long i = p.tokens - 1; i >= 0; i--) {
            sum += of_sums[i];
            call.of_decays[(p.start + i) * call.heads + head] = static_cast<float>(sum);
        }
        through_length(p.queries, p.query_factors, call.scale, of_queries);
        through_length(p.keys, p.key_factors, 1.0f, of_keys);
        add_to_heads(of_queries, head, call.of_queries);
        add_to_heads(of_keys, head, call.of_keys);
    }

    // Writes the gradients of queries or keys, which several heads may share.
    void add_to_heads(const Matrix &gradients, long head, const StridedTensor &to) {
        if (head % repeat) {
            read(to, parts.start, head / repeat, parts.tokens, key_width, other);
            for (long i = 0; i < parts.tokens; i++)
                for (long d = 0; d < key_width; d++) gradients.row(i)[d] += other.row(i)[d];
        }
        write(gradients, parts.start, head / repeat, parts.tokens, key_width, to);
    }

    // Gradients of vectors, from those of the vectors times `factors` and `scale`.
    void through_length(const Matrix &vectors, const float *factors, float scale, const Matrix &gradients) const {
        for (long i = 0; i < parts.tokens; i++) {
            float *gradient = gradients.row(i);
            const float *vector = vectors.row(i);
            // A vector x times its factor f has length 1 nearly, and f depends on it.
            const float along = call.epsilon < 0.0f ? 0.0f : dot(vector, gradient, key_width) / (scale * scale);
            for (long d = 0; d < key_width; d++)
                gradient[d] = factors[i] * scale * (gradient[d] - along * vector[d]);
        }
    }

    // From the gradient of the state behind the chunk to that of the state before it.
    void pass_back() {
        ChunkParts &p = parts;
        of_outputs.scale_rows(p.tokens, value_width, p.since);
        of_state.scale(key_width, value_width, p.kept);
        multiply<FULL>(columns_of(p.queries), of_outputs, key_width, value_width, p.tokens, of_state, Into::ADD);
        if (!is_delta) return;
        of_raw.scale_rows(p.tokens, value_width, p.since);
        multiply<FULL>(columns_of(p.keys), of_raw, key_width, value_width, p.tokens, of_state, Into::SUBTRACT);
    }
};

}  // namespace

extern "C" {

// Outputs, or gradients. Rows from `bounds[g]` to `bounds[g + 1]` share a prompt, which is the first of them. Returns 1
// without memory.
int groupgrad_delta_rule(const DeltaRule *call, const RecurrentRow *rows, const int64_t *bounds, int64_t groups,
                         int threads) {
    long longest = 0;
    for (const RecurrentRow *row = rows; row < rows + bounds[groups]; row++)
        longest = std::max<long>(longest, row->length);
    const long each = GatedDeltaRule::scratch_size(*call, longest);
    // Gradients of keys are summed over the heads that share them, one after the other.
    const long repeat = call->gradient ? call->heads / call->key_heads : 1, parts = call->heads / repeat;
    const long tasks = groups * parts;
    threads = static_cast<int>(std::min<long>(threads, tasks));
    Memory memory(threads * each);
    if (!memory.is_there()) return 1;
    float *scratch = memory.take(threads * each);
#pragma omp parallel num_threads(threads)
    {
        GatedDeltaRule rule(*call, longest, scratch + omp_get_thread_num() * each);
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tasks; task++) {
            const long group = task / parts, part = task % parts;
            const RecurrentRow *first = rows + bounds[group];
            const long count = bounds[group + 1] - bounds[group];
            for (long head = part * repeat; head < (part + 1) * repeat; head++)
                call->gradient ? rule.add_gradients(first, count, head) : rule.compute(first, count, head);
        }
    }
    return 0;
}
}
