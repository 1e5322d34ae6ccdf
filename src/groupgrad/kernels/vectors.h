// Vectors of floats, as wide as the registers of the target machine.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Floats per vector register, and number of registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr int MAX_SUMS = REGISTERS == 32 ? 24 : 12;  // registers for sums; the others hold the factors
constexpr int GRAIN = LANES == 4 ? 4 : 8;            // rows of a small vector

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // a Vec anywhere in memory
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef float Half __attribute__((vector_size(2 * LANES)));
typedef float Grain __attribute__((vector_size(4 * GRAIN)));
typedef int32_t GrainWhole __attribute__((vector_size(4 * GRAIN)));
typedef uint32_t GrainBits __attribute__((vector_size(4 * GRAIN)));

// A shuffle of two vectors; the second one's places follow the first's.
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, Whole{__VA_ARGS__})
#endif

#ifdef __clang__
#define PICK_GRAIN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK_GRAIN(a, b, ...) __builtin_shuffle(a, b, GrainWhole{__VA_ARGS__})
#endif

// Keeps a value in a register. Compilers would load it again for each multiplication, and loads are as scarce.
#if defined(__AVX512F__)
#define KEEP(value) asm("" : "+v"(value))
#elif defined(__x86_64__)
#define KEEP(value) asm("" : "+x"(value))
#else
#define KEEP(value)
#endif

// Rounds a product before it is added to something, so that the compiler does not fuse them.
#if defined(__aarch64__)
#define ROUND(value) asm("" : "+w"(value))
#else
#define ROUND(value) KEEP(value)
#endif

