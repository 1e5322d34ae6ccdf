// Parts of a pass over many tokens, with the numbers that decode steps give them, and the gradients of the small ones.

#include "attention.h"
#include "memory.h"
#include "parts.h"

extern "C" {

// Consecutive tokens of a sequence, whose keys and values are stored, and what comes before them. `attend.py` mirrors it.
struct Span {
    int64_t query, length;  // places of the tokens among the queries
    int64_t offset;         // of the first of them in its sequence, behind the prompt
    int64_t prompt_length, prompt_stride, own_stride;  // strides in numbers, from one head to the next
    const float *prompt_keys, *prompt_values;          // (kv_heads, prompt_length, head_width)
    const float *own_keys, *own_values;                // (kv_heads, offset + length, head_width)
};

struct Attention {
    int64_t heads, kv_heads, head_width, window;  // `window`: keys that a query sees, its own included; 0: all
    int64_t head_stride, token_stride;            // of the queries
    const float *queries;
    float *output;       // (tokens, heads, head_width)
    const float *sinks;  // (heads) one more score each, of nothing; or null
    float scale, softcap;  // scores become softcap * tanh(score / softcap), unless that is 0
};
}

namespace {

constexpr long CHUNK_FLOATS = 1 << 18;  // of rows that are multiplied together: they wait in a cache for all weights
constexpr long MAX_QUERIES_OF_TILE = 64;
constexpr long TILE_SCORES = 1 << 16;   // of a tile of queries, unless a single token has more

// Rows that are multiplied together.
long chunk_of(long rows, long width) {
    const long most = std::max(MOST_ROWS, CHUNK_FLOATS / width / MOST_ROWS * MOST_ROWS);
    const long chunks = (rows + most - 1) / most, each = (rows + chunks - 1) / chunks;
    return std::min(most, (each + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS);
}

// Attention of some tokens of a span in one key head.
class AttentionTile {
    const Attention &call;
    const Span &span;
    const long head, first, tokens;  // `first` of the span's tokens
    float *tile, *queries, *packed, *scores;

    long repeat() const { return call.heads / call.kv_heads; }
    long num_queries() const { return tokens * repeat(); }
    long num_own() const { return span.offset + first + tokens; }
    long stride() const { return span.prompt_length + num_own(); }
    long position(long token) const { return span.prompt_length + span.offset + first + token; }
    long first_key(long token) const {
        return call.window ? std::max<long>(0, position(token) - call.window + 1) : 0;
    }

public:
    static constexpr long ROOM = std::max(TILE, SCORE_TILE);

    static long tile_tokens(const Attention &call, const Span &span) {
        const long repeat = call.heads / call.kv_heads, keys = span.prompt_length + span.offset + span.length;
        // A span without tokens may have no keys either.
        return std::max(1L, std::min(MAX_QUERIES_OF_TILE, TILE_SCORES / std::max(1L, keys)) / repeat);
    }

    static long scratch_size(const Attention &call, const Span &span) {
        const long queries = in_grains(tile_tokens(call, span) * (call.heads / call.kv_heads));
        const long keys = span.prompt_length + span.offset + span.length;
        return ROOM + queries * (2 * padded(call.head_width) + keys) + 4 * LANES;
    }

    AttentionTile(const Attention &call, const Span &span, long head, long first, long tokens, float *scratch)
        : call(call), span(span), head(head), first(first), tokens(tokens) {
        const long some = in_grains(num_queries()) * padded(call.head_width);
        tile = scratch, queries = tile + ROOM, packed = queries + some, scores = packed + some;
    }

    void attend() const {
        const long width = call.head_width, begin = first_key(0), prompt = span.prompt_length;
        const long own_begin = std::max(0L, begin - prompt), prompt_begin = std::min(begin, prompt);
        place_queries();
        score_prompt(prompt_begin);
        score_own(own_begin);
        for (long i = 0; i < tokens; i++)
            for (long j = 0; j < repeat(); j++) {
                const float *sink = call.sinks ? call.sinks + head * repeat() + j : nullptr;
                weigh(scores + (i * repeat() + j) * stride(), i, begin, sink);
            }
        float *mixed = queries;  // they are not needed any more
        std::fill(mixed, mixed + num_queries() * width, 0.0f);
        mix(num_queries(), scores + prompt_begin, stride(),
            span.prompt_values + head * span.prompt_stride + prompt_begin * width, prompt - prompt_begin, width, mixed);
        mix(num_queries(), scores + prompt + own_begin, stride(),
            span.own_values + head * span.own_stride + own_begin * width, num_own() - own_begin, width, mixed);
        for (long i = 0; i < tokens; i++) {
            float *to = call.output + ((span.query + first + i) * call.heads + head * repeat()) * width;
            std::memcpy(to, mixed + i * repeat() * width, repeat() * width * sizeof(float));
        }
    }

private:
    void place_queries() const {
        for (long q = 0; q < num_queries(); q++) {
            const float *from = call.queries + (head * repeat() + q % repeat()) * call.head_stride +
                                (span.query + first + q / repeat()) * call.token_stride;
            for (long d = 0; d < call.head_width; d++) queries[q * call.head_width + d] = from[d] * call.scale;
        }
    }

    void score_prompt(long begin) const {
        const long width = call.head_width;
        const Columns together{packed, num_queries(), width};
        for (long q = 0; q < num_queries(); q += GRAIN) {
            const float *some[GRAIN];
            for (long i = 0; i < GRAIN; i++) some[i] = q + i < num_queries() ? queries + (q + i) * width : nullptr;
            together.put(q, some, 0, width);
        }
        const float *keys = span.prompt_keys + head * span.prompt_stride + begin * width;
        score_together(together, keys, span.prompt_length - begin, tile, scores + begin, stride(), Soon());
    }

    void score_own(long begin) const {
        const long width = call.head_width;
        const Packed mine{packed, num_queries(), width};
        for (long q = 0; q < num_queries(); q++) mine.put(q, queries + q * width);
        const float *keys = span.own_keys + head * span.own_stride + begin * width;
        score(mine, keys, num_own() - begin, tile, scores + span.prompt_length + begin, stride(), Soon());
    }

    // The weights of a token's query over all keys from `begin` on; 0 for those that it does not see.
    void weigh(float *of_query, long token, long begin, const float *sink) const {
        const long from = first_key(token), end = position(token) + 1;
        std::fill(of_query + begin, of_query + from, 0.0f);
        if (call.softcap != 0.0f) cap_scores(of_query + from, end - from, call.softcap);
        softmax(of_query + from, end - from, sink);
        std::fill(of_query + end, of_query + stride(), 0.0f);
    }
};

// A span's tiles in one key head, and how many tiles come before them.
struct Tiles {
    const Span *span;
    long tokens, count, before;
};

}  // namespace

extern "C" {

// output (rows, outputs) = input (rows, width) times weight (outputs, width), plus bias; 1 if there is no memory for it.
int groupgrad_linear(const float *input, const float *weight, const float *bias, float *output, int64_t rows,
                     int64_t width, int64_t outputs, int threads) {
    const long chunk = chunk_of(rows, width), count = (rows + chunk - 1) / chunk;
    const std::unique_ptr<Product[]> products(new (std::nothrow) Product[count]);
    Memory memory(Memory::whole(in_grains(chunk) * width) + threads * Memory::whole(TILE));
    if (!memory.is_there() || !products) return 1;
    float *together = memory.take(in_grains(chunk) * width), *tiles = memory.take(threads * Memory::whole(TILE));
    if (rows * width * outputs < SMALL) threads = 1;
    Plan plan(products.get());
    for (long i = 0; i < count; i++) plan.add(weight, nullptr, outputs, width, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Turn turn(plan);
        float *tile = tiles + omp_get_thread_num() * Memory::whole(TILE);
        for (long start = 0; start < rows; start += chunk) {
            const Columns columns{together, std::min(chunk, rows - start), width};
            put_side_by_side(columns, [&](long row) { return input + (start + row) * width; });
            linear(turn, columns, {weight, bias}, tile, output + start * outputs, outputs);
#pragma omp barrier
        }
    }
    return 0;
}

// The RMS norms of `input` (rows, width), and the factors (rows) of its numbers.
void groupgrad_norm(const float *input, const float *weight, float epsilon, float *output, float *factors, int64_t rows,
                    int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL_PART)
    for (int64_t row = 0; row < rows; row++)
        factors[row] = static_cast<float>(
            normalise(input + row * width, weight, width, epsilon, output + row * width));
}

// Gradients of norms with respect to their inputs, and, unless it is null, to the weight, added to `of_weight` (threads,
// width) of each thread.
void groupgrad_norm_gradient(const float *gradient, const float *input, const float *weight, const float *factors,
                             float *of_input, float *of_weight, int64_t rows, int64_t width, int threads) {
#pragma omp parallel num_threads(threads) if (rows * width > SMALL_PART)
    {
        float *mine = of_weight ? of_weight + omp_get_thread_num() * width : nullptr;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const float *grad = gradient + row * width, *x = input + row * width;
            const float factor = factors[row];
            float along = 0.0f;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < width; i++) along += grad[i] * weight[i] * (x[i] * factor);
            along /= width;
            float *to = of_input + row * width;
            for (int64_t i = 0; i < width; i++) {
                const float normal = x[i] * factor;
                if (mine) mine[i] += grad[i] * normal;
                to[i] = (grad[i] * weight[i] - normal * along) * factor;
            }
        }
    }
}

