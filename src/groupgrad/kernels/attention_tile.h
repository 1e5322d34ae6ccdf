// Causal attention of some tokens that are computed together, in decode steps and in passes over many tokens.

#pragma once

#include "attention.h"
#include "matrices.h"

extern "C" {

// Consecutive tokens of a sequence, with the stored keys and values of the sequence. `attend.py` mirrors it.
struct Span {
    int64_t query, length;  // place of the first token among the queries, and number of tokens
    int64_t offset;         // of the first token in its sequence, behind the prompt
    int64_t prompt_length, prompt_stride, row_stride;  // strides in floats, from one head to the next
    const float *prompt_keys, *prompt_values;          // (kv_heads, prompt_length, head_width)
    const float *row_keys, *row_values;                // (kv_heads, offset + length, head_width)
};

struct Attention {
    int64_t heads, kv_heads, head_width, window;  // `window`: keys that a query sees, its own included; 0: all
    int64_t head_stride, token_stride;            // of the queries
    const float *queries;
    float *output;          // (tokens, heads, head_width)
    SoftmaxTotals *totals;  // (tokens, heads), or null
    const float *sinks;     // (heads) one more score each, without a value; or null
    float scale, softcap;   // scores become softcap * tanh(score / softcap), unless that is 0
};
}

namespace {

constexpr long MAX_QUERIES_OF_TILE = 64;
// Scores of a query that are computed together. A softmax goes on from block to block, and its sums round in blocks that
// begin at the first token of the prompt and at the first one behind it, whatever is computed with a query.
constexpr long BLOCK_KEYS = MIXED_KEYS;
static_assert(BLOCK_KEYS % LANES == 0);

// Tokens whose attention is computed together.
struct TokenGroup {
    const Span *spans;
    long count;          // of spans: one, or several with one token each behind the same prompt
    long first, tokens;  // among the tokens of a single span; with several, as many as spans

    const Span &span(long token) const { return spans[count == 1 ? 0 : token]; }
    long place(long token) const { return count == 1 ? first + token : 0; }  // in its span
};

// Attention of a tile of tokens in one key head. The prompt's keys and values are read once for all of them. Scores are
// stored query by query, those of many tokens of one span key by key; the numbers are the same, to the bit.
class AttentionTile {
    const Attention &call;
    const TokenGroup &group;
    const long head, width = call.head_width, tokens = group.tokens, prompt = group.spans->prompt_length;
    long begin;  // the first key visible to any token
    float *tile, *queries, *packed, *scores, *mixed;
    RunningSoftmax *softmaxes;
    RunningSoftmaxes by_key;  // of a tile whose scores are stored key by key

    long repeat() const { return call.heads / call.kv_heads; }
    long num_queries() const { return tokens * repeat(); }
    long num_row_keys(long token) const { return group.span(token).offset + group.place(token) + 1; }
    long first_key(long token) const {
        return call.window ? std::max<long>(0, prompt + num_row_keys(token) - call.window) : 0;
    }
    long row_begin() const { return std::max(0L, begin - prompt); }

    // True if each token has keys of its own, as in a decode step. Reading them takes most of the time.
    bool is_apart() const { return tokens == group.count; }

    // Keys of one block, those from `start` to `end` of the prompt or behind it. `origin` is where the block's sums
    // begin, whether or not its first keys are visible; `before` is the number of keys before the first of its part.
    struct KeyBlock {
        long origin, start, end, before;
        const float *keys, *values;  // from `start` on

        long count() const { return end - start; }
    };

    // Calls `body(block)` for the blocks of a prompt, or of the tokens behind it, from key `start` to `end`.
    template <class Body>
    void each_block(long start, long end, long before, const float *keys, const float *values, Body body) const {
        while (start < end) {
            const long origin = start / BLOCK_KEYS * BLOCK_KEYS, next = std::min(end, origin + BLOCK_KEYS);
            body(KeyBlock{origin, start, next, before, keys + start * width, values + start * width});
            start = next;
        }
    }

    template <class Body>
    void each_row_block(const Span &span, long end, Body body) const {
        const long at = head * span.row_stride;
        each_block(row_begin(), end, prompt, span.row_keys + at, span.row_values + at, body);
    }

public:
    // Maximum number of tokens of a tile.
    static long most_tokens(const Attention &call) {
        return std::max<long>(1, MAX_QUERIES_OF_TILE / (call.heads / call.kv_heads));
    }

