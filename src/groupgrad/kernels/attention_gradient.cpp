// Gradients of causal attention over rows that may share prompts. Scores are computed again, for some queries and keys
// at a time; nothing of their size is kept. The rows of one prompt are cut into pieces of equal cost, by their lengths
// alone; what the pieces find for the same keys is added in their order. So no number depends on the threads.

#include <atomic>
#include <thread>
#include <vector>

#include "attention.h"
#include "layers.h"
#include "memory.h"

extern "C" {

// Consecutive tokens behind `prompt_length` tokens of a prompt, or without one. `attend.py` mirrors these structures.
struct AttentionRow {
    int64_t start, length, prompt_start, prompt_length;
};

// Tensors are (tokens, heads, head_width), those of keys and values with `kv_heads`.
struct AttentionGradient {
    int64_t heads, kv_heads, head_width, window;  // `window`: keys that a query sees, its own included; 0: all
    const float *queries, *keys, *values, *output, *gradient;
    const SoftmaxTotals *totals;  // (tokens, heads) of the forward pass
    float *of_queries, *of_keys, *of_values;
    float scale, softcap;  // scores become softcap * tanh(score / softcap), unless that is 0
};
}

namespace {

// The vectors and scores of a tile fit into the L2 cache, with the keys and values and their gradients.
constexpr long QUERIES_OF_TILE = 64;
constexpr long KEYS_OF_TILE = 2 * MAX_PANEL;

// Most pieces of a group of rows, and the fewest scores of a piece, beside which it takes little to copy the keys that a
// piece sees.
constexpr long MOST_PIECES = 8;
constexpr int64_t SCORES_OF_PIECE = 1 << 18;

// The queries of a group's rows from token `begin` of `first` to token `end` of `last`.
struct Piece {
    const AttentionRow *first, *last;
    long begin, end;
    bool is_first;  // of its group
};

// Keys and values of consecutive tokens in one head, and their gradients, each (length, width).
struct KeyPart {
    long start, length;
    float *keys, *values, *of_keys, *of_values;
};

// Most tokens of a row and of a prompt, which decide the scratch memory of a thread.
struct Lengths {
    long row = 0, prompt = 0;
};

// Vectors (count, width), also stored as columns.
struct Vectors {
    float *rows;
    Columns columns;

    void put_columns() const {
        for (long q = 0; q < columns.rows; q += GRAIN) {
            const float *some[GRAIN];
            for (long i = 0; i < GRAIN; i++) some[i] = q + i < columns.rows ? rows + (q + i) * columns.width : nullptr;
            columns.put(q, some, 0, columns.width);
        }
    }
};

// Queries of consecutive tokens: their first place among all tokens, and in their row, prompt included.
struct QueryTile {
    long start, position, count;
    Vectors queries, gradients;
};

class GroupGradient {
    const AttentionGradient &call;
    const long head, width = call.head_width, repeat = call.heads / call.kv_heads;
    const long stride = most_queries(call);  // from the scores of one key to those of the next
    float *queries, *gradients, *of_queries, *query_columns, *gradient_columns, *scores, *slopes;
    float *peaks, *factors, *along;  // of each query: its totals, and its gradient times its output
    float *of_prompt, *of_row;

    static long most_queries(const AttentionGradient &call) {
        return padded(std::max<long>(QUERIES_OF_TILE, call.heads / call.kv_heads));
    }

public:
    static long tokens_of_tile(const AttentionGradient &call) {
        return std::max<long>(1, QUERIES_OF_TILE * call.kv_heads / call.heads);
    }

    static long scratch_size(const AttentionGradient &call, const Lengths &most) {
        const long queries = most_queries(call), width = call.head_width;
        return Memory::whole(queries * (5 * width + 2 * KEYS_OF_TILE + 3) + 4 * (most.prompt + most.row) * width);
    }

    GroupGradient(const AttentionGradient &call, long head, const Lengths &most, float *scratch)
        : call(call), head(head) {
        const auto take = [&](long floats) { return (scratch += floats) - floats; };
        for (float **part : {&queries, &gradients, &of_queries, &query_columns, &gradient_columns})
            *part = take(stride * width);
        for (float **part : {&scores, &slopes}) *part = take(stride * KEYS_OF_TILE);
        for (float **part : {&peaks, &factors, &along}) *part = take(stride);
        of_prompt = take(4 * most.prompt * width), of_row = scratch;
    }

