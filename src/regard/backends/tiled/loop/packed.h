/* Narrow keys and values, laid out once for all row tiles of their head as AMX multiplies them: each
number beside the one that is added to its product (VNNI).

Keys lie in runs of c->keys, [B, G, runs, pairs of D, keys, 2], values in [B, G, pairs of keys, E, 2].
What fills up an odd width and the last run is 0. */

#pragma once

#include "call.h"

/* Sizes of products are rounded up to these: PyTorch keeps a kernel for each size it has met. */
#define ROWS 16
#define KEYS 64

typedef uint32_t pairs __attribute__((vector_size(16), aligned(2), may_alias));

static inline long up_to(long n, long step) { return (n + step - 1) / step * step; }

static inline long runs_of(const call *c) { return (c->K + c->keys - 1) / c->keys; }

/* Where a run begins in k_packed or v_compared, whose numbers are added up over `width`. */
static inline uint16_t *packed_run(const call *c, uint16_t *packed, long width, long b, long g,
                                   long run)
{
    return packed + ((b * c->G + g) * runs_of(c) + run) * up_to(width, 2) * c->keys;
}

/* Where an even key lies in v_packed or k_mixed. */
static inline uint16_t *packed_row(const call *c, uint16_t *packed, long width, long b, long g,
                                   long key)
{
    return packed + ((b * c->G + g) * runs_of(c) * c->keys + key) * width;
}

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLED
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (pairs){__VA_ARGS__})
#endif

/* Columns of pairs become rows of them. */
static inline void pack_keys(const uint16_t *from, long step, long n, long width, uint16_t *into,
                             long room)
{
    const long fours = width / 8 * 4;
    long j = 0;
    for (; j + 4 <= n; j += 4)
        for (long p = 0; p < fours; p += 4) {
            const uint16_t *here = from + j * step + 2 * p;
            pairs a = *(pairs *)here, b = *(pairs *)(here + step);
            pairs c = *(pairs *)(here + 2 * step), d = *(pairs *)(here + 3 * step);
            pairs low = SHUFFLED(a, b, 0, 4, 1, 5), high = SHUFFLED(a, b, 2, 6, 3, 7);
            pairs low2 = SHUFFLED(c, d, 0, 4, 1, 5), high2 = SHUFFLED(c, d, 2, 6, 3, 7);
            uint16_t *there = into + 2 * (p * room + j);
            *(pairs *)there = SHUFFLED(low, low2, 0, 1, 4, 5);
            *(pairs *)(there + 2 * room) = SHUFFLED(low, low2, 2, 3, 6, 7);
            *(pairs *)(there + 4 * room) = SHUFFLED(high, high2, 0, 1, 4, 5);
            *(pairs *)(there + 6 * room) = SHUFFLED(high, high2, 2, 3, 6, 7);
        }
    for (long d = 0; d < up_to(width, 2); d++)
        for (long key = d < 2 * fours ? j : 0; key < n; key++)
            into[(d / 2 * room + key) * 2 + d % 2] = d < width ? from[key * step + d] : 0;
    for (long p = 0; p < (width + 1) / 2; p++)
        memset(into + 2 * (p * room + n), 0, 2 * (room - n) * sizeof *into);
}

static inline void pack_values(const uint16_t *from, long step, long n, long width, uint16_t *into,
                               long room)
{
    for (long key = 0; key < n; key += 2) {
        const uint16_t *one = from + key * step, *other = one + step;
        uint16_t *there = into + key * width;
        if (key + 1 < n)
            for (long e = 0; e < width; e++) {
                uint32_t both = one[e] | (uint32_t)other[e] << 16;
                memcpy(there + 2 * e, &both, sizeof both);
            }
        else
            for (long e = 0; e < width; e++) {
                there[2 * e] = one[e];
                there[2 * e + 1] = 0;
            }
    }
    const long written = up_to(n, 2);
    memset(into + written * width, 0, (room - written) * width * sizeof *into);
}

static inline void pack_share(void *what)
{
    call *c = what;
    const long runs = runs_of(c), *k_step = c->k_half_steps, *v_step = c->v_half_steps;
    long i;
    while ((i = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < c->B * c->G * runs) {
        const long run = i % runs, g = i / runs % c->G, b = i / runs / c->G, key = run * c->keys;
        const long n = c->K - key < c->keys ? c->K - key : c->keys;
        const uint16_t *k = c->k_halves + b * k_step[0] + g * k_step[1] + key * k_step[2];
        const uint16_t *v = c->v_halves + b * v_step[0] + g * v_step[1] + key * v_step[2];
        pack_keys(k, k_step[2], n, c->D, packed_run(c, c->k_packed, c->D, b, g, run), c->keys);
        if (c->v_packed)
            pack_values(v, v_step[2], n, c->E, packed_row(c, c->v_packed, c->E, b, g, key), c->keys);
        if (c->k_mixed)
            pack_values(k, k_step[2], n, c->D, packed_row(c, c->k_mixed, c->D, b, g, key), c->keys);
        if (c->v_compared)
            pack_keys(v, v_step[2], n, c->E, packed_run(c, c->v_compared, c->E, b, g, run), c->keys);
    }
}

static inline void pack(call *c, int threads)
{
    if (!c->multiply_packed || !c->unpacked)
        return;
    const long pieces = c->B * c->G * runs_of(c);
    c->next = c->unpacked = 0;
    in_parallel(pack_share, c, pieces < threads ? pieces : threads, 0);
}
