// Memory that is asked for while something else is multiplied.

#pragma once

constexpr long LINE = 64;  // bytes that memory brings at a time

namespace {

// Cache lines at up to two places, `each` of them in an inner step, so that they come all the time and not in bursts.
struct Soon {
    const char *at = nullptr, *then = nullptr;
    long lines = 0, more = 0;
    int each = 0;

    void add(const float *from, long floats) {
        const char *place = reinterpret_cast<const char *>(from);
        const long count = (floats * 4 + LINE - 1) / LINE;
        if (lines)
            then = place, more = count;
        else
            at = place, lines = count;
    }

    // Over so many inner steps.
    void spread(long steps) { each = steps ? static_cast<int>((lines + more + steps - 1) / steps) : 0; }

    void passed(long steps) {
        if (!each) return;
        at += steps * each * LINE, lines -= steps * each;
        if (lines > 0) return;
        at = then, lines = more, more = 0;
        if (lines <= 0) each = 0;
    }
};

}  // namespace