namespace {

inline Vec load(const float *from) { return *reinterpret_cast<const Loose *>(from); }
inline void store(float *to, Vec value) { *reinterpret_cast<Loose *>(to) = value; }

template <class V>
inline V load_as(const float *from) {
    V value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}
template <class V>
inline void store_as(float *to, V value) {
    std::memcpy(to, &value, sizeof(value));
}

// The first `count` numbers, then zeros. Memory behind them may be invalid or hold NaN.
inline Vec load_part(const float *from, long count) {
    Vec value = {};
    std::memcpy(&value, from, count * sizeof(float));
    return value;
}

inline Vec load_some(const float *from, long count) { return count >= LANES ? load(from) : load_part(from, count); }

inline void store_some(float *to, Vec value, long count) {
    if (count >= LANES)
        store(to, value);
    else
        std::memcpy(to, &value, count * sizeof(float));
}

// A bfloat16 number is the upper half of a float32 one.
inline float widened(uint16_t number) {
    const uint32_t bits = static_cast<uint32_t>(number) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
inline float widened(float number) { return number; }
inline void widen(const uint16_t *from, long count, float *to) {
    for (long i = 0; i < count; i++) to[i] = widened(from[i]);
}

inline long padded(long width) { return (width + LANES - 1) / LANES * LANES; }

// a * b + c, rounded once where the machine supports it.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// The same for each lane. GCC compiles the operators to a multiplication and an addition where few sums are in a loop.
#if defined(__AVX512F__)
inline Vec fused(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
#endif
#if defined(__FMA__)
inline Grain fused(Grain a, Grain b, Grain c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__aarch64__)
inline Grain fused(Grain a, Grain b, Grain c) { return vfmaq_f32(c, a, b); }
#else
inline Grain fused(Grain a, Grain b, Grain c) { return a * b + c; }
#endif

inline Vec splat(float value) { return value - Vec{}; }

// Swaps all[i][j] and all[j][i]. Each round interleaves the first half of all numbers with the second half.
inline void transpose(Grain *all) {
    for (int round = 1; round < GRAIN; round *= 2) {
        Grain next[GRAIN];
#pragma GCC unroll 4
        for (int i = 0; i < GRAIN / 2; i++) {
            const Grain a = all[i], b = all[GRAIN / 2 + i];
#if defined(__AVX__)
            next[2 * i] = PICK_GRAIN(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            next[2 * i + 1] = PICK_GRAIN(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
            next[2 * i] = PICK_GRAIN(a, b, 0, 4, 1, 5);
            next[2 * i + 1] = PICK_GRAIN(a, b, 2, 6, 3, 7);
#endif
        }
        std::memcpy(all, next, sizeof(next));
    }
}

// The sum of a vector's lanes, by halves.
inline float total(Vec value) {
    float numbers[LANES];
    std::memcpy(numbers, &value, sizeof(value));
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) numbers[i] += numbers[half + i];
    return numbers[0];
}

// The largest of a vector's lanes.
inline float largest(Vec value) {
    float numbers[LANES];
    std::memcpy(numbers, &value, sizeof(value));
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) numbers[i] = numbers[half + i] > numbers[i] ? numbers[half + i] : numbers[i];
    return numbers[0];
}

// e to the power of x within 2 units in the last place; 0 below the smallest normal number, NaN stays NaN.
inline Vec exponential(Vec x) {
    const Vec lowest = splat(-87.3f), highest = splat(88.0f);
    Vec y = x < lowest ? lowest : x;
    y = y > highest ? highest : y;
    const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers, in the lowest bits
    const Vec shifted = y * 1.44269504f + shift, power = shifted - shift;
    const Vec rest = (y - power * 0.693359375f) + power * 2.12194440e-4f;
    Vec sum = splat(1.0f / 5040);
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const Bits bits = (reinterpret_cast<Bits>(shifted) + 127u) << 23;  // of 2 to that power
    return x < lowest ? Vec{} : sum * reinterpret_cast<Vec>(bits);
}

// Adds halves of two vectors and packs the sums into one vector, each in the places of its source. `fold2` leaves two
// numbers of each source in every four, `fold1` one; the others fold four by four.
#if defined(__AVX512F__)
inline Vec fold8(Vec a, Vec b) {
    return PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
inline Vec fold4(Vec a, Vec b) {
    return PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
inline Vec fold2(Vec a, Vec b) {
    return PICK(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           PICK(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
inline Vec fold1(Vec a, Vec b) {
    return PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
// Four partial sums of each of the vectors v, 4 + v, 8 + v and 12 + v.
inline Vec quarters(const Vec *all, int v) {
    return fold4(fold8(all[v], all[4 + v]), fold8(all[8 + v], all[12 + v]));
}
// The lane sums of eight vectors.
inline Half half_totals(const Vec *all) {
    const Vec even = fold4(fold8(all[0], all[2]), fold8(all[4], all[6]));
    const Vec odd = fold4(fold8(all[1], all[3]), fold8(all[5], all[7]));
    const Vec both = fold2(even, odd);
    Half parts[2];
    const Vec sorted = PICK(both, both, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    std::memcpy(parts, &sorted, sizeof(sorted));
    return parts[0] + parts[1];
}
#elif defined(__AVX__)
inline Vec fold4(Vec a, Vec b) {
    return PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
inline Vec fold2(Vec a, Vec b) {
    return PICK(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + PICK(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
}
inline Vec fold1(Vec a, Vec b) {
    return PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
inline Vec quarters(const Vec *all, int v) { return fold4(all[v], all[4 + v]); }
#else
inline Vec fold2(Vec a, Vec b) { return PICK(a, b, 0, 4, 1, 5) + PICK(a, b, 2, 6, 3, 7); }
inline Vec fold1(Vec a, Vec b) { return PICK(a, b, 0, 1, 4, 5) + PICK(a, b, 2, 3, 6, 7); }
inline Vec quarters(const Vec *all, int v) { return all[v]; }
#endif

// The lane sums of LANES vectors.
inline Vec totals(const Vec *all) {
    return fold1(fold2(quarters(all, 0), quarters(all, 1)), fold2(quarters(all, 2), quarters(all, 3)));
}

}  // namespace
