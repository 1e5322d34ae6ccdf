// Gradients of causal attention over rows that may share prompts. Scores are computed again; nothing of their size is
// kept. Rows of one prompt are computed one after the other, so no number depends on the threads.

#include "attention.h"
#include "layers.h"
#include "memory.h"

extern "C" {

// Consecutive tokens behind a prompt of `prompt_length` tokens, or without one. `attend.py` mirrors these structures.
struct AttentionRow {
    int64_t start, length, prompt_start, prompt_length;
};

// Tensors are (tokens, heads, head_width), those of keys and values with `kv_heads`.
struct AttentionGradient {
    int64_t heads, kv_heads, head_width, window;  // `window`: keys that a query sees, its own included; 0: all
    const float *queries, *keys, *values, *output, *gradient;
    float *of_queries, *of_keys, *of_values;
    float scale, softcap;  // scores become softcap * tanh(score / softcap), unless that is 0
};
}

namespace {

constexpr long QUERIES_OF_TILE = 64;
constexpr long SCORES_OF_TILE = 1 << 15;  // unless a single token has more

long rows_of_tile(long repeat, long keys) {  // tokens
    return std::max(1L, std::min(QUERIES_OF_TILE, SCORES_OF_TILE / std::max(1L, keys)) / repeat);
}

// Keys and values of consecutive tokens in one head, and their gradients, each (length, width).
struct KeyPart {
    long start, length;
    float *keys, *values, *of_keys, *of_values;
};

// Most tokens of a row, of a prompt, and of both together, which decide the scratch memory of a thread.
struct Lengths {
    long row = 0, prompt = 0, keys = 0;
};

class GroupGradient {
    const AttentionGradient &call;
    const long head, width = call.head_width, repeat = call.heads / call.kv_heads;
    float *tile, *queries, *gradients, *of_queries, *columns, *scores, *slopes, *of_prompt, *of_row;

    static long most_queries(const AttentionGradient &call) {
        return in_grains(std::max<long>(QUERIES_OF_TILE, call.heads / call.kv_heads));
    }
    static long most_scores(const AttentionGradient &call, long keys) {
        return std::max(SCORES_OF_TILE, call.heads / call.kv_heads * keys) + LANES;
    }

public:
    static long scratch_size(const AttentionGradient &call, const Lengths &most) {
        const long width = call.head_width, scores = most_scores(call, most.keys);
        return Memory::whole(TILE + 4 * most_queries(call) * width + 2 * scores + 4 * (most.prompt + most.row) * width);
    }

    GroupGradient(const AttentionGradient &call, long head, const Lengths &most, float *scratch)
        : call(call), head(head) {
        const auto take = [&](long floats) { return (scratch += floats) - floats; };
        tile = take(TILE);
        for (float **part : {&queries, &gradients, &of_queries, &columns}) *part = take(most_queries(call) * width);
        for (float **part : {&scores, &slopes}) *part = take(most_scores(call, most.keys));
        of_prompt = take(4 * most.prompt * width), of_row = scratch;
    }

    // The gradients of rows behind one prompt, and of that if it is among them; or of one row without a prompt.
    void add(const AttentionRow *rows, long count) const {
        const KeyPart none{0, 0, nullptr, nullptr, nullptr, nullptr};
        const AttentionRow &last = rows[count - 1];
        const KeyPart prompt = last.prompt_length ? read(last.prompt_start, last.prompt_length, of_prompt) : none;
        for (const AttentionRow *row = rows; row < rows + count; row++) {
            const bool is_prompt = prompt.length && !row->prompt_length;
            const KeyPart own = is_prompt ? prompt : read(row->start, row->length, of_row);
            const long some = rows_of_tile(repeat, row->prompt_length + row->length);
            for (long first = 0; first < row->length; first += some)
                add_tile(is_prompt ? none : prompt, own, first, std::min<long>(some, row->length - first));
            if (!is_prompt) write(own);
        }
        write(prompt);
    }

private:
    KeyPart read(long start, long length, float *to) const {
        const long size = length * width;
        const KeyPart part{start, length, to, to + size, to + 2 * size, to + 3 * size};
        for (long i = 0; i < length; i++) {
            const long from = ((start + i) * call.kv_heads + head) * width;
            std::memcpy(part.keys + i * width, call.keys + from, width * sizeof(float));
            std::memcpy(part.values + i * width, call.values + from, width * sizeof(float));
        }
        std::fill(part.of_keys, part.of_keys + 2 * size, 0.0f);
        return part;
    }

    void write(const KeyPart &part) const {
        for (long i = 0; i < part.length; i++) {
            const long to = ((part.start + i) * call.kv_heads + head) * width;
            std::memcpy(call.of_keys + to, part.of_keys + i * width, width * sizeof(float));
            std::memcpy(call.of_values + to, part.of_values + i * width, width * sizeof(float));
        }
    }

    // Place of query q among those of all tokens, for a tile from token `start` on.
    long place(long start, long q) const {
        return ((start + q / repeat) * call.heads + head * repeat + q % repeat) * width;
    }