    static long scratch_size(const Attention &call, long tokens) {
        const long queries = in_grains(tokens * (call.heads / call.kv_heads)), stride = stride_of(queries);
        const long softmax = sizeof(RunningSoftmax) / sizeof(float) * queries + RunningSoftmaxes::size(padded(queries));
        const long vectors = queries * (2 * call.head_width + padded(call.head_width));
        return TILE + vectors + stride * BLOCK_KEYS + softmax + 8 * LANES;
    }

    // `scratch` lies at the beginning of a vector.
    AttentionTile(const Attention &call, const TokenGroup &group, long head, float *scratch)
        : call(call), group(group), head(head), begin(first_key(0)), by_key(padded(num_queries()), scratch) {
        for (long i = 0; i < tokens; i++) begin = std::min(begin, first_key(i));
        scratch += RunningSoftmaxes::size(by_key.count);
        const auto take = [&](long floats) { return (scratch += padded(floats)) - padded(floats); };
        const long some = in_grains(num_queries());
        tile = take(TILE), scores = take(stride_of(num_queries()) * BLOCK_KEYS);
        softmaxes = reinterpret_cast<RunningSoftmax *>(take(some * (sizeof(RunningSoftmax) / sizeof(float))));
        packed = take(some * padded(width)), queries = take(some * width), mixed = take(some * width);
    }

    void attend() const {
        place_queries();
        std::fill(mixed, mixed + num_queries() * width, 0.0f);
        if (group.count == 1 && in_grains(num_queries()) >= MOST_ROWS) return attend_by_key();
        for (long q = 0; q < num_queries(); q++) softmaxes[q] = RunningSoftmax(sink(q));
        add_prompt();
        add_row();
        for (long q = 0; q < num_queries(); q++) put(q, softmaxes[q].end());
    }

private:
    const float *sink(long q) const { return call.sinks ? call.sinks + head * repeat() + q % repeat() : nullptr; }

    // Place of a query's token among all tokens.
    long place(long q) const { return group.span(q / repeat()).query + group.place(q / repeat()); }

    void place_queries() const {
        for (long q = 0; q < num_queries(); q++) {
            const float *from = call.queries + (head * repeat() + q % repeat()) * call.head_stride +
                                place(q) * call.token_stride;
            for (long d = 0; d < width; d++) queries[q * width + d] = from[d] * call.scale;
        }
    }

    // Stores the weighted values of a query.
    void put(long q, const SoftmaxTotals &totals) const {
        const long query = place(q) * call.heads + head * repeat() + q % repeat();
        if (call.totals) call.totals[query] = totals;
        float *to = call.output + query * width;
        for (long d = 0; d < width; d++) to[d] = mixed[q * width + d] * totals.factor;
    }

    // The queries as columns.
    Columns columns() const {
        const Columns together{packed, num_queries(), width};
        for (long q = 0; q < num_queries(); q += GRAIN) {
            const float *some[GRAIN];
            for (long i = 0; i < GRAIN; i++) some[i] = q + i < num_queries() ? queries + (q + i) * width : nullptr;
            together.put(q, some, 0, width);
        }
        return together;
    }

    void add_prompt() const {
        const Columns together = columns();
        const Span &first = *group.spans;
        const long at = head * first.prompt_stride;
        const auto add = [&](const KeyBlock &block) {
            Prefetch prefetch;
            if (is_apart()) {
                prefetch.add(block.values, block.count() * width);
                if (block.end == prompt) add_keys(prefetch, first, num_row_keys(0));
            }
            score_together(together, block.keys, block.count(), tile, scores + (block.start - block.origin), BLOCK_KEYS,
                           prefetch);
            mix_block(block, 0, tokens);
        };
        each_block(std::min(begin, prompt), prompt, 0, first.prompt_keys + at, first.prompt_values + at, add);
    }

    void add_row() const {
        // One span is read by all tokens; of several each has a token.
        const long step = group.count == 1 ? tokens : 1;
        for (long start = 0; start < tokens; start += step) {
            const Span &span = group.span(start);
            const long num_keys = num_row_keys(start + step - 1);
            const Packed mine{packed, step * repeat(), width};
            for (long q = 0; q < mine.rows; q++) mine.put(q, queries + (start * repeat() + q) * width);
            each_row_block(span, num_keys, [&](const KeyBlock &block) {
                Prefetch now, next;
                if (is_apart()) {
                    now.add(block.values, block.count() * width);
                    if (block.end < num_keys)
                        next.add(block.keys + block.count() * width,
                                 std::min(BLOCK_KEYS, num_keys - block.end) * width);
                    else if (start + step < tokens)
                        add_keys(next, group.span(start + step), num_row_keys(start + step));
                }
                float *to = scores + start * repeat() * BLOCK_KEYS + (block.start - block.origin);
                score(mine, block.keys, block.count(), to, BLOCK_KEYS, now);
                mix_block(block, start, start + step, next);
            });
        }
    }

