/* The backward pass of plain calls: what backward.py does, with products and sums in a core's
cache. Row tiles are dealt out to hands; a hand adds up gradients of keys and values of its own. */

#include "products.h"

typedef struct {
    call of;
    const float *g; /* gradients of out [B, G R, Q, E] */
    long g_steps[3];
    const float *lse, *rest, *shift, *heat, *expected; /* [B, G R, Q]; the last two may be absent */
    float *dq;                                         /* [B, G R, Q, D], with rows side by side */
    float *dk, *dv;                                    /* [hands, B, G, K, D] and E */
    long dk_step, dv_step;                             /* from one hand to the next */
    long key_heads, hands;                             /* key heads of a whole batch entry */
} backward;

typedef struct {
    float lse, rest, shift, heat, expected;
} row_facts;

static inline floats slope_of(floats *s, floats pull, const row_facts *f, int heats)
{
    floats p = exponential((*s - f->lse) - f->rest), slope = pull + f->shift;
    if (heats)
        slope -= f->heat * either(p == 0.0f, p, *s - f->expected);
    *s = p;
    return slope * p;
}

/* Logits become weights, and gradients of weights become those of logits. */
static inline void pull_row(float *s, float *d, long keys, const row_facts *f, int heats)
{
    long k = 0;
    for (; k + 2 * WIDE <= keys; k += 2 * WIDE)
        for (int i = 0; i < 2; i++) {
            floats *d_here = (floats *)(d + k + i * WIDE);
            *d_here = slope_of((floats *)(s + k + i * WIDE), *d_here, f, heats);
        }
    for (; k < keys; k += WIDE) {
        long n = keys - k < WIDE ? keys - k : WIDE;
        floats p = tail(s + k, n), pull = {0};
        memcpy(&pull, d + k, n * sizeof *d);
        pull = slope_of(&p, pull, f, heats);
        memcpy(s + k, &p, n * sizeof *s);
        memcpy(d + k, &pull, n * sizeof *d);
    }
}

static void pull(backward *w, long b, long h, long index, long hand, float *s)
{
    call *c = &w->of;
    const float one = 1, none = 0;
    const rows_at r = rows_of(c, b, h, index);
    const long row = place_of(c, &r), k_step = c->k_steps[2], v_step = c->v_steps[2];
    const long key_head = b * w->key_heads + r.g;
    const long room = rows_room(c), tile = room * keys_room(c);
    float *d = s + tile, *q = d + tile, *g = q + room * c->D;
    float *dq = w->dq + row * c->D;
    gather(&r, c->q, c->q_steps, c->D, c->scale, q);
    gather(&r, w->g, w->g_steps, c->E, 1, g);
    uint16_t *q_halves = (uint16_t *)(g + room * c->E);
    if (c->type != FLOAT32)
        gather_narrow(c, &r, q_halves);
    cut x;
    long i = 0;
    for (; find_cut(c, &r, i, &x); i++) {
        const long keys = x.stop - x.start, stride = stride_of(c, &x);
        const float *k = c->k + b * c->k_steps[0] + r.g * c->k_steps[1] + x.start * k_step;
        const float *v = c->v + b * c->v_steps[0] + r.g * c->v_steps[1] + x.start * v_step;
        float *dk = w->dk + hand * w->dk_step + (key_head * c->K + x.start) * c->D;
        float *dv = w->dv + hand * w->dv_step + (key_head * c->K + x.start) * c->E;
        logits_of(c, &r, &x, c->type != FLOAT32 ? (void *)q_halves : q, s, false);
        hide_pairs(c, &r, &x, s, stride);
        c->multiply("T", "N", &keys, &r.n, &c->E, &one, v, &v_step, g, &c->E, &none, d, &stride);
        for (long j = 0; j < r.n; j++) {
            row_facts f = {w->lse[row + j], w->rest[row + j], w->shift[row + j], 0, 0};
            /* A row that sees nothing has only logits of minus infinity; any number will do. */
            if (isinf(f.lse))
                f.lse = 0;
            if (w->heat) {
                f.heat = w->heat[row + j];
                f.expected = w->expected[row + j];
                pull_row(s + j * stride, d + j * stride, keys, &f, 1);
            } else
                pull_row(s + j * stride, d + j * stride, keys, &f, 0);
        }
        c->multiply("N", "T", &c->E, &keys, &r.n, &one, g, &c->E, s, &stride, &one, dv, &c->E);
        c->multiply("N", "T", &c->D, &keys, &r.n, &one, q, &c->D, d, &stride, &one, dk, &c->D);
        c->multiply("N", "N", &c->D, &r.n, &keys, &c->scale, k, &k_step, d, &stride,
                    i ? &one : &none, dq, &c->D);
    }
    if (!i)
        memset(dq, 0, r.n * c->D * sizeof *dq);
}

static void pull_share(void *what)
{
    backward *w = what;
    call *c = &w->of;
    float *scratch = c->scratch + thread_number() * c->scratch_step;
    const long together = c->stacked ? c->R : 1, n = c->B * c->G * w->hands;
    long i;
    while ((i = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < n) {
        long hand = i % w->hands, g = i / w->hands % c->G, b = i / w->hands / c->G;
        for (long r = 0; r < c->R; r += together)
            for (long t = c->first_tile; t < c->last_tile; t++)
                if (t % w->hands == hand)
                    pull(w, b, g * c->R + r, t, hand, scratch);
    }
    if (c->multiply_packed)
        c->release(true);
}

void regard_pull(backward *w, int threads)
{
    call *c = &w->of;
    long pieces = c->B * c->G * w->hands;
    pack(c, threads);
    c->next = 0;
    in_parallel(pull_share, w, pieces < threads ? pieces : threads, 0);
}
