// Prefetching of memory while other data is multiplied.

#pragma once

constexpr long LINE = 64;  // bytes of a cache line

namespace {

// Cache lines at up to two places. Each inner step of a product prefetches `each` of them, so that memory is read
// evenly and not in bursts.
struct Prefetch {
    const char *at = nullptr, *second = nullptr;
    long lines = 0, second_lines = 0;
    int each = 0;

    void add(const float *from, long floats) { add_bytes(reinterpret_cast<const char *>(from), floats * 4); }

    void add_bytes(const char *place, long bytes) {
        const long count = (bytes + LINE - 1) / LINE;
        if (lines)
            second = place, second_lines = count;
        else
            at = place, lines = count;
    }

    // Distribute the lines over so many inner steps.
    void distribute(long steps) {
        each = steps ? static_cast<int>((lines + second_lines + steps - 1) / steps) : 0;
    }

    // So many inner steps are done.
    void advance(long steps) {
        if (!each) return;
        at += steps * each * LINE, lines -= steps * each;
        if (lines > 0) return;
        at = second, lines = second_lines, second_lines = 0;
        if (lines <= 0) each = 0;
    }
};

}  // namespace