// output = silu(gates) * ups, of `count` numbers.
void groupgrad_gate(const float *gates, const float *ups, float *output, int64_t count, int threads) {
    constexpr int64_t PART = 4096;
#pragma omp parallel for num_threads(threads) if (count > SMALL_PART)
    for (int64_t start = 0; start < count; start += PART)
        gate_values(gates + start, ups + start, std::min(PART, count - start), output + start);
}

// The gradients of that with respect to gates and ups.
void groupgrad_gate_gradient(const float *gradient, const float *gates, const float *ups, float *of_gates, float *of_ups,
                             int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > SMALL_PART)
    for (int64_t i = 0; i < count; i += LANES) {
        const long left = count - i;
        const Vec gate = load_some(gates + i, left), grad = load_some(gradient + i, left);
        const Vec share = 1.0f / (1.0f + exponential(-gate)), up = load_some(ups + i, left);
        store_some(of_gates + i, grad * up * share * (1.0f + gate * (1.0f - share)), left);
        store_some(of_ups + i, grad * gate * share, left);
    }
}

// Causal attention of all tokens of some spans; 1 if there is no memory for it.
int groupgrad_attend(const Attention *call, const Span *spans, int64_t count, int threads) {
    const std::unique_ptr<Tiles[]> tiles(new (std::nothrow) Tiles[count]);
    if (!tiles) return 1;
    long all = 0, each = 0;
    for (int64_t i = 0; i < count; i++) {
        const long tokens = AttentionTile::tile_tokens(*call, spans[i]);
        tiles[i] = {spans + i, tokens, (spans[i].length + tokens - 1) / tokens, all};
        all += tiles[i].count * call->kv_heads;
        each = std::max(each, Memory::whole(AttentionTile::scratch_size(*call, spans[i])));
    }
    Memory memory(threads * each);
    if (!memory.is_there()) return 1;
    float *scratch = memory.take(threads * each);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (all > 1)
    for (long task = 0; task < all; task++) {
        const auto is_later = [](long number, const Tiles &some) { return number < some.before; };
        const Tiles &of = *(std::upper_bound(tiles.get(), tiles.get() + count, task, is_later) - 1);
        const long head = (task - of.before) / of.count, first = (task - of.before) % of.count * of.tokens;
        const long tokens = std::min(of.tokens, static_cast<long>(of.span->length) - first);
        AttentionTile(*call, *of.span, head, first, tokens, scratch + omp_get_thread_num() * each).attend();
    }
    return 0;
}
}
