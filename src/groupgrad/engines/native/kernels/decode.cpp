// The decode step of pre-norm decoders (RMS norms, rotary embeddings, gated layers) in float32: one token for each of n
// rows, from the weights and the keys and values as they lie in memory.
//
// With few rows a step is bound by reading the weights once; with many, by multiplications. One kernel serves both (see
// `products.h`). All threads go through a step together and take what there is to do piece by piece.
//
// `step.py` mirrors the structures below. Plain C types only, so that no header of torch is needed.

#include <cmath>
#include <memory>
#include <new>

#include "products.h"

extern "C" {

struct Linear {
    const float *weight;  // (outputs, width)
    const float *bias;    // (outputs) or null
};

struct Layer {
    const float *attention_norm, *query_norm, *key_norm, *gated_norm;  // those of heads may be null
    Linear query, key, value, output, gate, up, down;
    float *own_keys, *own_values;                   // (slots, kv_heads, own_places, head_width)
    const float *prompt_keys, *prompt_values;       // (prompts, kv_heads, prompt_places, head_width)
    int64_t window;                                 // keys that a query sees, its own included; 0: all
    float scale;
};

struct Model {
    int64_t num_layers, hidden, inner, heads, kv_heads, head_width, vocabulary;
    const Layer *layers;
    const float *embedding, *norm;
    Linear head;
    const float *cosines, *sines;  // (positions, head_width)
    float epsilon;
};

struct Rows {
    int64_t count, own_places, prompt_places, num_chunks;
    const int64_t *groups, *prompt_lengths;  // of each row: the slot of its prompt, and its length
    const int64_t *order;                    // rows such that those of a prompt follow each other
    const int64_t *chunks;                   // (num_chunks + 1) bounds in `order` of rows that are attended together
};
}

namespace {

constexpr long QUERIES = 16;     // that read a prompt's keys together, unless one row has more heads
constexpr long SMALL = 1 << 21;  // multiplications that are done before other threads would have begun

// All threads: output (rows, stride) = input times the layer's weight, plus its bias.
void linear(Turn &turn, const Packed &input, const Linear &layer, float *tile, float *output, long stride) {
    product(turn, input, layer.weight, tile, [&](long row, long n, long count, const float *values, long step) {
        float *to = output + row * stride + n;
        if (layer.bias)
            for (long i = 0; i < count; i++) to[i] = values[i * step] + layer.bias[n + i];
        else
            for (long i = 0; i < count; i++) to[i] = values[i * step];
    });
}

// All threads: output (rows, stride) += input times the layer's weight, plus its bias.
void add_linear(Turn &turn, const Packed &input, const Linear &layer, float *tile, float *output, long stride) {
    product(turn, input, layer.weight, tile, [&](long row, long n, long count, const float *values, long step) {
        float *to = output + row * stride + n;
        for (long i = 0; i < count; i++) to[i] += values[i * step] + (layer.bias ? layer.bias[n + i] : 0.0f);
    });
}

// ------------------------------------------------------------------------------------------------ small parts

void normalise(const float *input, const float *weight, long width, float epsilon, float *output) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < width; i++) squares += input[i] * input[i];
    const float factor = 1.0f / std::sqrt(squares / width + epsilon);
    for (long i = 0; i < width; i++) output[i] = weight[i] * (input[i] * factor);
}

void rotate(const float *cosines, const float *sines, long width, float *values) {
    const long half = width / 2;
    for (long i = 0; i < half; i++) {
        const float one = values[i], other = values[half + i];
        values[i] = one * cosines[i] - other * sines[i];
        values[half + i] = other * cosines[half + i] + one * sines[half + i];
    }
}

// All threads: the rows of `input` normalised and packed.
void pack_normalised(const float *input, const float *weight, float epsilon, const Packed &output, float *scratch) {
#pragma omp for
    for (long row = 0; row < output.rows; row++) {
        normalise(input + row * output.width, weight, output.width, epsilon, scratch);
        output.put(row, 0, scratch, output.width);
    }
}

