// The decode step of pre-norm decoders (RMS norms, rotary embeddings, gated layers) in float32: one token for each of n
// rows. Weights, keys and values are read in place.
//
// With few rows a step is bound by reading the weights once; with many, by multiplications. One kernel serves both (see
// `gemm.h`). All threads run a step together and take its panels one by one.
//
// `engines/native/cpp_step.py` mirrors the structures below. Plain C types only, so that no header of torch is needed.

#include "attention.h"
#include "memory.h"
#include "layers.h"

extern "C" {

struct Layer {
    const float *attention_norm, *query_norm, *key_norm, *gated_norm;  // the norms of heads may be null
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
    const int64_t *order;                    // the rows sorted by prompt
    const int64_t *chunks;                   // (num_chunks + 1) bounds in `order` of rows that are computed together
};
}

namespace {

constexpr long QUERIES = 16;     // queries that read a prompt's keys together, unless one row has more heads

// Called by all threads: output += input times the layer's weight, plus its bias.
void add_linear(Worker &worker, const Columns &input, const Linear &layer, float *tile, const Columns &output) {
    product(worker, input, layer.weight, tile, [&](const Outputs &outputs) {
        const long rows = outputs.block.rows;
        float *to = output.data + outputs.block.first * output.width + outputs.first * rows;
        for (long n = 0; n < outputs.count; n++) {
            const float bias = layer.bias ? layer.bias[outputs.first + n] : 0.0f;
            for (long i = n * rows; i < (n + 1) * rows; i++) to[i] += outputs.values[i] + bias;
        }
    });
}

// Called by all threads: normalises the rows of `input`.
void normalise_all(const Columns &input, const float *weight, float epsilon, const Columns &output) {
    typedef double GrainDoubles __attribute__((vector_size(8 * GRAIN)));
#pragma omp for
    for (long row = 0; row < input.padded_rows(); row += GRAIN) {
        const Columns::Block block = input.block_of(row);
        const float *from = block.data + (row - block.first);
        float *to = output.data + (from - input.data);
        GrainDoubles sums[NORM_SUMS] = {};
        const auto add = [&](long k, long i) {
            const auto value = __builtin_convertvector(load_as<Grain>(from + (k + i) * block.rows), GrainDoubles);
            sums[i] += value * value;
        };
        long k = 0;
        for (; k + NORM_SUMS <= input.width; k += NORM_SUMS)
#pragma GCC unroll 8
            for (long i = 0; i < NORM_SUMS; i++) add(k, i);
        for (long i = 0; i < input.width - k; i++) add(k, i);
        GrainDoubles factors;
        for (long i = 0; i < GRAIN; i++) {
            double squares[NORM_SUMS];
            for (long j = 0; j < NORM_SUMS; j++) squares[j] = sums[j][i];
            factors[i] = norm_factor(squares, input.width, epsilon);
        }
        for (k = 0; k < input.width; k++) {
            const auto value = __builtin_convertvector(load_as<Grain>(from + k * block.rows), GrainDoubles);
            store_as(to + k * block.rows, __builtin_convertvector(weight[k] * (value * factors), Grain));
        }
    }
}

// values[n * rows + row] += bias[n], if there is a bias.
void add_bias(const float *bias, long count, long rows, float *values) {
    if (!bias) return;
    for (long n = 0; n < count; n++)
        for (long row = 0; row < rows; row++) values[n * rows + row] += bias[n];
}

// ------------------------------------------------------------------------------------------------ the step

// Scratch memory of a thread.
struct Scratch {
    static constexpr long ROOM = std::max(TILE, SCORE_TILE);  // size of `tile`, which holds outputs or scores
    float *tile, *other, *queries, *packed, *scores;

    static long most_queries(const Model &model) { return std::max<long>(QUERIES, model.heads / model.kv_heads); }
    static long score_width(const Rows &rows) { return rows.prompt_places + rows.own_places; }

    static long size(const Model &model, const Rows &rows) {
        const long queries = in_grains(most_queries(model)), width = padded(model.head_width);
        return padded(ROOM + TILE + queries * (2 * width + score_width(rows)) + 2 * LANES);
    }

