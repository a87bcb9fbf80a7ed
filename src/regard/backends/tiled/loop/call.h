/* Plain calls as a whole: which row tiles there are, and which keys each looks at. */

#pragma once

#include "tile.h"

/* PyTorch's own matrix product (sgemm), which reads matrices column by column. Whether it counts in
32 or 64 bits: on little-endian machines both read the same from a long. */
typedef void product(const char *, const char *, const long *, const long *, const long *,
                     const float *, const float *, const long *, const float *, const long *,
                     const float *, float *, const long *);

/* The same of bfloat16 numbers, added up in float. */
typedef void half_product(const char *, const char *, const long *, const long *, const long *,
                          const float *, const uint16_t *, const long *, const uint16_t *,
                          const long *, const float *, float *, const long *);

typedef struct {
    long start, stop, first_cut, last_cut;
} row_tile;

typedef struct {
    long start, stop, first_part, last_part;
} cut;

typedef struct {
    long start, stop; /* keys, counted from the cut's first */
    const uint8_t *hidden;
    long strides[4];
} part;

typedef struct {
    product *multiply;
    const float *q, *k, *v;                  /* [B, G R, Q, D], [B, G, K, D], [B, G, K, E] */
    long q_steps[3], k_steps[3], v_steps[3]; /* strides, all but the last, which is 1 */
    half_product *multiply_halves;           /* or absent; then so are the next */
    const uint16_t *q_halves, *k_halves, *v_halves; /* the same in bfloat16, as they came */
    long q_half_steps[3], k_half_steps[3], v_half_steps[3];
    long rows_step;                          /* rows [.., G R, Q] from one batch entry to the next */
    long B, G, R, Q, K, D, E;
    long stacked;   /* whether a row tile holds the same queries of all R heads of a group */
    long low, high; /* without tables: key - query lies between these */
    long rows, keys;
    long first_tile, last_tile;
    const row_tile *tiles; /* tables of a mask that is no band; or absent */
    const cut *cuts;
    const part *parts;
    float *scratch; /* for each thread */
    long scratch_step;
    float scale;
    long next;   /* the first piece of work that nobody has taken */
    long harmed; /* whether a row that may not see everything holds NaN or infinity */
} call;

/* The rows of a tile: query `start + j % span` of head `h + j / span` for each j below n. */
typedef struct {
    long b, h, g, start, span, n;
    const row_tile *table;
} rows_at;

static inline rows_at rows_of(const call *c, long b, long h, long index)
{
    rows_at r = {b, h, h / c->R, index * c->rows, 0, 0, NULL};
    long stop = r.start + c->rows < c->Q ? r.start + c->rows : c->Q;
    if (c->tiles) {
        r.table = c->tiles + index - c->first_tile;
        r.start = r.table->start;
        stop = r.table->stop;
    }
    r.span = stop - r.start;
    r.n = c->stacked ? r.span * c->R : r.span;
    return r;
}

/* Where rows lie in [B, G R, Q]; those of stacked heads follow each other. */
static inline long place_of(const call *c, const rows_at *r)
{
    return r->b * c->rows_step + r->h * c->Q + r->start;
}

/* Rows of [B, G R, Q, width] side by side, times a factor. */
static inline void gather(const rows_at *r, const float *from, const long steps[3], long width,
                          float factor, float *into)
{
    for (long j = 0; j < r->n; j++) {
        const float *row = from + r->b * steps[0] + (r->h + j / r->span) * steps[1] +
                           (r->start + j % r->span) * steps[2];
        for (long d = 0; d < width; d++)
            into[j * width + d] = row[d] * factor;
    }
}

/* The same of bfloat16 numbers, as they are. */
static inline void gather_halves(const rows_at *r, const uint16_t *from, const long steps[3],
                                 long width, uint16_t *into)
{
    for (long j = 0; j < r->n; j++)
        memcpy(into + j * width,
               from + r->b * steps[0] + (r->h + j / r->span) * steps[1] +
                   (r->start + j % r->span) * steps[2],
               width * sizeof *into);
}

/* The keys of the cut number i of some rows; false when there are no more. */
static inline int find_cut(const call *c, const rows_at *r, long i, cut *found)
{
    if (r->table) {
        if (r->table->first_cut + i >= r->table->last_cut)
            return 0;
        *found = c->cuts[r->table->first_cut + i];
        return 1;
    }
    long start = r->start + c->low, stop = r->start + r->span + c->high;
    start = (start > 0 ? start : 0) + i * c->keys;
    stop = stop < c->K ? stop : c->K;
    if (start >= stop)
        return 0;
    *found = (cut){start, start + c->keys < stop ? start + c->keys : stop, 0, 0};
    return 1;
}

/* Scaled before the product, as in every other pass: large logits must round alike in all. (Scaled
bfloat16 numbers would be rounded; both passes have the same product of those.) */
static inline void logits_of(const call *c, const rows_at *r, const cut *x, const void *q, float *s)
{
    const float one = 1, none = 0;
    const long keys = x->stop - x->start, k_step = c->k_steps[2];
    if (c->multiply_halves) {
        const long *step = c->k_half_steps;
        c->multiply_halves("T", "N", &keys, &r->n, &c->D, &c->scale,
                           c->k_halves + r->b * step[0] + r->g * step[1] + x->start * step[2],
                           step + 2, q, &c->D, &none, s, &keys);
        return;
    }
    const float *k = c->k + r->b * c->k_steps[0] + r->g * c->k_steps[1] + x->start * k_step;
    c->multiply("T", "N", &keys, &r->n, &c->D, &one, k, &k_step, q, &c->D, &none, s, &keys);
}

/* Write over the pairs of a cut that are hidden; whether there are any. */
static inline int hide_pairs(const call *c, const rows_at *r, const cut *x, float *s)
{
    const long keys = x->stop - x->start;
    if (r->table) {
        for (const part *p = c->parts + x->first_part; p < c->parts + x->last_part; p++)
            for (long j = 0; j < r->n; j++)
                hide(s + j * keys + p->start,
                     p->hidden + r->b * p->strides[0] + r->g * p->strides[1] +
                         (r->h % c->R + j / r->span) * p->strides[2] + j % r->span * p->strides[3],
                     p->stop - p->start, -INFINITY);
        return x->first_part < x->last_part;
    }
    if (r->start + r->span - 1 + c->low <= x->start && r->start + c->high + 1 >= x->stop)
        return 0;
    for (long j = 0; j < r->n; j++) {
        long query = r->start + j % r->span, first = query + c->low - x->start;
        long last = query + c->high + 1 - x->start;
        first = first < keys ? first : keys;
        for (long k = 0; k < first; k++)
            s[j * keys + k] = -INFINITY;
        for (long k = last > 0 ? last : 0; k < keys; k++)
            s[j * keys + k] = -INFINITY;
    }
    return 1;
}
