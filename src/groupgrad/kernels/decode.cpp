// The decode step of pre-norm decoders (RMS norms, rotary embeddings, gated layers) in float32: one token for each of n
// rows. Weights, keys, values and states are read in place; the embedding and the weights of products may be bfloat16. A
// layer has a mixer, which is attention, the gated delta rule, Mamba-2 or a short convolution, and an MLP; it may lack
// one of the two.
//
// With few rows a step is bound by reading the weights once; with many, by multiplications. One kernel serves both (see
// `gemm.h`). All threads run a step together and take its panels one by one.
//
// `engines/native/cpp_step.py` mirrors the structures below. Plain C types only, so that no header of torch is needed.

#include "attention_tile.h"
#include "layers.h"
#include "memory.h"
#include "state_step.h"

extern "C" {

// The gated delta rule or Mamba-2. Its projections are behind each other in a row of `Step::projected`. Those that are
// convolved are queries, keys and values of the delta rule, or values, keys and queries of Mamba-2 (x, B and C there).
struct Recurrent {
    Linear inputs, gates, strengths, decays, output;  // `inputs` are convolved; Mamba-2 has no strengths
    const float *convolution, *convolution_bias;      // (channels, taps), (channels) or null
    const float *decay_rates, *decay_bias;            // (value_heads)
    const float *skips;                               // (value_heads), of Mamba-2 alone (D there)
    const float *norm;                                // (value_width), or of Mamba-2 (values)
    float *last_inputs;                               // (slots, channels, taps - 1)
    float *states;                                    // (slots, value_heads, key_width, value_width)
    int64_t norm_groups;                              // of Mamba-2: groups of a row's values with a norm each
    float shortest, longest;                          // bounds of Mamba-2's time steps
};

// A short convolution of values between two gates. Its projections are the gates of its inputs, those of its outputs, and
// the values.
struct Convolution {
    Linear inputs, output;
    const float *convolution, *convolution_bias;  // (convolved, taps), (convolved) or null
    float *last_inputs;                           // (slots, convolved, taps - 1)
};

struct Layer {
    const float *attention_norm, *query_norm, *key_norm, *mlp_norm;  // null where the layer lacks it
    const Recurrent *recurrent;
    const Convolution *convolution;  // both null: the mixer is attention
    Linear query, key, value, output, gate, up, down;                // no gate: an MLP of the squared ReLU
    float *row_keys, *row_values;                   // (slots, kv_heads, row_places, head_width)
    const float *prompt_keys, *prompt_values;       // (prompts, kv_heads, prompt_places, head_width)
    int64_t window;                                 // keys that a query sees, its own included; 0: all
    float scale;
};

struct Model {
    int64_t num_layers, hidden, inner, heads, kv_heads, head_width, vocabulary;
    int64_t rotary_width;  // numbers of a head that rotate, its first ones
    int64_t query_stride;  // between the queries of two heads: head_width, or twice that if gates lie between them
    int64_t value_heads, key_heads, key_width, value_width, taps, convolved;  // of recurrent layers
    int64_t is_half;  // the embedding and all weights of products are bfloat16
    const Layer *layers;
    const void *embedding;  // (vocabulary, hidden)
    const float *norm;
    Linear head;
    const float *cosines, *sines;  // (positions, rotary_width)
    float epsilon, length_epsilon;

    // Widths of a row: outputs of attention's projections, of a recurrence, of its convolution, of all of its
    // projections at most, and of the wider kind of layer.
    long queries() const { return heads * query_stride; }
    long keys() const { return kv_heads * head_width; }
    long values() const { return value_heads * value_width; }
    long channels() const { return 2 * key_heads * key_width + values(); }
    long recurrent() const { return channels() + values() + 2 * value_heads; }
    long projected() const { return std::max({queries() + 2 * keys(), recurrent(), 3 * convolved}); }
    long mixed() const { return std::max({heads * head_width, values(), convolved}); }
};

struct Rows {
    int64_t count, row_places, prompt_places, num_chunks;
    const int64_t *groups, *prompt_lengths;  // of each row: the slot of its prompt, and its length
    const int64_t *order;                    // the rows sorted by prompt
    const int64_t *chunks;                   // (num_chunks + 1) bounds in `order` of rows that are computed together
};
}

