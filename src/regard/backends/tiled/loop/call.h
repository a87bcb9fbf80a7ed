/* Plain calls as a whole: which row tiles there are, and which keys each looks at. */

#pragma once

#include <stdbool.h>

#include "tile.h"

/* PyTorch's own matrix product (sgemm), which reads matrices column by column. Whether it counts in
32 or 64 bits: on little-endian machines both read the same from a long. */
typedef void product(const char *, const char *, const long *, const long *, const long *,
                     const float *, const float *, const long *, const float *, const long *,
                     const float *, float *, const long *);

/* The same of bfloat16 or float16 numbers, added up in float. */
typedef void half_product(const char *, const char *, const long *, const long *, const long *,
                          const float *, const uint16_t *, const long *, const uint16_t *,
                          const long *, const float *, float *, const long *);

/* The same of matrices side by side in rows, the second one packed (see packed.h): rows, columns and
what is added up, three strides, whether to add to what is there, the matrices, and true. */
typedef void packed_product(long, long, long, long, long, long, bool, const uint16_t *,
                            const uint16_t *, float *, bool);

#define BATCH 16   /* narrow numbers that are copied at once */
#define ALIGNED 16 /* keys of which packed products begin with the first */

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
    long type;                               /* of the next: what narrow numbers are multiplied */
    half_product *multiply_halves;           /* either one or none of these two */
    packed_product *multiply_packed;
    void (*release)(bool); /* what a thread calls when it has made its last packed product */
    const uint16_t *q_halves, *k_halves, *v_halves; /* as they came */
    long q_half_steps[3], k_half_steps[3], v_half_steps[3];
    /* Memory for them: both as keys are packed, both as values are. Only the first is always there. */
    uint16_t *k_packed, *v_packed, *k_mixed, *v_compared;
    long unpacked;    /* whether that is still to be written */
    long whole_heads; /* whether each thread takes all rows of a key head, and has such memory of its
                         own, for one head */
    long rows_step;                /* rows [.., G R, Q] from one batch entry to the next */
    long B, G, R, Q, K, D, E;
    long stacked;   /* whether a row tile holds the same queries of all R heads of a group */
    long low, high; /* without tables: key - query lies between these */
    long rows, keys;
    long first_tile, last_tile;
    const float *bias;  /* added to the logit of [B, G R, Q, K], by strides; or absent */
    long bias_steps[4]; /* any of them may be 0, or negative */
    const row_tile *tiles; /* tables of a mask that is no band; or absent */
    const cut *cuts;
    const part *parts;
    float *scratch; /* for each thread */
    long scratch_step;
    float scale, cap; /* of logits; what bounds them softly, or 0 */
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
    const float *head = from + r->b * steps[0] + r->h * steps[1] + r->start * steps[2];
    for (long j = 0; j < r->n; j += r->span, head += steps[1])
        for (long i = 0; i < r->span; i++)
            for (long d = 0; d < width; d++)
                into[(j + i) * width + d] = head[i * steps[2] + d] * factor;
}

/* The same of narrow numbers, as they are; rows have room for `stride` of them. */
static inline void gather_halves(const rows_at *r, const uint16_t *from, const long steps[3],
                                 long width, long stride, uint16_t *into)
{
    const uint16_t *head = from + r->b * steps[0] + r->h * steps[1] + r->start * steps[2];
    for (long j = 0; j < r->n; j += r->span, head += steps[1])
        for (long i = 0; i < r->span; i++) {
            const uint16_t *row = head + i * steps[2];
            long d = 0;
            /* Of a size that is known here, so that no function is called. */
            for (; d + BATCH <= width; d += BATCH)
                memcpy(into + d, row + d, BATCH * sizeof *into);
            for (; d < width; d++)
                into[d] = row[d];
            for (; d < stride; d++)
                into[d] = 0;
            into += stride;
        }
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
    start = start > 0 ? start : 0;
    stop = stop < c->K ? stop : c->K;
    long end = start + (i + 1) * c->keys;
    if (c->multiply_packed) {
        /* Keys were packed in runs, beginning with the first one. */
        start -= start % ALIGNED;
        end = (start / c->keys + i + 1) * c->keys;
    }
    start = i ? end - c->keys : start;
    if (start >= stop)
        return 0;
    *found = (cut){start, end < stop ? end : stop, 0, 0};
    return 1;
}

/* Whether more is done to logits than to scale them. */
static inline bool has_more(const call *c) { return c->cap != 0 || c->bias; }

/* Soft-cap and bias of the logits of a cut, in this order. Rows lie `stride` apart, and so do those of
the soft-cap's slopes, which may be absent. */
static inline void bound_and_bias(const call *c, const rows_at *r, const cut *x, float *s, long stride,
                                  float *slopes)
{
    const long keys = x->stop - x->start, *step = c->bias_steps;
    for (long j = 0; j < r->n; j++) {
        float *row = s + j * stride;
        if (c->cap != 0)
            bound(row, slopes ? slopes + j * stride : NULL, keys, c->cap);
        if (!c->bias)
            continue;
        const float *bias = c->bias + r->b * step[0] + (r->h + j / r->span) * step[1] +
                            (r->start + j % r->span) * step[2] + x->start * step[3];
        if (step[3] == 1)
            for (long k = 0; k < keys; k++)
                row[k] += bias[k];
        else
            for (long k = 0; k < keys; k++)
                row[k] += bias[k * step[3]];
    }
}

/* Write over the pairs of a cut that are hidden; whether there are any. Rows lie `stride` apart. */
static inline int hide_pairs(const call *c, const rows_at *r, const cut *x, float *s, long stride)
{
    const long keys = x->stop - x->start;
    if (r->table) {
        for (const part *p = c->parts + x->first_part; p < c->parts + x->last_part; p++)
            for (long j = 0; j < r->n; j++)
                hide(s + j * stride + p->start,
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
            s[j * stride + k] = -INFINITY;
        for (long k = last > 0 ? last : 0; k < keys; k++)
            s[j * stride + k] = -INFINITY;
    }
    return 1;
}
