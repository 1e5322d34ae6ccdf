// Scratch memory of a call.

#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "prefetch.h"

namespace {

// Uninitialised parts of one piece, each of which begins where a cache line does: a vector over two lines is read twice.
class Memory {
    static constexpr long LINE_FLOATS = LINE / 4;
    std::unique_ptr<float[]> all;
    float *next = nullptr;

public:
    // How much a part of so many takes.
    static long whole(long floats) { return (floats + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS; }

    // For parts that take so much together.
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