    // to[q * stride + key] = products of `count` vectors with the keys of a part from `begin` on.
    void multiply_all(const float *vectors, long count, const float *keys, long num_keys, float *to, long stride) const {
        const Columns packed{columns, count, width};
        for (long q = 0; q < count; q += GRAIN) {
            const float *some[GRAIN];
            for (long i = 0; i < GRAIN; i++) some[i] = q + i < count ? vectors + (q + i) * width : nullptr;
            packed.put(q, some, 0, width);
        }
        score_together(packed, keys, num_keys, tile, to, stride, Prefetch());
    }

    // Adds the gradients of the queries of `tokens` tokens from the part's token `first` on.
    void add_tile(const KeyPart &prompt, const KeyPart &own, long first, long tokens) const {
        const long count = tokens * repeat, start = own.start + first, all = prompt.length + first + tokens;
        // Keys before `begin` are too far from all tokens.
        const long begin = call.window ? std::max<long>(0, prompt.length + first + 1 - call.window) : 0;
        const long stride = all - begin, from_prompt = std::min(begin, prompt.length);
        const long num_prompt = prompt.length - from_prompt, from_own = std::max(0L, begin - prompt.length);
        const long num_own = stride - num_prompt;
        for (long q = 0; q < count; q++) {
            const float *query = call.queries + place(start, q);
            for (long d = 0; d < width; d++) queries[q * width + d] = query[d] * call.scale;
            std::memcpy(gradients + q * width, call.gradient + place(start, q), width * sizeof(float));
        }
        const long at = from_prompt * width, at_own = from_own * width;
        multiply_all(queries, count, prompt.keys + at, num_prompt, scores, stride);
        multiply_all(queries, count, own.keys + at_own, num_own, scores + num_prompt, stride);
        multiply_all(gradients, count, prompt.values + at, num_prompt, slopes, stride);
        multiply_all(gradients, count, own.values + at_own, num_own, slopes + num_prompt, stride);
        for (long q = 0; q < count; q++) weigh(q, start, prompt.length + first + q / repeat + 1 - begin, stride);
        const auto add = [&](const float *weights, const float *vectors, long keys, float *to) {
            mix<true>(keys, weights, stride, vectors, count, width, to);
        };
        add(scores, gradients, num_prompt, prompt.of_values + at);
        add(scores + num_prompt, gradients, num_own, own.of_values + at_own);
        add(slopes, queries, num_prompt, prompt.of_keys + at);
        add(slopes + num_prompt, queries, num_own, own.of_keys + at_own);
        std::fill(of_queries, of_queries + count * width, 0.0f);
        mix(count, slopes, stride, prompt.keys + at, num_prompt, width, of_queries);
        mix(count, slopes + num_prompt, stride, own.keys + at_own, num_own, width, of_queries);
        for (long q = 0; q < count; q++) {
            float *to = call.of_queries + place(start, q);
            for (long d = 0; d < width; d++) to[d] = of_queries[q * width + d] * call.scale;
        }
    }

    // Turns a query's scores into weights, and the products of its gradient with the values into the gradients of the
    // scores. Keys from `end` on are hidden.
    void weigh(long q, long start, long end, long stride) const {
        float *weights = scores + q * stride, *of_scores = slopes + q * stride;
        const float *output = call.output + place(start, q), *gradient = gradients + q * width;
        const long from = call.window ? std::max<long>(0, end - call.window) : 0;
        float along = 0.0f;
#pragma omp simd reduction(+ : along)
        for (long d = 0; d < width; d++) along += gradient[d] * output[d];
        if (call.softcap != 0.0f) cap_scores(weights + from, end - from, call.softcap);
        for (long k = from; k < end; k++) {
            of_scores[k] -= along;
            if (call.softcap != 0.0f) of_scores[k] *= 1 - weights[k] / call.softcap * (weights[k] / call.softcap);
        }
        softmax(weights + from, end - from);
        for (long k = from; k < end; k++) of_scores[k] *= weights[k];
        for (float *row : {weights, of_scores}) {
            std::fill(row, row + from, 0.0f);
            std::fill(row + end, row + stride, 0.0f);
        }
    }
};

}  // namespace

extern "C" {

// Gradients with respect to queries, keys and values. Rows from `bounds[g]` to `bounds[g + 1]` share a prompt, which may
// be one of them. Returns 1 without memory.
int groupgrad_attend_gradient(const AttentionGradient *call, const AttentionRow *rows, const int64_t *bounds, int64_t groups,
                              int threads) {
    Lengths most;
    for (const AttentionRow *row = rows; row < rows + bounds[groups]; row++) {
        most.row = std::max<long>(most.row, row->length);
        most.prompt = std::max<long>(most.prompt, row->prompt_length);
        most.keys = std::max<long>(most.keys, row->length + row->prompt_length);
    }
    const long each = GroupGradient::scratch_size(*call, most);
    Memory memory(threads * each);
    if (!memory.is_there()) return 1;
    float *scratch = memory.take(threads * each);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (groups * call->kv_heads > 1)
    for (long task = 0; task < groups * call->kv_heads; task++) {
        const long group = task / call->kv_heads;
        const GroupGradient gradient(*call, task % call->kv_heads, most, scratch + omp_get_thread_num() * each);
        gradient.add(rows + bounds[group], bounds[group + 1] - bounds[group]);
    }
    return 0;
}
}
