// Scratch memory of one call.

#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "prefetch.h"

namespace {

// One uninitialised allocation in parts aligned to cache lines, because a vector across two lines is read twice.
class Memory {
    static constexpr long LINE_FLOATS = LINE / 4;
    std::unique_ptr<float[]> all;
    float *next = nullptr;

public:
    // Floats that a part takes, alignment included.
    static long whole(long floats) { return (floats + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS; }

    // Memory for parts that take `floats` together.
    explicit Memory(long floats) : all(new (std::nothrow) float[floats + LINE_FLOATS]) {
        if (all) next = all.get() + (-reinterpret_cast<uintptr_t>(all.get()) / 4) % LINE_FLOATS;
    }

    bool is_there() const { return next != nullptr; }

    float *take(long floats) {
        next += whole(floats);
        return next - whole(floats);
    }
};

}  // namespace