    // The gradients of a piece's queries, and what these add to those of keys and values. `done` is the piece before.
    void add(const Piece &piece, const std::atomic<bool> &done) const {
        const KeyPart none{0, 0, nullptr, nullptr, nullptr, nullptr};
        const AttentionRow &front = *piece.first, &last = *piece.last;
        // What any row of the piece sees of the prompt: rows that see less come later.
        const long seen = !last.prompt_length ? 0 : front.prompt_length ? front.prompt_length : front.length;
        const KeyPart prompt = seen ? read(last.prompt_start, seen, of_prompt) : none;
        const long some = tokens_of_tile(call);
        const long count = piece.last - piece.first + 1;
        for (long i = 0; i < count; i++) {
            // A row that the piece before began comes last: that piece ends meanwhile.
            const AttentionRow *row = piece.first + (piece.begin ? (i + 1) % count : i);
            const bool is_prompt = prompt.length && !row->prompt_length;
            const long begin = row == piece.first ? piece.begin : 0, end = row == piece.last ? piece.end : row->length;
            const KeyPart suffix = is_prompt ? prompt : read(row->start, end, of_row);
            KeyPart before = is_prompt ? none : prompt;
            before.length = row->prompt_length;
            for (long first = begin; first < end; first += some)
                add_tile(before, suffix, first, std::min<long>(some, end - first));
            if (!is_prompt) write(suffix, begin, done);
        }
        const long known = !front.prompt_length ? piece.begin : piece.is_first ? 0 : prompt.length;
        write(prompt, known, done);
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

    // Stores gradients of keys and values. Those of the first `known` are added to what the piece before has stored, once
    // that is `done`.
    void write(const KeyPart &part, long known, const std::atomic<bool> &done) const {
        while (known && !done.load(std::memory_order_acquire)) std::this_thread::yield();
        for (long i = 0; i < part.length; i++) {
            const long to = ((part.start + i) * call.kv_heads + head) * width;
            const float *of_key = part.of_keys + i * width, *of_value = part.of_values + i * width;
            for (long d = 0; d < width; d++) {
                call.of_keys[to + d] = of_key[d] + (i < known ? call.of_keys[to + d] : 0.0f);
                call.of_values[to + d] = of_value[d] + (i < known ? call.of_values[to + d] : 0.0f);
            }
        }
    }

    // Number of query q among those of all tokens, for a tile from token `start` on.
    long number(long start, long q) const { return (start + q / repeat) * call.heads + head * repeat + q % repeat; }

    // Adds the gradients of the queries of `tokens` tokens from the part's token `first` on.
    void add_tile(const KeyPart &prompt, const KeyPart &suffix, long first, long tokens) const {
        const long count = tokens * repeat, start = suffix.start + first, end = prompt.length + first + tokens;
        const QueryTile now{start,
                            prompt.length + first,
                            count,
                            {queries, {query_columns, count, width}},
                            {gradients, {gradient_columns, count, width}}};
        for (long q = 0; q < count; q++) {
            const long at = number(start, q) * width;
            const float *gradient = call.gradient + at, *output = call.output + at;
            for (long d = 0; d < width; d++) queries[q * width + d] = call.queries[at + d] * call.scale;
            std::memcpy(gradients + q * width, gradient, width * sizeof(float));
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (long d = 0; d < width; d++) sum += gradient[d] * output[d];
            const SoftmaxTotals &totals = call.totals[number(start, q)];
            peaks[q] = totals.peak, factors[q] = totals.factor, along[q] = sum;
        }
        now.queries.put_columns();
        now.gradients.put_columns();
        std::fill(of_queries, of_queries + count * width, 0.0f);
        // Keys before the first are too far from all tokens.
        const long begin = call.window ? std::max<long>(0, now.position + 1 - call.window) : 0;
        for (long key = begin; key < prompt.length; key += KEYS_OF_TILE)
            add_keys(now, prompt, key, std::min(KEYS_OF_TILE, prompt.length - key), key);
        for (long key = std::max(begin, prompt.length); key < end; key += KEYS_OF_TILE)
            add_keys(now, suffix, key - prompt.length, std::min(KEYS_OF_TILE, end - key), key);
        for (long q = 0; q < count; q++) {
            float *to = call.of_queries + number(start, q) * width;
            for (long d = 0; d < width; d++) to[d] = of_queries[q * width + d] * call.scale;
        }
    }

    // Adds what the queries of a tile and `keys` keys from the part's key `first` on, at `position` in the row, have to
    // do with each other.
    void add_keys(const QueryTile &now, const KeyPart &part, long first, long keys, long position) const {
        const long at = first * width;
        score_by_key(now.queries.columns, part.keys + at, keys, scores, stride);
        score_by_key(now.gradients.columns, part.values + at, keys, slopes, stride);
        for (long k = 0; k < keys; k++) {
            const long token = position + k - now.position;  // the first of the tile that sees the key
            const long from = std::clamp<long>(token * repeat, 0, now.count);
            const long end = call.window ? std::clamp<long>((token + call.window) * repeat, from, now.count) : now.count;
            weigh(k, from, end, now.count);
        }
        mix(keys, scores, stride, gradients, now.count, width, part.of_values + at);
        mix(keys, slopes, stride, queries, now.count, width, part.of_keys + at);
        mix<true>(now.count, slopes, stride, part.keys + at, keys, width, of_queries);
    }

    // Turns a key's scores into weights, and the products of its value with the queries' gradients into the gradients of
    // the scores. The queries from `from` to `end` see it.
    void weigh(long k, long from, long end, long count) const {
        float *weights = scores + k * stride, *of_scores = slopes + k * stride;
        if (call.softcap != 0.0f) cap_scores(weights + from, end - from, call.softcap);
        for (long q = from / LANES * LANES; q < end; q += LANES) {
            const Vec score = load(weights + q);
            const Vec weight = exponential(score - load(peaks + q)) * load(factors + q);
            Vec slope = weight * (load(of_scores + q) - load(along + q));
            if (call.softcap != 0.0f) slope *= 1.0f - score / call.softcap * (score / call.softcap);
            store(weights + q, weight);
            store(of_scores + q, slope);
        }
        for (float *row : {weights, of_scores}) {
            std::fill(row, row + from, 0.0f);
            std::fill(row + end, row + count, 0.0f);
        }
    }
};

// How many scores the first `tokens` tokens of a row have in one head.
int64_t scores_of(const AttentionGradient &call, const AttentionRow &row, int64_t tokens) {
    // Until the window is full, each token sees a key more than the one before.
    const int64_t prompt = row.prompt_length;
    const int64_t growing = call.window ? std::clamp<int64_t>(call.window - prompt, 0, tokens) : tokens;
    return growing * prompt + growing * (growing + 1) / 2 + (tokens - growing) * call.window;
}

// Appends the pieces of the rows from `first` to before `end`, which share a prompt. They are cut between tiles.
void cut(const AttentionGradient &call, const AttentionRow *first, const AttentionRow *end, std::vector<Piece> &pieces) {
    int64_t all = 0, before = 0, number = 1;
    for (const AttentionRow *row = first; row < end; row++) all += scores_of(call, *row, row->length);
    const int64_t count = std::clamp<int64_t>(all * (call.heads / call.kv_heads) / SCORES_OF_PIECE, 1, MOST_PIECES);
    const long some = GroupGradient::tokens_of_tile(call);
    Piece next{first, first, 0, 0, true};
    for (const AttentionRow *row = first; row < end; row++) {
        for (long token = std::min<long>(some, row->length);; token = std::min<long>(token + some, row->length)) {
            next.last = row, next.end = token;
            const bool is_end = token == row->length;
            const int64_t so_far = before + scores_of(call, *row, token);
            if (so_far * count >= all * number) {
                pieces.push_back(next);
                next = is_end ? Piece{row + 1, row + 1, 0, 0, false} : Piece{row, row, token, token, false};
                number++;
            }
            if (is_end) break;
        }
        before += scores_of(call, *row, row->length);
    }
}

}  // namespace

extern "C" {

// Gradients with respect to queries, keys and values. Rows from `bounds[g]` to `bounds[g + 1]` share a prompt, which may
// be the first of them; those that share most of it come first. Returns 1 without memory.
int groupgrad_attend_gradient(const AttentionGradient *call, const AttentionRow *rows, const int64_t *bounds, int64_t groups,
                              int threads) {
    Lengths most;
    std::vector<Piece> pieces;
    for (long group = 0; group < groups; group++) {
        const AttentionRow *first = rows + bounds[group], *end = rows + bounds[group + 1];
        cut(*call, first, end, pieces);
        for (const AttentionRow *row = first; row < end; row++) most.row = std::max<long>(most.row, row->length);
        const long prompt = first->prompt_length ? first->prompt_length : end - first > 1 ? first->length : 0;
        most.prompt = std::max(most.prompt, prompt);
    }
    const long each = GroupGradient::scratch_size(*call, most);
    Memory memory(threads * each);
    if (!memory.is_there()) return 1;
    float *scratch = memory.take(threads * each);
    const long tasks = pieces.size() * call->kv_heads;
    std::vector<std::atomic<bool>> done(call->kv_heads + tasks);
#pragma omp parallel for schedule(monotonic : dynamic) num_threads(threads) if (tasks > 1)
    for (long task = 0; task < tasks; task++) {
        const GroupGradient gradient(*call, task % call->kv_heads, most, scratch + omp_get_thread_num() * each);
        gradient.add(pieces[task / call->kv_heads], done[task]);
        done[call->kv_heads + task].store(true, std::memory_order_release);
    }
    return 0;
}
}
