// Values of tokens wherever they lie, and the matrices that a thread copies them to.

#pragma once

#include "matrices.h"

extern "C" {

// Values (tokens, heads, width) wherever they are. `delta_rule.py` mirrors these structures.
struct StridedTensor {
    float *data;
    int64_t token, head, channel;  // strides
};
}

namespace {

// Copies tokens from `start` on of a head to rows of `to`.
void read(const StridedTensor &from, long start, long head, long tokens, long width, const Matrix &to) {
    const float *data = from.data + start * from.token + head * from.head;
    if (from.token == 1) {
        const Matrix across{const_cast<float *>(data), from.channel};
        return transpose(across, width, tokens, to);
    }
    for (long i = 0; i < tokens; i++)
        for (long d = 0; d < width; d++) to.row(i)[d] = data[i * from.token + d * from.channel];
}

// Copies rows of `from` to tokens of a head.
void write(const Matrix &from, long start, long head, long tokens, long width, const StridedTensor &to) {
    float *data = to.data + start * to.token + head * to.head;
    if (to.token == 1) return transpose(from, tokens, width, Matrix{data, to.channel});
    for (long i = 0; i < tokens; i++)
        for (long d = 0; d < width; d++) data[i * to.token + d * to.channel] = from.row(i)[d];
}

inline float dot(const float *a, const float *b, long count) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

// Scratch memory of a thread; its rows have space for whole vectors, which stays zero behind a width.
class Scratch {
    float *next;

public:
    explicit Scratch(float *memory) : next(memory) {}

    Matrix take(long rows, long width) {
        const Matrix matrix{next, stride_of(width)};
        next += rows * matrix.stride;
        return matrix;
    }
    static long size(long rows, long width) { return rows * stride_of(width); }
};

}  // namespace