    Scratch(float *memory, const Model &model) {
        const long some = in_grains(most_queries(model)) * padded(model.head_width);
        tile = memory, other = tile + ROOM, queries = other + TILE, packed = queries + some, scores = packed + some;
    }
};

struct Step {
    const Model &model;
    const Rows &rows;
    const int64_t *tokens, *positions;
    float *projected, *mixed;  // row-major queries, keys and values; outputs of attention
    Columns hidden, input, heads, inner;

    long repeat() const { return model.heads / model.kv_heads; }
    long projected_width() const { return (model.heads + 2 * model.kv_heads) * model.head_width; }

    // One head of a row after its norm, if any, and its rotary embedding.
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

    // Stores the new key and value of a row, and prepares its queries of one key head.
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

    // Attention of rows that share a prompt, in one key head. The prompt's keys and values are read once for all rows.
    void attend(const Layer &layer, const int64_t *order, long count, long head, const Scratch &scratch) const {
        const long width = model.head_width, repeat = this->repeat(), all = count * repeat;
        const long prompt = rows.prompt_lengths[order[0]], stride = Scratch::score_width(rows);
        const long slot = (rows.groups[order[0]] * model.kv_heads + head) * rows.prompt_places;
        long begin = prompt;
        for (long i = 0; i < count; i++) {
            place_row(layer, order[i], head, scratch.queries + i * repeat * width);
            begin = std::min(begin, first_key(layer, positions[order[i]]));
        }
        const Columns together{scratch.packed, all, width};
        for (long q = 0; q < all; q += GRAIN) {
            const float *some[GRAIN];
            for (long i = 0; i < GRAIN; i++) some[i] = q + i < all ? scratch.queries + (q + i) * width : nullptr;
            together.put(q, some, 0, width);
        }
        const float *keys = layer.prompt_keys + (slot + begin) * width;
        const float *values = layer.prompt_values + (slot + begin) * width;
        Prefetch prefetch;
        prefetch.add(own_part(layer.own_keys, order[0], head), (positions[order[0]] - prompt + 1) * width);
        prefetch.add(values, (prompt - begin) * width);
        score_together(together, keys, prompt - begin, scratch.tile, scratch.scores + begin, stride, prefetch);
        for (long i = 0; i < count; i++) {
            const long row = order[i], own = positions[row] - prompt + 1, first = first_key(layer, positions[row]);
            Prefetch prefetch;
            prefetch.add(own_part(layer.own_values, row, head), own * width);
            if (i + 1 < count)
                prefetch.add(own_part(layer.own_keys, order[i + 1], head),
                             (positions[order[i + 1]] - prompt + 1) * width);
            const Packed mine{scratch.packed, repeat, width};
            for (long q = 0; q < repeat; q++) mine.put(q, scratch.queries + (i * repeat + q) * width);
            float *scores = scratch.scores + i * repeat * stride + prompt;
            score(mine, own_part(layer.own_keys, row, head), own, scratch.tile, scores, stride, prefetch);
            for (long q = i * repeat; q < (i + 1) * repeat; q++) {
                float *scores = scratch.scores + q * stride;
                std::fill(scores + begin, scores + std::max(begin, first), 0.0f);
                softmax(scores + first, prompt + own - first);
            }
        }
        // The memory of the queries is free now.
        float *together_mixed = scratch.queries;
        std::fill(together_mixed, together_mixed + all * width, 0.0f);
        mix(all, scratch.scores + begin, stride, values, prompt - begin, width, together_mixed);
        for (long i = 0; i < count; i++) {
            const long row = order[i], own = positions[row] - prompt + 1;
            const float *weights = scratch.scores + i * repeat * stride + prompt;
            float *own_mixed = together_mixed + i * repeat * width;
            mix(repeat, weights, stride, own_part(layer.own_values, row, head), own, width, own_mixed);
            float *to = mixed + (row * model.heads + head * repeat) * width;
            std::memcpy(to, own_mixed, repeat * width * sizeof(float));
        }
    }

    void attend_all(Worker &worker, const Layer &layer, const Scratch &scratch) const {
        const long width = model.head_width, across = projected_width();
        const long queries = model.heads * width, keys = model.kv_heads * width;
        normalise_all(hidden, layer.attention_norm, model.epsilon, input);
        linear(worker, input, layer.query, scratch.tile, projected, across);
        linear(worker, input, layer.key, scratch.tile, projected + queries, across);
        linear(worker, input, layer.value, scratch.tile, projected + queries + keys, across);
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (long task = 0; task < rows.num_chunks * model.kv_heads; task++) {
            const int64_t *chunk = rows.chunks + task / model.kv_heads;
            attend(layer, rows.order + chunk[0], chunk[1] - chunk[0], task % model.kv_heads, scratch);
        }
        put_side_by_side(heads, [&](long row) { return mixed + row * heads.width; });
        add_linear(worker, heads, layer.output, scratch.tile, hidden);
#pragma omp barrier
    }

