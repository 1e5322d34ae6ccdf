// Causal attention of some tokens that are computed together, in decode steps and in passes over many tokens.

#pragma once

#include "attention.h"

extern "C" {

// Consecutive tokens of a sequence, with the stored keys and values of the sequence. `attend.py` mirrors it.
struct Span {
    int64_t query, length;  // place of the first token among the queries, and number of tokens
    int64_t offset;         // of the first token in its sequence, behind the prompt
    int64_t prompt_length, prompt_stride, own_stride;  // strides in floats, from one head to the next
    const float *prompt_keys, *prompt_values;          // (kv_heads, prompt_length, head_width)
    const float *own_keys, *own_values;                // (kv_heads, offset + length, head_width)
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
constexpr long TILE_SCORES = 1 << 16;  // of a tile of queries, unless a single token has more

long num_keys(const Span &span) { return span.prompt_length + span.offset + span.length; }

// Tokens whose attention is computed together.
struct TokenGroup {
    const Span *spans;
    long count;          // of spans: one, or several with one token each behind the same prompt
    long first, tokens;  // among the tokens of a single span; with several, as many as spans

    const Span &span(long token) const { return spans[count == 1 ? 0 : token]; }
    long place(long token) const { return count == 1 ? first + token : 0; }  // in its span
};

// Attention of a tile of tokens in one key head. The prompt's keys and values are read once for all of them.
class AttentionTile {
    const Attention &call;
    const TokenGroup &group;
    const long head, tokens = group.tokens, prompt = group.spans->prompt_length;
    long begin, stride;  // the first key visible to any token; scores per query
    float *tile, *queries, *packed, *scores;

    long repeat() const { return call.heads / call.kv_heads; }
    long num_queries() const { return tokens * repeat(); }
    long num_own(long token) const { return group.span(token).offset + group.place(token) + 1; }
    long first_key(long token) const {
        return call.window ? std::max<long>(0, prompt + num_own(token) - call.window) : 0;
    }
    long own_begin() const { return std::max(0L, begin - prompt); }
    long prompt_begin() const { return std::min(begin, prompt); }

    // True if each token has keys of its own, as in a decode step. Reading them takes most of the time.
    bool is_apart() const { return tokens == group.count; }
    const float *own_keys(const Span &span) const {
        return span.own_keys + head * span.own_stride + own_begin() * call.head_width;
    }

    // Calls `body(start, end, span, keys)` for tokens that read the same own keys, with the number of these keys.
    template <class Body>
    void each_span(Body body) const {
        if (group.count == 1) return body(0L, tokens, *group.spans, num_own(tokens - 1));
        for (long i = 0; i < tokens; i++) body(i, i + 1, group.spans[i], num_own(i));
    }

public:
    static constexpr long ROOM = std::max(TILE, SCORE_TILE);

    // Maximum number of tokens of a tile with up to so many keys.
    static long most_tokens(const Attention &call, long keys) {
        const long repeat = call.heads / call.kv_heads;
        // An empty span may have no keys.
        return std::max(1L, std::min(MAX_QUERIES_OF_TILE, TILE_SCORES / std::max(1L, keys)) / repeat);
    }

    static long scratch_size(const Attention &call, long tokens, long keys) {
        const long queries = in_grains(tokens * (call.heads / call.kv_heads));
        return ROOM + queries * (2 * padded(call.head_width) + keys) + 4 * LANES;
    }

    AttentionTile(const Attention &call, const TokenGroup &group, long head, float *scratch)
        : call(call), group(group), head(head), begin(first_key(0)), stride(0) {
        for (long i = 0; i < tokens; i++) {
            begin = std::min(begin, first_key(i));
            stride = std::max(stride, prompt + num_own(i));
        }
        const long some = in_grains(num_queries()) * padded(call.head_width);
        tile = scratch, queries = tile + ROOM, packed = queries + some, scores = packed + some;
    }

    void attend() const {
        const long width = call.head_width;
        place_queries();
        score_prompt();
        score_own();
        for (long i = 0; i < tokens; i++)
            for (long j = 0; j < repeat(); j++) {
                const long query = head * repeat() + j;
                const float *sink = call.sinks ? call.sinks + query : nullptr;
                const SoftmaxTotals found = weigh(scores + (i * repeat() + j) * stride, i, sink);
                if (call.totals) call.totals[(group.span(i).query + group.place(i)) * call.heads + query] = found;
            }
        float *mixed = queries;  // the memory of the queries is free now
        std::fill(mixed, mixed + num_queries() * width, 0.0f);
        const float *values = group.spans->prompt_values + head * group.spans->prompt_stride + prompt_begin() * width;
        mix(num_queries(), scores + prompt_begin(), stride, values, prompt - prompt_begin(), width, mixed);
        each_span([&](long start, long end, const Span &span, long keys) {
            const float *own = span.own_values + head * span.own_stride + own_begin() * width;
            const float *weights = scores + start * repeat() * stride + prompt + own_begin();
            mix((end - start) * repeat(), weights, stride, own, keys - own_begin(), width,
                mixed + start * repeat() * width);
        });
        for (long i = 0; i < tokens; i++) {
            const long query = group.span(i).query + group.place(i);
            float *to = call.output + (query * call.heads + head * repeat()) * width;
            std::memcpy(to, mixed + i * repeat() * width, repeat() * width * sizeof(float));
        }
    }

private:
    void place_queries() const {
        for (long q = 0; q < num_queries(); q++) {
            const long query = group.span(q / repeat()).query + group.place(q / repeat());
            const float *from = call.queries + (head * repeat() + q % repeat()) * call.head_stride +
                                query * call.token_stride;
            for (long d = 0; d < call.head_width; d++) queries[q * call.head_width + d] = from[d] * call.scale;
        }
    }

    void score_prompt() const {
        const long width = call.head_width;
        const Columns together{packed, num_queries(), width};
        for (long q = 0; q < num_queries(); q += GRAIN) {
            const float *some[GRAIN];
            for (long i = 0; i < GRAIN; i++) some[i] = q + i < num_queries() ? queries + (q + i) * width : nullptr;
            together.put(q, some, 0, width);
        }
        const long at = head * group.spans->prompt_stride + prompt_begin() * width;
        Prefetch prefetch;
        if (is_apart()) {
            prefetch.add(own_keys(group.span(0)), num_own(0) * width);
            prefetch.add(group.spans->prompt_values + at, (prompt - prompt_begin()) * width);
        }
        score_together(together, group.spans->prompt_keys + at, prompt - prompt_begin(), tile, scores + prompt_begin(),
                       stride, prefetch);
    }

    void score_own() const {
        const long width = call.head_width;
        each_span([&](long start, long end, const Span &span, long num_keys) {
            const Packed mine{packed, (end - start) * repeat(), width};
            for (long q = 0; q < mine.rows; q++) mine.put(q, queries + (start * repeat() + q) * width);
            float *to = scores + start * repeat() * stride + prompt + own_begin();
            Prefetch prefetch;
            if (is_apart()) {
                prefetch.add(span.own_values + head * span.own_stride, num_keys * width);
                if (end < tokens) prefetch.add(own_keys(group.span(end)), num_own(end) * width);
            }
            score(mine, own_keys(span), num_keys - own_begin(), tile, to, stride, prefetch);
        });
    }

    // The weights of a token's query over all keys from `begin` on; 0 for masked keys.
    SoftmaxTotals weigh(float *of_query, long token, const float *sink) const {
        const long from = first_key(token), end = prompt + num_own(token);
        std::fill(of_query + begin, of_query + from, 0.0f);
        if (call.softcap != 0.0f) cap_scores(of_query + from, end - from, call.softcap);
        const SoftmaxTotals found = softmax(of_query + from, end - from, sink);
        std::fill(of_query + end, of_query + stride, 0.0f);
        return found;
    }
};

}  // namespace
