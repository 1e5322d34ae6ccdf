// Parts of a pass over many tokens, bit-exact with decode steps, and the gradients of norms and gates.

#include "attention.h"
#include "memory.h"
#include "layers.h"

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
    float *output;       // (tokens, heads, head_width)
    const float *sinks;  // (heads) one more score each, without a value; or null
    float scale, softcap;  // scores become softcap * tanh(score / softcap), unless that is 0
};
}

namespace {

constexpr long CHUNK_FLOATS = 1 << 18;  // of rows multiplied together, which stay in a cache for all weights
constexpr long MAX_QUERIES_OF_TILE = 64;
constexpr long TILE_SCORES = 1 << 16;   // of a tile of queries, unless a single token has more

// Rows multiplied together.
long chunk_rows(long rows, long width) {
    const long most = std::max(MOST_ROWS, CHUNK_FLOATS / width / MOST_ROWS * MOST_ROWS);
    const long chunks = (rows + most - 1) / most, each = (rows + chunks - 1) / chunks;
    return std::min(most, (each + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS);
}

long num_keys(const Span &span) { return span.prompt_length + span.offset + span.length; }

// Tokens whose attention is computed together.
struct TokenGroup {
    const Span *spans;
    long count;          // of spans: one, or several with one token each behind the same prompt
    long first, tokens;  // among the tokens of a single span; with several, as many as spans

    const Span &span(long token) const { return spans[count == 1 ? 0 : token]; }
    long place(long token) const { return count == 1 ? first + token : 0; }  // in its span
};

// Attention of a tile of tokens in one key head.
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
                const float *sink = call.sinks ? call.sinks + head * repeat() + j : nullptr;
                weigh(scores + (i * repeat() + j) * stride, i, sink);
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
        const float *keys = group.spans->prompt_keys + head * group.spans->prompt_stride + prompt_begin() * width;
        score_together(together, keys, prompt - prompt_begin(), tile, scores + prompt_begin(), stride, Prefetch());
    }

    void score_own() const {
        const long width = call.head_width;
        each_span([&](long start, long end, const Span &span, long num_keys) {
            const Packed mine{packed, (end - start) * repeat(), width};
            for (long q = 0; q < mine.rows; q++) mine.put(q, queries + (start * repeat() + q) * width);
            const float *keys = span.own_keys + head * span.own_stride + own_begin() * width;
            float *to = scores + start * repeat() * stride + prompt + own_begin();
            score(mine, keys, num_keys - own_begin(), tile, to, stride, Prefetch());
        });
    }

    // The weights of a token's query over all keys from `begin` on; 0 for masked keys.
    void weigh(float *of_query, long token, const float *sink) const {
        const long from = first_key(token), end = prompt + num_own(token);
        std::fill(of_query + begin, of_query + from, 0.0f);
        if (call.softcap != 0.0f) cap_scores(of_query + from, end - from, call.softcap);
        softmax(of_query + from, end - from, sink);
        std::fill(of_query + end, of_query + stride, 0.0f);
    }
};

// Number of spans, from the first of `spans` on, that are computed together: one token each, behind the same prompt.
long num_joined(const Attention &call, const Span *spans, int64_t count) {
    long keys = 0, number = 0;
    for (; number < count; number++) {
        const Span &next = spans[number];
        if (next.length != 1 || !next.prompt_length || next.prompt_keys != spans->prompt_keys ||
            next.prompt_length != spans->prompt_length)
            break;
        keys = std::max(keys, num_keys(next));
        if (number + 1 > AttentionTile::most_tokens(call, keys)) break;
    }
    return std::max(1L, number);
}

// Tiles of one span, or of several joined ones, in one key head, and the number of tiles before them.
struct Tiles {
    const Span *spans;
    long num_joined, tokens, count, before;
};

}  // namespace