    // Asks for the first keys of a span.
    void add_keys(Prefetch &prefetch, const Span &span, long num_keys) const {
        const long count = std::min(BLOCK_KEYS, num_keys - row_begin());
        prefetch.add(span.row_keys + head * span.row_stride + row_begin() * width, count * width);
    }

    // The same for many tokens of one span, with scores stored key by key.
    void attend_by_key() const {
        const Span &span = *group.spans;
        const Columns together = columns();
        const long at = head * span.prompt_stride, stride = stride_of(num_queries());
        for (long q = 0; q < num_queries(); q++) by_key.start(q, sink(q));
        for (long q = num_queries(); q < by_key.count; q++) by_key.start(q, nullptr);
        const auto of = [&](const KeyBlock &block) { return scores + (block.start - block.origin) * stride; };
        each_block(std::min(begin, prompt), prompt, 0, span.prompt_keys + at, span.prompt_values + at,
                   [&](const KeyBlock &block) {
                       score_by_key(together, block.keys, block.count(), of(block), stride);
                       mix_by_key(block);
                   });
        each_row_block(span, num_row_keys(tokens - 1), [&](const KeyBlock &block) {
            score_lanes(together, block.keys, block.count(), of(block), stride);
            mix_by_key(block);
        });
        for (long q = 0; q < num_queries(); q++) put(q, by_key.end(q));
    }

    // Turns the scores with the keys of a block into weights, and adds the weighted values.
    void mix_by_key(const KeyBlock &block) const {
        const long first = block.start - block.origin, end = block.end - block.origin;
        const long stride = stride_of(num_queries());
        for (long k = first; k < end; k++) {
            float *of_key = scores + k * stride;
            if (call.softcap != 0.0f) cap_scores(of_key, num_queries(), call.softcap);
            // The first token that sees the key.
            const long token = block.before + block.origin + k - prompt - num_row_keys(0) + 1;
            const long from = std::clamp<long>(token, 0, tokens) * repeat();
            const long until = call.window ? std::clamp<long>(token + call.window, 0, tokens) * repeat() : num_queries();
            std::fill(of_key, of_key + from, -INFINITY);
            std::fill(of_key + std::max(from, until), of_key + by_key.count, -INFINITY);
        }
        by_key.add(scores, stride, first, end);
        for (long q = 0; q < num_queries(); q++)
            if (by_key.factors[q] != 1.0f)
                for (long d = 0; d < width; d++) mixed[q * width + d] *= by_key.factors[q];
        mix<true>(num_queries(), scores + first * stride, stride, block.values, block.count(), width, mixed);
    }

    // Turns the scores of tokens `start` to `end` with the keys of a block into weights, and adds the weighted values.
    void mix_block(const KeyBlock &block, long start, long end, const Prefetch &prefetch = {}) const {
        const long count = block.end - block.origin;
        for (long i = start; i < end; i++) {
            const long behind = block.before + block.origin;  // the block's place in the row
            const long from = std::max(block.start - block.origin, first_key(i) - behind);
            const long visible = std::min(count, prompt + num_row_keys(i) - behind);
            for (long q = i * repeat(); q < (i + 1) * repeat(); q++) weigh(q, from, visible, count);
        }
        const float *weights = scores + start * repeat() * BLOCK_KEYS + (block.start - block.origin);
        mix((end - start) * repeat(), weights, BLOCK_KEYS, block.values, block.count(), width,
            mixed + start * repeat() * width, prefetch);
    }

    // The weights of a query for `count` keys, of which it sees those from `from` to `end`.
    void weigh(long q, long from, long end, long count) const {
        float *of_query = scores + q * BLOCK_KEYS;
        if (from >= end) return std::fill(of_query, of_query + count, 0.0f);
        if (call.softcap != 0.0f) cap_scores(of_query + from, end - from, call.softcap);
        std::fill(of_query, of_query + from, -INFINITY);
        std::fill(of_query + end, of_query + padded(count), -INFINITY);
        const float factor = softmaxes[q].add(of_query, padded(count));
        if (factor != 1.0f)
            for (long d = 0; d < width; d++) mixed[q * width + d] *= factor;
    }
};

}  // namespace