// values = silu(gates) * values, both of a whole number of LANES.
void gate_values(const float *gates, float *values, long count) {
    for (long i = 0; i < count; i += LANES) {
        const Vec gate = load(gates + i);
        store(values + i, gate / (1.0f + exponential(-gate)) * load(values + i));
    }
}

// ------------------------------------------------------------------------------------------------ attention

// scores[q * stride + p] for `count` keys p and the queries q of a packed block.
void score(
    const Packed &queries, const float *keys, long count, float *tile, float *scores, long stride, Soon soon
) {
    soon.spread(queries.inner_steps(count));
    for (long start = 0; start < count; start += MAX_PANEL) {
        const long some = std::min(MAX_PANEL, count - start);
        for (long index = 0; index < queries.num_blocks(); index++) {
            const long first = queries.first(index), rows = queries.first(index + 1) - first;
            multiply(rows, queries.block(index), keys + start * queries.width, some, queries.width, tile, soon);
            for (long m = 0; m < rows; m++)
                for (long p = 0; p < some; p++) scores[(first + m) * stride + start + p] = tile[p * rows + m];
        }
    }
}

// Exponentials in place, divided by their sum.
void softmax(float *scores, long count) {
    float peak = scores[0], total = 0.0f;
#pragma omp simd reduction(max : peak)
    for (long i = 0; i < count; i++) peak = std::max(peak, scores[i]);
    long i = 0;
    Vec sums = {};
    for (; i + LANES <= count; i += LANES) {
        const Vec value = exponential(load(scores + i) - peak);
        store(scores + i, value);
        sums += value;
    }
    if (i < count) {
        Vec value = exponential(load_part(scores + i, count - i) - peak);
        std::memcpy(scores + i, &value, (count - i) * sizeof(float));
        for (long j = i; j < count; j++) total += scores[j];
    }
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    const float factor = 1.0f / total;
    for (long j = 0; j < count; j++) scores[j] *= factor;
}

// output[q] += the sum over p of weights[q * stride + p] * values[p], for Q queries and V vectors of columns.
template <int Q, int V>
inline void mix_columns(const float *weights, long stride, const float *values, long count, long width, float *output) {
    Vec sums[Q][V];
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) sums[q][v] = load(output + q * width + v * LANES);
    for (long p = 0; p < count; p++) {
        Vec value[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) value[v] = load(values + p * width + v * LANES);
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[q][v] += weights[q * stride + p] * value[v];
    }
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < V; v++) store(output + q * width + v * LANES, sums[q][v]);
}

template <int Q>
void mix_some(const float *weights, long stride, const float *values, long count, long width, float *output) {
    constexpr int V = REGISTERS == 32 ? 4 : 2;
    long d = 0;
    for (; d + V * LANES <= width; d += V * LANES)
        mix_columns<Q, V>(weights, stride, values + d, count, width, output + d);
    for (; d + LANES <= width; d += LANES) mix_columns<Q, 1>(weights, stride, values + d, count, width, output + d);
    for (; d < width; d++)
        for (int q = 0; q < Q; q++)
            for (long p = 0; p < count; p++) output[q * width + d] += weights[q * stride + p] * values[p * width + d];
}

// output (queries, width) += weights (queries, stride) times values (count, width).
void mix(long queries, const float *weights, long stride, const float *values, long count, long width, float *output) {
    long q = 0;
    for (; q + 4 <= queries; q += 4)
        mix_some<4>(weights + q * stride, stride, values, count, width, output + q * width);
    for (; q + 2 <= queries; q += 2)
        mix_some<2>(weights + q * stride, stride, values, count, width, output + q * width);
    for (; q < queries; q++) mix_some<1>(weights + q * stride, stride, values, count, width, output + q * width);
}

// What a thread works on.
struct Scratch {
    float *tile, *other, *line, *queries, *packed, *scores, *mixed;

    static long most_queries(const Model &model) { return std::max<long>(QUERIES, model.heads / model.kv_heads); }
    static long score_width(const Rows &rows) { return rows.prompt_places + rows.own_places; }
    static long line_width(const Model &model) { return padded(std::max<long>(model.hidden, 2 * MAX_PANEL)); }

