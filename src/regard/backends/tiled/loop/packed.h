/* Narrow keys and values, laid out once for all row tiles of their head as AMX multiplies them: each
number beside the one that is added to its product (VNNI).

Keys lie in runs of c->keys, [B, G, runs, pairs of D, keys, 2], values in [B, G, pairs of keys, E, 2].
What fills up an odd width and the last run is 0. */

#pragma once

#include "call.h"

/* Sizes of products are rounded up to these: PyTorch keeps a kernel for each size it has met. */
#define ROWS 16
#define KEYS 64

#define BLOCK 16 /* keys, and pairs of numbers, that are turned at once: a line of the cache each */
typedef uint32_t pairs __attribute__((vector_size(4 * BLOCK), aligned(2), may_alias));
typedef uint16_t singles __attribute__((vector_size(4 * BLOCK), aligned(2), may_alias));

static inline long up_to(long n, long step) { return (n + step - 1) / step * step; }

static inline long runs_of(const call *c) { return (c->K + c->keys - 1) / c->keys; }

/* Which of the packed heads one is. */
static inline long packed_head(const call *c, long b, long g)
{
    return c->whole_heads ? 0 : b * c->G + g;
}

/* Where a run begins in k_packed or v_compared, whose numbers are added up over `width`. */
static inline uint16_t *packed_run(const call *c, uint16_t *packed, long width, long b, long g,
                                   long run)
{
    return packed + (packed_head(c, b, g) * runs_of(c) + run) * up_to(width, 2) * c->keys;
}

/* Where an even key lies in v_packed or k_mixed. */
static inline uint16_t *packed_row(const call *c, uint16_t *packed, long width, long b, long g,
                                   long key)
{
    return packed + (packed_head(c, b, g) * runs_of(c) * c->keys + key) * width;
}

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLED(kind, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLED
#define SHUFFLED(kind, a, b, ...) __builtin_shuffle(a, b, (kind){__VA_ARGS__})
#endif

/* Rows i and i + step of a block change places in half of their columns. Four such rounds turn it. */
#define SWAPPED(rows, step, LOW, HIGH)                                                             \
    for (int i = 0; i < BLOCK; i++)                                                                \
        if (!(i & step)) {                                                                         \
            const pairs one = rows[i], other = rows[i + step];                                     \
            rows[i] = SHUFFLED(pairs, one, other, LOW);                                            \
            rows[i + step] = SHUFFLED(pairs, one, other, HIGH);                                    \
        }
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31

/* Columns of pairs become rows of them. There is room for a multiple of BLOCK keys. */
static inline void pack_keys(const uint16_t *from, long step, long n, long width, uint16_t *into,
                             long room)
{
    const long all = (width + 1) / 2, filled = up_to(n, BLOCK);
    for (long j = 0; j < n; j += BLOCK)
        for (long next = 0; next < all; next += BLOCK) {
            /* The last block of an even width overlaps the one before. */
            const long p = next + BLOCK > all && width % 2 == 0 && all > BLOCK ? all - BLOCK : next;
            const uint16_t *here = from + j * step + 2 * p;
            const long keys = n - j, left = width - 2 * p;
            pairs rows[BLOCK];
            for (int i = 0; i < BLOCK; i++)
                if (i < keys && left >= 2 * BLOCK)
                    rows[i] = *(pairs *)(here + i * step);
                else {
                    rows[i] = (pairs){0};
                    if (i < keys)
                        memcpy(&rows[i], here + i * step, left * sizeof *from);
                }
            SWAPPED(rows, 1, LOW1, HIGH1)
            SWAPPED(rows, 2, LOW2, HIGH2)
            SWAPPED(rows, 4, LOW4, HIGH4)
            SWAPPED(rows, 8, LOW8, HIGH8)
            for (int i = 0; i < BLOCK && p + i < all; i++)
                *(pairs *)(into + 2 * ((p + i) * room + j)) = rows[i];
        }
    for (long p = 0; p < all; p++)
        memset(into + 2 * (p * room + filled), 0, 2 * (room - filled) * sizeof *into);
}

#define LOW_ROWS                                                                                   \
    0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44,  \
        13, 45, 14, 46, 15, 47
#define HIGH_ROWS                                                                                  \
    16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27,    \
        59, 28, 60, 29, 61, 30, 62, 31, 63

static inline void pack_values(const uint16_t *from, long step, long n, long width, uint16_t *into,
                               long room)
{
    for (long key = 0; key < n; key += 2) {
        const uint16_t *one = from + key * step, *other = one + step;
        uint16_t *there = into + key * width;
        long e = 0;
        if (key + 1 < n) {
            for (; e + 2 * BLOCK <= width; e += 2 * BLOCK) {
                const singles a = *(singles *)(one + e), b = *(singles *)(other + e);
                *(singles *)(there + 2 * e) = SHUFFLED(singles, a, b, LOW_ROWS);
                *(singles *)(there + 2 * e + 2 * BLOCK) = SHUFFLED(singles, a, b, HIGH_ROWS);
            }
            for (; e < width; e++) {
                uint32_t both = one[e] | (uint32_t)other[e] << 16;
                memcpy(there + 2 * e, &both, sizeof both);
            }
        } else
            for (; e < width; e++) {
                there[2 * e] = one[e];
                there[2 * e + 1] = 0;
            }
    }
    const long written = up_to(n, 2);
    memset(into + written * width, 0, (room - written) * width * sizeof *into);
}

/* Run number i of all batch entries and key heads. */
static inline void pack_run(const call *c, long i)
{
    const long runs = runs_of(c), *k_step = c->k_half_steps, *v_step = c->v_half_steps;
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

static inline void pack_share(void *what)
{
    call *c = what;
    long i;
    while ((i = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < c->B * c->G * runs_of(c))
        pack_run(c, i);
}

static inline void pack(call *c, int threads)
{
    if (!c->multiply_packed || !c->unpacked)
        return;
    const long pieces = c->B * c->G * runs_of(c);
    c->next = c->unpacked = 0;
    in_parallel(pack_share, c, pieces < threads ? pieces : threads, 0);
}
