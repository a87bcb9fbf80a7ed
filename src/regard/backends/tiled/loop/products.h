/* The products of a row tile, in whichever way the call has for them. */

#pragma once

#include "packed.h"

/* What a tile has room for: rows, and keys in a row. */
static inline long rows_room(const call *c)
{
    return c->multiply_packed ? up_to(c->rows, ROWS) : c->rows;
}

static inline long keys_room(const call *c)
{
    return c->multiply_packed ? c->keys + KEYS : c->keys;
}

/* How many numbers lie in a row of the logits of a cut, those that fill it up included. */
static inline long stride_of(const call *c, const cut *x)
{
    if (!c->multiply_packed)
        return x->stop - x->start;
    const long run = (x->stop - 1) / c->keys * c->keys, first = x->start > run ? x->start : run;
    const long stop = first + up_to(x->stop - first, KEYS), end = run + c->keys;
    return (stop < end ? stop : end) - x->start;
}

/* Narrow queries of a tile, with zeros where its products reach beyond them. */
static inline void gather_narrow(const call *c, const rows_at *r, uint16_t *q)
{
    const long width = c->multiply_packed ? up_to(c->D, 2) : c->D;
    gather_halves(r, c->q_halves, c->q_half_steps, c->D, width, q);
    if (c->multiply_packed)
        memset(q + r->n * width, 0, (up_to(r->n, ROWS) - r->n) * width * sizeof *q);
}

/* Rows of narrow numbers times the keys of a cut, or whatever is packed as they are. */
static inline void compare(const call *c, const rows_at *r, const cut *x, const uint16_t *rows,
                           long width, uint16_t *packed, float *s)
{
    const long stride = stride_of(c, x), stop = x->start + stride, even = up_to(width, 2);
    for (long key = x->start, next; key < stop; key = next) {
        const long run = key / c->keys;
        next = (run + 1) * c->keys < stop ? (run + 1) * c->keys : stop;
        c->multiply_packed(up_to(r->n, ROWS), next - key, even, even, c->keys, stride, false, rows,
                           packed_run(c, packed, width, r->b, r->g, run) + 2 * (key % c->keys),
                           s + key - x->start, true);
    }
}

/* Whether logits of packed products are scaled when they are next read: of two logits the larger one
stays the larger one, and what is hidden stays so. Not where more is done to scaled logits. */
static inline bool scaled_later(const call *c)
{
    return c->multiply_packed && c->scale > 0 && !has_more(c);
}

/* Logits of a cut. Floats are scaled before the product, as in every other pass: large logits must
round alike in all. Scaled narrow numbers would be rounded; those are scaled after it, here or, if
`later`, by the caller. */
static inline void logits_of(const call *c, const rows_at *r, const cut *x, const void *q, float *s,
                             bool later)
{
    const float one = 1, none = 0;
    const long keys = x->stop - x->start, k_step = c->k_steps[2];
    if (c->multiply_packed) {
        compare(c, r, x, q, c->D, c->k_packed, s);
        if (!later)
            for (long i = 0; i < r->n * stride_of(c, x); i++)
                s[i] *= c->scale;
    } else if (c->multiply_halves) {
        const long *step = c->k_half_steps;
        c->multiply_halves("T", "N", &keys, &r->n, &c->D, &c->scale,
                           c->k_halves + r->b * step[0] + r->g * step[1] + x->start * step[2],
                           step + 2, q, &c->D, &none, s, &keys);
    } else {
        const float *k = c->k + r->b * c->k_steps[0] + r->g * c->k_steps[1] + x->start * k_step;
        c->multiply("T", "N", &keys, &r->n, &c->D, &one, k, &k_step, q, &c->D, &none, s, &keys);
    }
}

/* Narrow weights of a cut times its values, or whatever is packed as they are. */
static inline void mix_packed(const call *c, const rows_at *r, const cut *x, uint16_t *weights,
                              long width, uint16_t *packed, bool add, float *mixed)
{
    const long stride = stride_of(c, x), rows = up_to(r->n, ROWS);
    memset(weights + r->n * stride, 0, (rows - r->n) * stride * sizeof *weights);
    c->multiply_packed(rows, width, stride, stride, width, width, add, weights,
                       packed_row(c, packed, width, r->b, r->g, x->start), mixed, true);
}

/* Weights times values, added to what is mixed already or not. */
static inline void mix(const call *c, const rows_at *r, const cut *x, void *weights, bool add,
                       float *mixed)
{
    const float one = 1, before = add;
    const long keys = x->stop - x->start;
    if (c->multiply_packed) {
        mix_packed(c, r, x, weights, c->E, c->v_packed, add, mixed);
    } else if (c->multiply_halves) {
        const long *step = c->v_half_steps;
        c->multiply_halves("N", "N", &c->E, &r->n, &keys, &one,
                           c->v_halves + r->b * step[0] + r->g * step[1] + x->start * step[2],
                           step + 2, weights, &keys, &before, mixed, &c->E);
    } else {
        const long *step = c->v_steps;
        c->multiply("N", "N", &c->E, &r->n, &keys, &one,
                    c->v + r->b * step[0] + r->g * step[1] + x->start * step[2], step + 2, weights,
                    &keys, &before, mixed, &c->E);
    }
}