    static long size(const Model &model, const Rows &rows) {
        const long queries = most_queries(model), width = padded(model.head_width);
        return padded(2 * TILE + line_width(model) + queries * (3 * width + score_width(rows)) + 2 * LANES);
    }

    Scratch(float *memory, const Model &model) {
        const long queries = most_queries(model) * padded(model.head_width);
        tile = memory, other = tile + TILE, line = other + TILE;
        this->queries = line + line_width(model), packed = this->queries + queries, mixed = packed + queries;
        scores = mixed + queries;
    }
};

struct Step {
    const Model &model;
    const Rows &rows;
    const int64_t *tokens, *positions;
    float *hidden, *projected;
    Packed input, heads, inner;

    long repeat() const { return model.heads / model.kv_heads; }
    long projected_width() const { return (model.heads + 2 * model.kv_heads) * model.head_width; }

    // One head of a row after its norm, if it has one, and its rotation.
    void place_head(const float *from, const float *norm, long position, float *to) const {
        const long width = model.head_width;
        if (norm)
            normalise(from, norm, width, model.epsilon, to);
        else
            std::memcpy(to, from, width * sizeof(float));
        rotate(model.cosines + position * width, model.sines + position * width, width, to);
    }

    // A row's own keys or values of one head.
    template <class Float>
    Float *own_part(Float *all, long row, long head) const {
        return all + (row * model.kv_heads + head) * rows.own_places * model.head_width;
    }

    // Store the new key and value of a row, and get its queries of one key head ready.
    void place_row(const Layer &layer, long row, long head, float *queries) const {
        const long width = model.head_width, position = positions[row];
        const float *from = projected + row * projected_width();
        const long at = ((row * model.kv_heads + head) * rows.own_places + position - rows.prompt_lengths[row]) * width;
        const float *key = from + (model.heads + head) * width;
        place_head(key, layer.key_norm, position, layer.own_keys + at);
        std::memcpy(layer.own_values + at, key + model.kv_heads * width, width * sizeof(float));
        for (long i = 0; i < repeat(); i++) {
            float *query = queries + i * width;
            place_head(from + (head * repeat() + i) * width, layer.query_norm, position, query);
            for (long d = 0; d < width; d++) query[d] *= layer.scale;
        }
    }

    // The first key that a query at `position` sees.
    static long first_key(const Layer &layer, long position) {
        return layer.window ? std::max<long>(0, position - layer.window + 1) : 0;
    }

    // Attention of rows that share a prompt, for one key head: the prompt's keys and values are read once for all.
    void attend(const Layer &layer, const int64_t *order, long count, long head, const Scratch &scratch) const {
        const long width = model.head_width, repeat = this->repeat(), all = count * repeat;
        const long prompt = rows.prompt_lengths[order[0]], stride = Scratch::score_width(rows);
        const long slot = (rows.groups[order[0]] * model.kv_heads + head) * rows.prompt_places;
        long begin = prompt;
        for (long i = 0; i < count; i++) {
            place_row(layer, order[i], head, scratch.queries + i * repeat * width);
            begin = std::min(begin, first_key(layer, positions[order[i]]));
        }
        const Packed together{scratch.packed, all, width};
        for (long q = 0; q < all; q++) together.put(q, 0, scratch.queries + q * width, width);
        const float *keys = layer.prompt_keys + (slot + begin) * width;
        const float *values = layer.prompt_values + (slot + begin) * width;
        Soon soon;
        soon.add(own_part(layer.own_keys, order[0], head), (positions[order[0]] - prompt + 1) * width);
        soon.add(values, (prompt - begin) * width);
        score(together, keys, prompt - begin, scratch.tile, scratch.scores + begin, stride, soon);
        for (long i = 0; i < count; i++) {
            const long row = order[i], own = positions[row] - prompt + 1, first = first_key(layer, positions[row]);
            Soon soon;
            soon.add(own_part(layer.own_values, row, head), own * width);
            if (i + 1 < count)
                soon.add(own_part(layer.own_keys, order[i + 1], head), (positions[order[i + 1]] - prompt + 1) * width);
            const Packed mine{scratch.packed, repeat, width};
            for (long q = 0; q < repeat; q++) mine.put(q, 0, scratch.queries + (i * repeat + q) * width, width);
            float *scores = scratch.scores + i * repeat * stride + prompt;
            score(mine, own_part(layer.own_keys, row, head), own, scratch.tile, scores, stride, soon);
            for (long q = i * repeat; q < (i + 1) * repeat; q++) {
                float *scores = scratch.scores + q * stride;
                std::fill(scores + begin, scores + std::max(begin, first), 0.0f);
                softmax(scores + first, prompt + own - first);
            }
        }
        std::fill(scratch.mixed, scratch.mixed + all * width, 0.0f);
        mix(all, scratch.scores + begin, stride, values, prompt - begin, width, scratch.mixed);
        for (long i = 0; i < count; i++) {
            const long row = order[i], own = positions[row] - prompt + 1;
            const float *weights = scratch.scores + i * repeat * stride + prompt;
            float *mixed = scratch.mixed + i * repeat * width;
            mix(repeat, weights, stride, own_part(layer.own_values, row, head), own, width, mixed);
            heads.put(row, head * repeat * width, mixed, repeat * width);
        }
    }