    // inner = silu(gate) * up. Both products run panel by panel, so that only their result is stored.
    void gate(Worker &worker, const Layer &layer, const Scratch &scratch) const {
        const long width = model.hidden;
        worker.go(input, [&](long start, long count, Prefetch &prefetch) {
            input.each_block([&](const Columns::Block &block) {
                multiply(block, layer.gate.weight + start * width, count, width, scratch.tile, prefetch);
                multiply(block, layer.up.weight + start * width, count, width, scratch.other, prefetch);
                add_bias(layer.gate.bias ? layer.gate.bias + start : nullptr, count, block.rows, scratch.tile);
                add_bias(layer.up.bias ? layer.up.bias + start : nullptr, count, block.rows, scratch.other);
                float *to = inner.data + block.first * inner.width + start * block.rows;
                gate_values(scratch.tile, scratch.other, count * block.rows, to);
            });
        });
#pragma omp barrier
    }

    static long num_products(const Model &model) { return model.num_layers * 6 + 1; }

    // Plans the products of a step in the order of `run`.
    static void plan_products(const Model &model, WorkPlan &plan, int threads) {
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

    // Called by all threads.
    void run(WorkPlan &plan, const Scratch &scratch, float *logits) const {
        Worker worker(plan);
        put_side_by_side(hidden, [&](long row) { return model.embedding + tokens[row] * model.hidden; });
        for (long index = 0; index < model.num_layers; index++) {
            const Layer &layer = model.layers[index];
            attend_all(worker, layer, scratch);
            normalise_all(hidden, layer.gated_norm, model.epsilon, input);
            gate(worker, layer, scratch);
            add_linear(worker, inner, layer.down, scratch.tile, hidden);
#pragma omp barrier
        }
        normalise_all(hidden, model.norm, model.epsilon, input);
        linear(worker, input, model.head, scratch.tile, logits, model.vocabulary);
    }
};

}  // namespace

extern "C" {

// Rows whose queries of one key head are computed together.
int64_t groupgrad_chunk_rows(int64_t repeat) { return std::max<int64_t>(1, QUERIES / repeat); }

// Logits (n, vocabulary) that follow `tokens` (n) at `positions` (n), whose keys and values are stored. Returns 1
// without memory.
int groupgrad_decode(const Model *model, const Rows *rows, const int64_t *tokens, const int64_t *positions,
                     float *logits, int threads) {
    const long n = rows->count, heads = model->heads * model->head_width, side = in_grains(n);
    const long across = heads + 2 * model->kv_heads * model->head_width, each = Scratch::size(*model, *rows);
    long total = Memory::whole(n * across) + Memory::whole(n * heads) + threads * Memory::whole(each);
    for (long width : {model->hidden, model->hidden, heads, model->inner}) total += Memory::whole(side * width);
    Memory memory(total);
    const std::unique_ptr<Product[]> products(new (std::nothrow) Product[Step::num_products(*model)]);
    if (!memory.is_there() || !products) return 1;
    const auto columns = [&](long width) { return Columns{memory.take(side * width), n, width}; };
    const Columns hidden = columns(model->hidden), input = columns(model->hidden), mixed = columns(heads);
    const Columns inner = columns(model->inner);
    float *projected = memory.take(n * across), *by_row = memory.take(n * heads);
    float *scratch = memory.take(threads * Memory::whole(each));
    const Step step{*model, *rows, tokens, positions, projected, by_row, hidden, input, mixed, inner};
    const long weights = model->num_layers * (model->hidden * (across + heads + 3 * model->inner));
    if (n * (weights + model->hidden * model->vocabulary) < SMALL) threads = 1;
    WorkPlan plan(products.get());
    Step::plan_products(*model, plan, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    step.run(plan, Scratch(scratch + omp_get_thread_num() * Memory::whole(each), *model), logits);
    return 0;
}
}
