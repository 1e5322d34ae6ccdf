// Products of small float32 matrices in scratch memory. Each number is summed in order, whatever the other rows.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "prefetch.h"
#include "vectors.h"

namespace {

constexpr int TILE_ROWS = REGISTERS == 32 ? 12 : 6;  // with two vectors of columns, whose sums are in registers
constexpr long SOLVED = 8;                           // rows of a triangular system that are solved one by one

// Numbers between two rows: whole vectors, and an odd number of cache lines, so that rows lie in different sets.
constexpr long stride_of(long width) {
    constexpr long LINE_FLOATS = LINE / 4;
    const long lines = (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    return ((lines + LINE_FLOATS - 1) / LINE_FLOATS | 1) * LINE_FLOATS;
}

struct Matrix {
    float *data;
    long stride;

    float *row(long i) const { return data + i * stride; }
    Matrix from(long i) const { return {row(i), stride}; }
    void clear(long rows) const { std::fill(data, data + rows * stride, 0.0f); }

    void scale(long rows, long width, float factor) const {
        for (long i = 0; i < rows; i++)
            for (long d = 0; d < width; d++) row(i)[d] *= factor;
    }
    void scale_rows(long rows, long width, const float *factors) const {
        for (long i = 0; i < rows; i++)
            for (long d = 0; d < width; d++) row(i)[d] *= factors[i];
    }
};

// to (columns, rows) = the transpose of `from` (rows, columns).
void transpose(const Matrix &from, long rows, long columns, const Matrix &to) {
    long i = 0;
    for (; i + GRAIN <= rows; i += GRAIN) {
        long j = 0;
        for (; j + GRAIN <= columns; j += GRAIN) {
            Grain all[GRAIN];
            for (int n = 0; n < GRAIN; n++) all[n] = load_as<Grain>(from.row(i + n) + j);
            transpose(all);
            for (int n = 0; n < GRAIN; n++) store_as(to.row(j + n) + i, all[n]);
        }
        for (; j < columns; j++)
            for (long n = i; n < i + GRAIN; n++) to.row(j)[n] = from.row(n)[j];
    }
    for (; i < rows; i++)
        for (long j = 0; j < columns; j++) to.row(j)[i] = from.row(i)[j];
}

// The left factor of a product, a matrix or its transpose.
struct Factor {
    const float *data;
    long row, column;  // strides
};

inline Factor rows_of(const Matrix &matrix) { return {matrix.data, matrix.stride, 1}; }
inline Factor columns_of(const Matrix &matrix) { return {matrix.data, 1, matrix.stride}; }

enum class Into { SET, ADD, SUBTRACT };

// Triangles that are known to be zero in the left factor, or unused in the result.
enum Triangle { FULL, LOWER, UPPER, RESULT_LOWER };

template <int ROWS, int VECTORS>
inline void multiply_tile(const Factor &left, const float *right, long stride, long inner, const Matrix &result,
                          Into into) {
    Vec sums[ROWS][VECTORS] = {};
    for (long k = 0; k < inner; k++) {
        Vec values[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) values[v] = load(right + k * stride + v * LANES);
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; m++) {
            const float factor = left.data[m * left.row + k * left.column];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sums[m][v] += factor * values[v];
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            float *to = result.row(m) + v * LANES;
            const Vec before = into == Into::SET ? Vec{} : load(to);
            store(to, into == Into::SUBTRACT ? before - sums[m][v] : before + sums[m][v]);
        }
}

template <int VECTORS>
inline void multiply_tiles(long rows, const Factor &left, const float *right, long stride, long inner,
                           const Matrix &result, Into into) {
    Factor rest = left;
    Matrix to = result;
    const auto go = [&](auto tile, int step) {
        tile(rest, right, stride, inner, to, into);
        rest.data += step * rest.row, to.data += step * to.stride, rows -= step;
    };
    while (rows >= TILE_ROWS) go(multiply_tile<TILE_ROWS, VECTORS>, TILE_ROWS);
    if (TILE_ROWS > 8 && rows >= 8) go(multiply_tile<8, VECTORS>, 8);
    if (rows >= 4) go(multiply_tile<4, VECTORS>, 4);
    if (rows >= 2) go(multiply_tile<2, VECTORS>, 2);
    if (rows >= 1) go(multiply_tile<1, VECTORS>, 1);
}

// result (rows, columns) = left (rows, inner) times right (inner, columns), by whole vectors of columns.
template <Triangle SHAPE>
void multiply(const Factor &left, const Matrix &right, long rows, long columns, long inner, const Matrix &result,
              Into into = Into::SET) {
    const auto some = [&](long first, long count, long column, auto tiles) {
        const long from = SHAPE == UPPER ? first : 0, end = SHAPE == LOWER ? std::min(inner, first + count) : inner;
        if (SHAPE == RESULT_LOWER && column >= first + count) return;
        const Factor part{left.data + first * left.row + from * left.column, left.row, left.column};
        const Matrix to{result.row(first) + column, result.stride};
        tiles(count, part, right.row(from) + column, right.stride, end - from, to, into);
    };
    const long step = SHAPE == FULL ? rows : TILE_ROWS;
    for (long column = 0; column < columns; column += 2 * LANES)
        for (long first = 0; first < rows; first += step) {
            const long count = std::min(step, rows - first);
            if (column + LANES < columns)
                some(first, count, column, multiply_tiles<2>);
            else
                some(first, count, column, multiply_tiles<1>);
        }
}

}  // namespace
