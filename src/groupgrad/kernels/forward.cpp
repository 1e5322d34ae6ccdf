// Parts of a pass over many tokens, bit-exact with decode steps, and the gradients of norms and gates.

#include "attention_tile.h"
#include "layers.h"
#include "memory.h"

namespace {

constexpr int64_t PART = 4096;         // numbers of a gate that a thread takes at a time
constexpr long CHUNK_FLOATS = 1 << 18;  // of rows multiplied together, which stay in a cache for all weights

// Rows multiplied together.
long chunk_rows(long rows, long width) {
    const long most = std::max(MOST_ROWS, CHUNK_FLOATS / width / MOST_ROWS * MOST_ROWS);
    const long chunks = (rows + most - 1) / most, each = (rows + chunks - 1) / chunks;
    return std::min(most, (each + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS);
}

// Number of spans, from the first of `spans` on, that are computed together: one token each, behind the same prompt.
long num_joined(const Attention &call, const Span *spans, int64_t count) {
    const long most = std::min<long>(count, AttentionTile::most_tokens(call));
    long number = 0;
    for (; number < most; number++) {
        const Span &next = spans[number];
        if (next.length != 1 || !next.prompt_length || next.prompt_keys != spans->prompt_keys ||
            next.prompt_length != spans->prompt_length)
            break;
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

// output (rows, outputs) = input (rows, width) times weight (outputs, width), plus bias. The weight is bfloat16 with
// `is_half`, else float32. Returns 1 without memory.
int groupgrad_linear(const float *input, const void *weight, const float *bias, float *output, int64_t rows,
                     int64_t width, int64_t outputs, int is_half, int threads) {
    const long chunk = chunk_rows(rows, width), count = (rows + chunk - 1) / chunk;
    const std::unique_ptr<Product[]> products(new (std::nothrow) Product[count]);
    Memory memory(Memory::whole(in_grains(chunk) * width) + threads * Memory::whole(TILE));
    if (!memory.is_there() || !products) return 1;
    float *together = memory.take(in_grains(chunk) * width), *tiles = memory.take(threads * Memory::whole(TILE));
    if (rows * width * outputs < SMALL) threads = 1;
    WorkPlan plan(products.get());
    for (long i = 0; i < count; i++) plan.add({weight, is_half != 0}, {}, outputs, width, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Worker worker(plan);
        float *tile = tiles + omp_get_thread_num() * Memory::whole(TILE);
        for (long start = 0; start < rows; start += chunk) {
            const Columns columns{together, std::min(chunk, rows - start), width};
            put_side_by_side(columns, [&](long row) { return input + (start + row) * width; });
            linear(worker, columns, {weight, bias}, is_half, tile, output + start * outputs, outputs);
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

// output = activation(gates) * ups, of `count` numbers. The activation is silu or, with `is_gelu`, `TanhGelu`.
void groupgrad_gate(const float *gates, const float *ups, float *output, int64_t count, int is_gelu, int threads) {
    const auto compute = is_gelu ? gate_values<TanhGelu> : gate_values<Silu>;
#pragma omp parallel for num_threads(threads) if (count > SMALL_PART)
    for (int64_t start = 0; start < count; start += PART)
        compute(gates + start, ups + start, std::min(PART, count - start), output + start);
}

// What `gate_gradients` computes, of `count` numbers.
void groupgrad_gate_gradient(const float *gradient, const float *gates, const float *ups, float *of_gates, float *of_ups,
                             float *output, int64_t count, int is_gelu, int threads) {
    const auto compute = is_gelu ? gate_gradients<TanhGelu> : gate_gradients<Silu>;
#pragma omp parallel for num_threads(threads) if (count > SMALL_PART)
    for (int64_t start = 0; start < count; start += PART)
        compute(gradient + start, gates + start, ups + start, std::min(PART, count - start), of_gates + start,
                of_ups + start, output ? output + start : nullptr);
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
    const long most = AttentionTile::most_tokens(*call), each = Memory::whole(AttentionTile::scratch_size(*call, most));
    long all = 0, number = 0;
    for (int64_t i = 0; i < count; i += tiles[number++].num_joined) {
        const long together = num_joined(*call, spans + i, count - i);
        const long tokens = together > 1 ? together : most;
        const long tiles_of = together > 1 ? 1 : (spans[i].length + tokens - 1) / tokens;
        tiles[number] = {spans + i, together, tokens, tiles_of, all};
        all += tiles_of * call->kv_heads;
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