    void attend_all(Turn &turn, const Layer &layer, const Scratch &scratch) const {
        const long width = model.head_width, across = projected_width();
        const long queries = model.heads * width, keys = model.kv_heads * width;
        pack_normalised(hidden, layer.attention_norm, model.epsilon, input, scratch.line);
        linear(turn, input, layer.query, scratch.tile, projected, across);
        linear(turn, input, layer.key, scratch.tile, projected + queries, across);
        linear(turn, input, layer.value, scratch.tile, projected + queries + keys, across);
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (long task = 0; task < rows.num_chunks * model.kv_heads; task++) {
            const int64_t *chunk = rows.chunks + task / model.kv_heads;
            attend(layer, rows.order + chunk[0], chunk[1] - chunk[0], task % model.kv_heads, scratch);
        }
        add_linear(turn, heads, layer.output, scratch.tile, hidden, model.hidden);
#pragma omp barrier
    }

    // inner = silu(gate) * up. Both products go panel by panel, so that only their result is stored.
    void gate(Turn &turn, const Layer &layer, const Scratch &scratch) const {
        const long width = model.hidden;
        float *gates = scratch.line, *values = scratch.line + MAX_PANEL;
        turn.go(input, [&](long start, long count, Soon &soon) {
            for (long index = 0; index < input.num_blocks(); index++) {
                const long first = input.first(index), some = input.first(index + 1) - first;
                const float *block = input.block(index);
                multiply(some, block, layer.gate.weight + start * width, count, width, scratch.tile, soon);
                multiply(some, block, layer.up.weight + start * width, count, width, scratch.other, soon);
                for (long m = 0; m < some; m++) {
                    for (long i = 0; i < count; i++) {
                        gates[i] = scratch.tile[i * some + m] + (layer.gate.bias ? layer.gate.bias[start + i] : 0.0f);
                        values[i] = scratch.other[i * some + m] + (layer.up.bias ? layer.up.bias[start + i] : 0.0f);
                    }
                    gate_values(gates, values, padded(count));
                    inner.put(first + m, start, values, count);
                }
            }
        });
#pragma omp barrier
    }

    static long num_products(const Model &model) { return model.num_layers * 6 + 1; }

    // The products of a step in the order in which `run` makes them.
    static void plan_products(const Model &model, Plan &plan, int threads) {
        const long queries = model.heads * model.head_width, keys = model.kv_heads * model.head_width;
        const long hidden = model.hidden;
        for (long index = 0; index < model.num_layers; index++) {
            const Layer &layer = model.layers[index];
            plan.add(layer.query.weight, nullptr, queries, hidden, threads);
            plan.add(layer.key.weight, nullptr, keys, hidden, threads);
            plan.add(layer.value.weight, nullptr, keys, hidden, threads);
            plan.add(layer.output.weight, nullptr, hidden, queries, threads);
            plan.add(layer.gate.weight, layer.up.weight, model.inner, hidden, threads);
            plan.add(layer.down.weight, nullptr, hidden, model.inner, threads);
        }
        plan.add(model.head.weight, nullptr, model.vocabulary, hidden, threads);
    }