namespace {

constexpr long QUERIES = 16;  // queries that read a prompt's keys together, unless one row has more heads

// Rows whose queries of one key head are computed together.
long most_rows(long repeat) { return std::max(1L, QUERIES / repeat); }

// Called by all threads: output += input times the layer's weight, plus its bias.
void add_linear(Worker &worker, const Columns &input, const Linear &layer, bool is_half, float *tile,
                const Columns &output) {
    product(worker, input, {layer.weight, is_half}, tile, [&](const Outputs &outputs) {
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

// Scratch memory of a thread: outputs of products, or a tile of attention.
struct Scratch {
    float *tile, *other;

    static long size(const Attention &attention, const Rows &rows) {
        const long tokens = most_rows(attention.heads / attention.kv_heads);
        return std::max(2 * TILE, AttentionTile::scratch_size(attention, tokens));
    }

    explicit Scratch(float *memory) : tile(memory), other(memory + TILE) {}
};

struct Step {
    const Model &model;
    const Rows &rows;
    const int64_t *tokens, *positions;
    float *projected, *mixed;  // row-major: outputs of a layer's first projections, and of attention or a recurrence
    float *embedded;           // (rows, hidden), where the embedding has to be widened
    Columns hidden, input, by_column, inner;  // `by_column`: `mixed` as columns
    long parts;                               // into which chunks are cut

    long repeat() const { return model.heads / model.kv_heads; }
    Weight weight(const Linear &layer) const { return {layer.weight, model.is_half != 0}; }

    // One head of a row after its norm, if any, and its rotary embedding. `to` may be `from`.
    void place_head(const float *from, const float *norm, long position, float *to) const {
        const long width = model.head_width;
        if (norm)
            normalise(from, norm, width, model.epsilon, to);
        else
            std::memmove(to, from, width * sizeof(float));
        const long rotary = model.rotary_width;
        rotate(model.cosines + position * rotary, model.sines + position * rotary, rotary, to);
    }

    // Stores the new key and value of a row, and prepares its queries of one key head where they are.
    void place_row(const Layer &layer, long row, long head) const {
        const long width = model.head_width, position = positions[row];
        float *from = projected + row * model.projected();
        const long at = ((row * model.kv_heads + head) * rows.row_places + position - rows.prompt_lengths[row]) * width;
        const float *key = from + model.queries() + head * width;
        place_head(key, layer.key_norm, position, layer.row_keys + at);
        std::memcpy(layer.row_values + at, key + model.kv_heads * width, width * sizeof(float));
        for (long i = head * repeat(); i < (head + 1) * repeat(); i++)
            place_head(from + i * model.query_stride, layer.query_norm, position, from + i * model.query_stride);
    }

    // Attention of all heads of a layer; queries are read where they were projected.
    Attention attention(const Layer &layer) const {
        const Model &m = model;
        Attention call{m.heads, m.kv_heads, m.head_width, layer.window, m.query_stride, m.projected()};
        call.queries = projected, call.output = mixed, call.scale = layer.scale;
        return call;
    }

    // Attention of rows that share a prompt, in one key head.
    void attend(const Layer &layer, const int64_t *order, long count, long head, const Scratch &scratch) const {
        const long row_size = rows.row_places * model.head_width, prompt = rows.prompt_places * model.head_width;
        Span spans[QUERIES];
        for (long i = 0; i < count; i++) {
            const long row = order[i], length = rows.prompt_lengths[row];
            const long at = rows.groups[row] * model.kv_heads * prompt, row_at = row * model.kv_heads * row_size;
            place_row(layer, row, head);
            const float *keys = layer.row_keys + row_at, *values = layer.row_values + row_at;
            spans[i] = {row, 1, positions[row] - length, length, prompt, row_size, layer.prompt_keys + at,
                        layer.prompt_values + at, keys, values};
        }
        const Attention call = attention(layer);
        AttentionTile(call, {spans, count, 0, count}, head, scratch.tile).attend();
    }

    void attend_all(Worker &worker, const Layer &layer, const Scratch &scratch) const {
        const long across = model.projected(), queries = model.queries(), keys = model.keys();
        linear(worker, input, layer.query, model.is_half, scratch.tile, projected, across);
        linear(worker, input, layer.key, model.is_half, scratch.tile, projected + queries, across);
        linear(worker, input, layer.value, model.is_half, scratch.tile, projected + queries + keys, across);
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (long task = 0; task < rows.num_chunks * parts * model.kv_heads; task++) {
            const long part = task / model.kv_heads % parts;
            const int64_t *chunk = rows.chunks + task / model.kv_heads / parts;
            const long count = chunk[1] - chunk[0], first = count * part / parts, end = count * (part + 1) / parts;
            if (first < end) attend(layer, rows.order + chunk[0] + first, end - first, task % model.kv_heads, scratch);
        }
        const long width = model.head_width;
        if (model.query_stride > width)
#pragma omp for
            for (long task = 0; task < rows.count * model.heads; task++) {
                const long row = task / model.heads, head = task % model.heads;
                const float *gates = projected + row * across + head * model.query_stride + width;
                multiply_by_sigmoid(gates, width, mixed + task * width);
            }
        add_mixed(worker, model.heads * width, layer.output, scratch);
    }

    // hidden += the first `width` columns of `mixed` times the layer's weight.
    void add_mixed(Worker &worker, long width, const Linear &layer, const Scratch &scratch) const {
        const Columns columns{by_column.data, rows.count, width};
        put_side_by_side(columns, [&](long row) { return mixed + row * width; });
        add_linear(worker, columns, layer, model.is_half, scratch.tile, hidden);
#pragma omp barrier
    }

    // One head of a row in the gated delta rule: its state takes in the row's token, and its output goes to `mixed`.
    void step_head(const Recurrent &layer, long row, long head) const {
        const long key_width = model.key_width, width = model.value_width, task = row * model.value_heads + head;
        const float *from = projected + row * model.projected(), *gates = from + model.channels();
        const float *query = from + head / (model.value_heads / model.key_heads) * key_width;
        const float *key = query + model.key_heads * key_width;
        const float strength = 1.0f / (1.0f + std::exp(-gates[model.values() + head]));
        const float decay_input = gates[model.values() + model.value_heads + head] + layer.decay_bias[head];
        const float decay = std::exp(layer.decay_rates[head] * softplus(decay_input));
        float *output = mixed + task * width;
        const auto factor = [&](const float *vector) { return length_factor(vector, key_width, model.length_epsilon); };
        const float query_factor = factor(query) / std::sqrt(static_cast<float>(key_width));
        const float *value = from + 2 * model.key_heads * key_width + head * width;
        float *state = layer.states + task * key_width * width, key_factor = factor(key);
        Head{state, query, key, value, decay, &strength, output, key_width, width, query_factor, key_factor}.step();
        normalise(output, layer.norm, width, model.epsilon, output);
        gate_values(gates + head * width, output, width, output);
    }

    // One head of a row in Mamba-2, likewise, without its gate and norm.
    void step_mamba_head(const Recurrent &layer, long row, long head) const {
        const long key_width = model.key_width, width = model.value_width, task = row * model.value_heads + head;
        const float *from = projected + row * model.projected(), *value = from + head * width;
        const float *key = from + model.values() + head / (model.value_heads / model.key_heads) * key_width;
        const float *query = key + model.key_heads * key_width;
        const float step_input = from[model.channels() + model.values() + head] + layer.decay_bias[head];
        const float step = std::min(std::max(softplus(step_input), layer.shortest), layer.longest);
        const float decay = std::exp(layer.decay_rates[head] * step);
        float *output = mixed + task * width, *state = layer.states + task * key_width * width;
        for (long i = 0; i < width; i++) output[i] = value[i] * step;  // what the state takes in
        Head{state, query, key, output, decay, nullptr, output, key_width, width, 1.0f, 1.0f}.step();
        for (long i = 0; i < width; i++) output[i] += value[i] * layer.skips[head];
    }

    // The gates and norms of Mamba-2: a group of a row's values is gated, then normalised.
    void normalise_groups(const Recurrent &layer) const {
        const long groups = layer.norm_groups, width = model.values() / groups;
#pragma omp for
        for (long task = 0; task < rows.count * groups; task++) {
            const long row = task / groups, first = task % groups * width;
            float *values = mixed + row * model.values() + first;
            gate_values(projected + row * model.projected() + model.channels() + first, values, width, values);
            normalise(values, layer.norm + first, width, model.epsilon, values);
        }
    }

    // Called by all threads: calls `body(row, first, count)` for some channels of a row that are convolved together.
    template <class Body>
    void each_part(long channels, Body body) const {
        constexpr long PART = 512;
        const long parts = (channels + PART - 1) / PART;
#pragma omp for
        for (long task = 0; task < rows.count * parts; task++) {
            const long first = task % parts * PART;
            body(task / parts, first, std::min(PART, channels - first));
        }
    }

    // Convolves `count` of a row's channels in place.
    template <class Layer>
    void convolve_part(const Layer &layer, long channels, long row, long first, long count, float *values) const {
        float *last = layer.last_inputs + (row * channels + first) * (model.taps - 1);
        const float *bias = layer.convolution_bias ? layer.convolution_bias + first : nullptr;
        convolve(last, values, 1, layer.convolution + first * model.taps, bias, count, model.taps, values);
    }

    // A short convolution between two gates.
    void convolve_all(Worker &worker, const Convolution &layer, const Scratch &scratch) const {
        const long across = model.projected(), channels = model.convolved;
        linear(worker, input, layer.inputs, model.is_half, scratch.tile, projected, across);
#pragma omp barrier
        each_part(channels, [&](long row, long first, long count) {
            const float *before = projected + row * across + first, *behind = before + channels;
            float *values = projected + row * across + 2 * channels + first, *output = mixed + row * channels + first;
            for (long i = 0; i < count; i++) values[i] *= before[i];
            convolve_part(layer, channels, row, first, count, values);
            for (long i = 0; i < count; i++) output[i] = behind[i] * values[i];
        });
        add_mixed(worker, channels, layer.output, scratch);
    }

    // A layer of the gated delta rule or Mamba-2 (see `gated_delta_rule` and `mamba2_scan` in `recurrent_scans.py`).
    void recur_all(Worker &worker, const Recurrent &layer, const Scratch &scratch) const {
        const long across = model.projected(), channels = model.channels(), values = model.values();
        const bool is_delta = layer.strengths.weight != nullptr;
        float *gates = projected + channels, *strengths = gates + values;
        float *decays = is_delta ? strengths + model.value_heads : strengths;
        linear(worker, input, layer.inputs, model.is_half, scratch.tile, projected, across);
        linear(worker, input, layer.gates, model.is_half, scratch.tile, gates, across);
        if (is_delta) linear(worker, input, layer.strengths, model.is_half, scratch.tile, strengths, across);
        linear(worker, input, layer.decays, model.is_half, scratch.tile, decays, across);
#pragma omp barrier
        each_part(channels, [&](long row, long first, long count) {
            float *at = projected + row * across + first;
            convolve_part(layer, channels, row, first, count, at);
            silu(at, count);
        });
#pragma omp for
        for (long task = 0; task < rows.count * model.value_heads; task++) {
            const long row = task / model.value_heads, head = task % model.value_heads;
            is_delta ? step_head(layer, row, head) : step_mamba_head(layer, row, head);
        }
        if (!is_delta) normalise_groups(layer);
        add_mixed(worker, values, layer.output, scratch);
    }

    // hidden += what the layer's mixer makes of `input`.
    void mix(Worker &worker, const Layer &layer, const Scratch &scratch) const {
        if (layer.recurrent)
            recur_all(worker, *layer.recurrent, scratch);
        else if (layer.convolution)
            convolve_all(worker, *layer.convolution, scratch);
        else
            attend_all(worker, layer, scratch);
    }

    // inner = silu(gate) * up, or the squared ReLU of up. Products run panel by panel, so that only this is stored.
    void activate(Worker &worker, const Layer &layer, const Scratch &scratch) const {
        const long width = model.hidden;
        worker.go(input, [&](long start, long count, Prefetch &prefetch) {
            input.each_block([&](const Columns::Block &block) {
                const auto compute = [&](const Linear &linear, float *tile) {
                    weight(linear).multiply_with(block, start, count, width, tile, prefetch);
                    add_bias(linear.bias ? linear.bias + start : nullptr, count, block.rows, tile);
                };
                float *to = inner.data + block.first * inner.width + start * block.rows;
                if (layer.gate.weight) compute(layer.gate, scratch.tile);
                compute(layer.up, scratch.other);
                if (layer.gate.weight)
                    gate_values(scratch.tile, scratch.other, count * block.rows, to);
                else
                    square_positive(scratch.other, count * block.rows, to);
            });
        });
#pragma omp barrier
    }

    // Parts into which each chunk is cut, so that all threads have even shares. Each part reads the prompt again; that may
    // cost an eighth of reading what the rows have of their own.
    static long num_parts(const Model &model, const Rows &rows, const int64_t *positions, int threads) {
        long row_tokens = 0, prompts = 0;
        for (long row = 0; row < rows.count; row++) row_tokens += positions[row] + 1 - rows.prompt_lengths[row];
        for (long i = 0; i < rows.num_chunks; i++) prompts += rows.prompt_lengths[rows.order[rows.chunks[i]]];
        const long wanted = 8L * threads / (rows.num_chunks * model.kv_heads);
        const long allowed = 1 + row_tokens / (8 * std::max(1L, prompts));
        return threads == 1 ? 1 : std::clamp(wanted, 1L, std::min(allowed, rows.count));
    }

    static long num_products(const Model &model) { return model.num_layers * 7 + 1; }  // at most

    // Plans the products of a step in the order of `run`.
    static void plan_products(const Model &model, WorkPlan &plan, int threads) {
        const long hidden = model.hidden;
        const auto add = [&](const Linear &layer, long outputs, long width) {
            plan.add({layer.weight, model.is_half != 0}, {}, outputs, width, threads);
        };
        for (long index = 0; index < model.num_layers; index++) {
            const Layer &layer = model.layers[index];
            if (layer.recurrent) {
                const Recurrent &recurrent = *layer.recurrent;
                add(recurrent.inputs, model.channels(), hidden);
                add(recurrent.gates, model.values(), hidden);
                if (recurrent.strengths.weight) add(recurrent.strengths, model.value_heads, hidden);
                add(recurrent.decays, model.value_heads, hidden);
                add(recurrent.output, hidden, model.values());
            } else if (layer.convolution) {
                add(layer.convolution->inputs, 3 * model.convolved, hidden);
                add(layer.convolution->output, hidden, model.convolved);
            } else if (layer.attention_norm) {
                add(layer.query, model.queries(), hidden);
                add(layer.key, model.keys(), hidden);
                add(layer.value, model.keys(), hidden);
                add(layer.output, hidden, model.heads * model.head_width);
            }
            if (!layer.mlp_norm) continue;
            const bool is_gated = layer.gate.weight != nullptr;
            const Weight up{layer.up.weight, model.is_half != 0}, gate{layer.gate.weight, up.is_half};
            plan.add(is_gated ? gate : up, is_gated ? up : Weight{}, model.inner, hidden, threads);
            add(layer.down, hidden, model.inner);
        }
        add(model.head, model.vocabulary, hidden);
    }

    // Called by all threads: stores the embeddings of the tokens as columns.
    void embed() const {
        const long width = model.hidden;
        const float *all = static_cast<const float *>(model.embedding);
        if (model.is_half) {
#pragma omp for
            for (long row = 0; row < rows.count; row++) {
                const auto *from = static_cast<const uint16_t *>(model.embedding) + tokens[row] * width;
                widen(from, width, embedded + row * width);
            }
        }
        put_side_by_side(hidden, [&](long row) {
            return model.is_half ? embedded + row * width : all + tokens[row] * width;
        });
    }

    // Called by all threads.
    void run(WorkPlan &plan, const Scratch &scratch, float *logits) const {
        Worker worker(plan);
        embed();
        for (long index = 0; index < model.num_layers; index++) {
            const Layer &layer = model.layers[index];
            if (layer.attention_norm) {
                normalise_all(hidden, layer.attention_norm, model.epsilon, input);
                mix(worker, layer, scratch);
            }
            if (layer.mlp_norm) {
                normalise_all(hidden, layer.mlp_norm, model.epsilon, input);
                activate(worker, layer, scratch);
                add_linear(worker, inner, layer.down, model.is_half, scratch.tile, hidden);
#pragma omp barrier
            }
        }
        normalise_all(hidden, model.norm, model.epsilon, input);
        linear(worker, input, model.head, model.is_half, scratch.tile, logits, model.vocabulary);
    }
};

}  // namespace

extern "C" {

// Rows whose queries of one key head are computed together.
int64_t groupgrad_chunk_rows(int64_t repeat) { return most_rows(repeat); }

// Logits (n, vocabulary) that follow `tokens` (n) at `positions` (n), whose keys and values are stored. Returns 1
// without memory.
int groupgrad_decode(const Model *model, const Rows *rows, const int64_t *tokens, const int64_t *positions,
                     float *logits, int threads) {
    const long n = rows->count, across = model->projected(), mixed = model->mixed(), side = in_grains(n);
    const long each = Scratch::size({model->heads, model->kv_heads, model->head_width}, *rows);
    const long widened = model->is_half ? n * model->hidden : 0;
    long total = Memory::whole(n * across) + Memory::whole(n * mixed) + Memory::whole(widened);
    total += threads * Memory::whole(each);
    for (long width : {model->hidden, model->hidden, mixed, model->inner}) total += Memory::whole(side * width);
    Memory memory(total);
    const std::unique_ptr<Product[]> products(new (std::nothrow) Product[Step::num_products(*model)]);
    if (!memory.is_there() || !products) return 1;
    const auto columns = [&](long width) { return Columns{memory.take(side * width), n, width}; };
    const Columns hidden = columns(model->hidden), input = columns(model->hidden), by_column = columns(mixed);
    const Columns inner = columns(model->inner);
    float *projected = memory.take(n * across), *by_row = memory.take(n * mixed), *rows_of = memory.take(widened);
    float *scratch = memory.take(threads * Memory::whole(each));
    const long weights = model->num_layers * model->hidden * (across + mixed + 3 * model->inner);
    if (n * (weights + model->hidden * model->vocabulary) < SMALL) threads = 1;
    const long parts = Step::num_parts(*model, *rows, positions, threads);
    const Step step{*model, *rows, tokens, positions, projected, by_row, rows_of,
                    hidden, input, by_column, inner, parts};
    WorkPlan plan(products.get());
    Step::plan_products(*model, plan, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    step.run(plan, Scratch(scratch + omp_get_thread_num() * Memory::whole(each)), logits);
    return 0;
}
}