extern "C" {

// output (rows, outputs) = input (rows, width) times weight (outputs, width), plus bias. Returns 1 without memory.
int groupgrad_linear(const float *input, const float *weight, const float *bias, float *output, int64_t rows,
                     int64_t width, int64_t outputs, int threads) {
    const long chunk = chunk_rows(rows, width), count = (rows + chunk - 1) / chunk;
    const std::unique_ptr<Product[]> products(new (std::nothrow) Product[count]);
    Memory memory(Memory::whole(in_grains(chunk) * width) + threads * Memory::whole(TILE));
    if (!memory.is_there() || !products) return 1;
    float *together = memory.take(in_grains(chunk) * width), *tiles = memory.take(threads * Memory::whole(TILE));
    if (rows * width * outputs < SMALL) threads = 1;
    WorkPlan plan(products.get());
    for (long i = 0; i < count; i++) plan.add(weight, nullptr, outputs, width, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Worker worker(plan);
        float *tile = tiles + omp_get_thread_num() * Memory::whole(TILE);
        for (long start = 0; start < rows; start += chunk) {
            const Columns columns{together, std::min(chunk, rows - start), width};
            put_side_by_side(columns, [&](long row) { return input + (start + row) * width; });
            linear(worker, columns, {weight, bias}, tile, output + start * outputs, outputs);
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

// Gradients of norms with respect to their inputs, and to the weight unless `of_weight` (threads, width) is null. Each
// thread adds to its own row of that.
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

// Gradients of silu(gates) * ups with respect to both.
void groupgrad_gate_gradient(const float *gradient, const float *gates, const float *ups, float *of_gates,
                             float *of_ups, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > SMALL_PART)
    for (int64_t i = 0; i < count; i += LANES) {
        const long left = count - i;
        const Vec gate = load_some(gates + i, left), grad = load_some(gradient + i, left);
        const Vec share = 1.0f / (1.0f + exponential(-gate)), up = load_some(ups + i, left);
        store_some(of_gates + i, grad * up * share * (1.0f + gate * (1.0f - share)), left);
        store_some(of_ups + i, grad * gate * share, left);
    }
}

// output = input (tokens, heads, width) rotated by the angles of each token, given as cosines and sines (tokens, width).
void groupgrad_rotate(const float *input, const float *cosines, const float *sines, float *output, int64_t tokens,
                      int64_t heads, int64_t width, int threads) {
    const int64_t step = heads * width;
#pragma omp parallel for num_threads(threads) if (tokens * step > SMALL_PART)
    for (int64_t token = 0; token < tokens; token++) {
        float *to = output + token * step;
        std::memcpy(to, input + token * step, step * sizeof(float));
        for (int64_t head = 0; head < heads; head++)
            rotate(cosines + token * width, sines + token * width, width, to + head * width);
    }
}

// Causal attention of all tokens of some spans. Returns 1 without memory.
int groupgrad_attend(const Attention *call, const Span *spans, int64_t count, int threads) {
    const std::unique_ptr<Tiles[]> tiles(new (std::nothrow) Tiles[count]);
    if (!tiles) return 1;
    long all = 0, each = 0, number = 0;
    for (int64_t i = 0; i < count; i += tiles[number++].num_joined) {
        const long together = num_joined(*call, spans + i, count - i);
        long keys = 0;
        for (long j = 0; j < together; j++) keys = std::max(keys, num_keys(spans[i + j]));
        const long tokens = together > 1 ? together : AttentionTile::most_tokens(*call, keys);
        const long tiles_of = together > 1 ? 1 : (spans[i].length + tokens - 1) / tokens;
        tiles[number] = {spans + i, together, tokens, tiles_of, all};
        all += tiles_of * call->kv_heads;
        each = std::max(each, Memory::whole(AttentionTile::scratch_size(*call, tokens, keys)));
    }
    Memory memory(threads * each);
    if (!memory.is_there()) return 1;
    float *scratch = memory.take(threads * each);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (all > 1)
    for (long task = 0; task < all; task++) {
        const auto is_later = [](long at, const Tiles &some) { return at < some.before; };
        const Tiles &of = *(std::upper_bound(tiles.get(), tiles.get() + number, task, is_later) - 1);
        const long head = (task - of.before) / of.count, first = (task - of.before) % of.count * of.tokens;
        const long tokens = of.num_joined > 1 ? of.num_joined : std::min<long>(of.tokens, of.spans->length - first);
        const TokenGroup group{of.spans, of.num_joined, first, tokens};
        AttentionTile(*call, group, head, scratch + omp_get_thread_num() * each).attend();
    }
    return 0;
}
}