    // All threads run this together.
    void run(Plan &plan, const Scratch &scratch, float *logits) const {
        const long width = model.hidden;
        Turn turn(plan);
#pragma omp for
        for (long row = 0; row < rows.count; row++)
            std::memcpy(hidden + row * width, model.embedding + tokens[row] * width, width * sizeof(float));
        for (long index = 0; index < model.num_layers; index++) {
            const Layer &layer = model.layers[index];
            attend_all(turn, layer, scratch);
            pack_normalised(hidden, layer.gated_norm, model.epsilon, input, scratch.line);
            gate(turn, layer, scratch);
            add_linear(turn, inner, layer.down, scratch.tile, hidden, width);
#pragma omp barrier
        }
        pack_normalised(hidden, model.norm, model.epsilon, input, scratch.line);
        linear(turn, input, model.head, scratch.tile, logits, model.vocabulary);
    }
};

// Uninitialised; `start` is where a cache line begins (a vector over two lines is read twice), null without memory.
struct Memory {
    std::unique_ptr<float[]> all;
    float *start = nullptr;

    explicit Memory(long floats) : all(new (std::nothrow) float[floats + 16]) {
        if (all) start = all.get() + (-reinterpret_cast<uintptr_t>(all.get()) / 4) % 16;
    }
};

}  // namespace

extern "C" {

// Rows whose queries of one key head are attended together.
int64_t groupgrad_chunk_rows(int64_t repeat) { return std::max<int64_t>(1, QUERIES / repeat); }

// Logits (n, vocabulary) that follow `tokens` (n) at `positions` (n), whose keys and values are stored; 1 if there is no
// memory for it.
int groupgrad_decode(const Model *model, const Rows *rows, const int64_t *tokens, const int64_t *positions,
                     float *logits, int threads) {
    const long n = rows->count, heads = model->heads * model->head_width;
    const long across = heads + 2 * model->kv_heads * model->head_width, each = Scratch::size(*model, *rows);
    const long input = n * padded(model->hidden), inner = n * padded(model->inner), mixed = n * padded(heads);
    const Memory memory(input * 2 + mixed + inner + n * across + threads * each);
    const std::unique_ptr<Product[]> products(new (std::nothrow) Product[Step::num_products(*model)]);
    if (!memory.start || !products) return 1;
    float *packed = memory.start, *hidden = packed + input + mixed + inner, *projected = hidden + input;
    const Step step{*model,    *rows,
                    tokens,    positions,
                    hidden,    projected,
                    {packed, n, model->hidden},
                    {packed + input, n, heads},
                    {packed + input + mixed, n, model->inner}};
    float *scratch = projected + n * across;
    const long weights = model->num_layers * (model->hidden * (across + heads + 3 * model->inner));
    if (n * (weights + model->hidden * model->vocabulary) < SMALL) threads = 1;
    Plan plan(products.get());
    Step::plan_products(*model, plan, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    step.run(plan, Scratch(scratch + omp_get_thread_num() * each, *model), logits);
    return 0;
}

// output (rows, outputs) = input (rows, width) times weight (outputs, width), plus bias; 1 if there is no memory for it.
int groupgrad_linear(const float *input, const float *weight, const float *bias, float *output, int64_t rows,
                     int64_t width, int64_t outputs, int threads) {
    const Memory memory(rows * padded(width) + threads * TILE);
    if (!memory.start) return 1;
    const Packed packed{memory.start, rows, width};
    float *tiles = memory.start + rows * padded(width);
    if (rows * width * outputs < SMALL) threads = 1;
    Product only;
    Plan plan(&only);
    plan.add(weight, nullptr, outputs, width, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Turn turn(plan);
#pragma omp for
        for (long row = 0; row < rows; row++) packed.put(row, 0, input + row * width, width);
        linear(turn, packed, {weight, bias}, tiles + omp_get_thread_num() * TILE, output, outputs);
    }
    return 0;
}
}
