/* The backward pass of plain calls: what backward.py does, with products and sums in a core's
cache. Row tiles are dealt out to hands; a hand adds up gradients of keys and values of its own. */

#include "products.h"

typedef struct {
    call of;
    const float *g; /* gradients of out [B, G R, Q, E] */
    long g_steps[3];
    const float *lse, *rest, *shift, *heat, *expected; /* [B, G R, Q]; the last three may be absent */
    const float *out; /* [B, G R, Q, E], with rows side by side: in the place of shift, which is then
                         minus the product of each row and its gradient */
    float *dq;                                         /* [B, G R, Q, D], with rows side by side */
    float *dk, *dv; /* [hands, B, G, K, D] and E; with k_mixed [hands, B, G, D, runs of keys] and E,
                       and dk without the scale */
    long dk_step, dv_step;                             /* from one hand to the next */
    long key_heads, hands;                             /* key heads of a whole batch entry */
    long fresh; /* whether dk and dv are still to be set to zero */
} backward;

typedef struct {
    float lse, rest, shift, heat, expected;
} row_facts;

static float product_of(const float *a, const float *b, long n)
{
    floats sum = {0};
    long i = 0;
    for (; i + WIDE <= n; i += WIDE)
        sum += *(floats *)(a + i) * *(floats *)(b + i);
    float all = added(sum);
    for (; i < n; i++)
        all += a[i] * b[i];
    return all;
}

static int all_finite(const float *x, long n)
{
    floats sum = {0};
    long i = 0;
    for (; i + WIDE <= n; i += WIDE)
        sum += *(floats *)(x + i);
    float all = added(sum);
    for (; i < n; i++)
        all += x[i];
    return all - all == 0;
}

/* g are the gradients of the row's output. */
static inline row_facts facts_of(const backward *w, long row, const float *g)
{
    row_facts f = {w->lse[row], w->rest[row], 0, 0, 0};
    f.shift = w->shift ? w->shift[row] : -product_of(g, w->out + row * w->of.E, w->of.E);
    /* A row that sees nothing has only logits of minus infinity; any number will do. */
    if (isinf(f.lse))
        f.lse = 0;
    if (w->heat) {
        f.heat = w->heat[row];
        f.expected = w->expected[row];
    }
    return f;
}

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

/* The same of narrow numbers, in the same memory as absorb_row's. */
static inline __attribute__((always_inline)) void pull_narrow(const tile *t, float *d, long row,
                                                              const row_facts *f, int heats)
{
    const long here = row * t->stride;
    for (long k = 0; k < t->keys; k += WIDE) {
        const long n = t->keys - k < WIDE ? t->keys - k : WIDE;
        floats p = n == WIDE ? *(floats *)(t->logits + here + k) : tail(t->logits + here + k, n);
        floats slope = {0};
        if (n == WIDE)
            slope = *(floats *)(d + here + k);
        else
            memcpy(&slope, d + here + k, n * sizeof *d);
        p = scaled(p, t->factor);
        slope = slope_of(&p, slope, f, heats);
        uint16_t *into = (uint16_t *)t->logits + here + k, *slopes = (uint16_t *)d + here + k;
        if (n == WIDE) {
            put(p, BFLOAT16, into, WIDE);
            put(slope, BFLOAT16, slopes, WIDE);
        } else {
            put(p, BFLOAT16, into, n);
            put(slope, BFLOAT16, slopes, n);
        }
    }
    if (t->keys < t->stride) {
        const long size = (t->stride - t->keys) * sizeof(uint16_t);
        memset((uint16_t *)t->logits + here + t->keys, 0, size);
        memset((uint16_t *)d + here + t->keys, 0, size);
    }
}

/* Rows become columns. */
static void turn(const uint16_t *from, long stride, long rows, long width, uint16_t *into)
{
    for (long d = 0; d < width; d++)
        for (long j = 0; j < rows; j++)
            into[d * rows + j] = from[j * stride + d];
}

/* A row tile with packed products alone, without a soft-cap. Gradients of keys and values are added up with columns for
rows: so weights become a second matrix by laying two rows side by side. */
static void pull_packed(backward *w, long b, long h, long index, long hand, float *s)
{
    call *c = &w->of;
    const rows_at r = rows_of(c, b, h, index);
    const long room = rows_room(c), area = room * keys_room(c), n = up_to(r.n, ROWS);
    const long row = place_of(c, &r), D = up_to(c->D, 2), E = up_to(c->E, 2);
    const long all_keys = runs_of(c) * c->keys, key_head = b * w->key_heads + r.g;
    float *d = s + area, *dq = d + area;
    uint16_t *paired = (uint16_t *)(dq + room * c->D), *q = paired + area, *q_turned = q + room * D;
    uint16_t *g = q_turned + room * D, *g_turned = g + room * E;
    float *dk = w->dk + hand * w->dk_step + key_head * c->D * all_keys;
    float *dv = w->dv + hand * w->dv_step + key_head * c->E * all_keys;
    gather_narrow(c, &r, q);
    turn(q, D, n, c->D, q_turned);
    memset(g, 0, n * E * sizeof *g);
    for (long j = 0; j < r.n; j++) {
        const float *from = w->g + r.b * w->g_steps[0] + (r.h + j / r.span) * w->g_steps[1] +
                            (r.start + j % r.span) * w->g_steps[2];
        long e = 0;
        for (; e + WIDE <= c->E; e += WIDE)
            put(*(floats *)(from + e), BFLOAT16, g + j * E + e, WIDE);
        if (e < c->E)
            put(tail(from + e, c->E - e), BFLOAT16, g + j * E + e, c->E - e);
    }
    turn(g, E, n, c->E, g_turned);
    const bool later = scaled_later(c);
    tile t = {s, NULL, NULL, NULL, NULL, r.n, 0, 0, 0, later ? c->scale : 1};
    cut x;
    long i = 0;
    for (; find_cut(c, &r, i, &x); i++) {
        t.keys = x.stop - x.start;
        t.stride = stride_of(c, &x);
        logits_of(c, &r, &x, q, s, later);
        if (has_more(c))
            bound_and_bias(c, &r, &x, s, t.stride, NULL);
        hide_pairs(c, &r, &x, s, t.stride);
        compare(c, &r, &x, g, c->E, c->v_compared, d);
        for (long j = 0; j < r.n; j++) {
            const row_facts f = facts_of(w, row + j, NULL);
            if (w->heat)
                pull_narrow(&t, d, j, &f, 1);
            else
                pull_narrow(&t, d, j, &f, 0);
        }
        memset((uint16_t *)s + r.n * t.stride, 0, (n - r.n) * t.stride * sizeof(uint16_t));
        pack_values((uint16_t *)s, t.stride, n, t.stride, paired, n);
        c->multiply_packed(c->E, t.stride, n, n, t.stride, all_keys, true, g_turned, paired,
                           dv + x.start, true);
        mix_packed(c, &r, &x, (uint16_t *)d, c->D, c->k_mixed, i > 0, dq);
        pack_values((uint16_t *)d, t.stride, n, t.stride, paired, n);
        c->multiply_packed(c->D, t.stride, n, n, t.stride, all_keys, true, q_turned, paired,
                           dk + x.start, true);
    }
    for (long j = 0; j < r.n * c->D; j++)
        w->dq[row * c->D + j] = i ? dq[j] * c->scale : 0;
}

/* Whether pairs are masked among those that were computed. */
static int pull(backward *w, long b, long h, long index, long hand, float *s)
{
    call *c = &w->of;
    const float one = 1, none = 0;
    const rows_at r = rows_of(c, b, h, index);
    const long row = place_of(c, &r), k_step = c->k_steps[2], v_step = c->v_steps[2];
    const long key_head = b * w->key_heads + r.g;
    const long room = rows_room(c), tile = room * keys_room(c);
    float *d = s + tile, *slopes = c->cap != 0 ? d + tile : NULL;
    float *q = (slopes ? slopes : d) + tile, *g = q + room * c->D;
    float *dq = w->dq + row * c->D;
    gather(&r, c->q, c->q_steps, c->D, c->scale, q);
    gather(&r, w->g, w->g_steps, c->E, 1, g);
    uint16_t *q_halves = (uint16_t *)(g + room * c->E);
    if (c->type != FLOAT32)
        gather_narrow(c, &r, q_halves);
    cut x;
    long i = 0;
    int hides = 0;
    for (; find_cut(c, &r, i, &x); i++) {
        const long keys = x.stop - x.start, stride = stride_of(c, &x);
        const float *k = c->k + b * c->k_steps[0] + r.g * c->k_steps[1] + x.start * k_step;
        const float *v = c->v + b * c->v_steps[0] + r.g * c->v_steps[1] + x.start * v_step;
        float *dk = w->dk + hand * w->dk_step + (key_head * c->K + x.start) * c->D;
        float *dv = w->dv + hand * w->dv_step + (key_head * c->K + x.start) * c->E;
        logits_of(c, &r, &x, c->type != FLOAT32 ? (void *)q_halves : q, s, false);
        if (has_more(c))
            bound_and_bias(c, &r, &x, s, stride, slopes);
        hides |= hide_pairs(c, &r, &x, s, stride);
        c->multiply("T", "N", &keys, &r.n, &c->E, &one, v, &v_step, g, &c->E, &none, d, &stride);
        for (long j = 0; j < r.n; j++) {
            const row_facts f = facts_of(w, row + j, g + j * c->E);
            if (w->heat)
                pull_row(s + j * stride, d + j * stride, keys, &f, 1);
            else
                pull_row(s + j * stride, d + j * stride, keys, &f, 0);
            if (slopes)
                for (long k = 0; k < keys; k++)
                    d[j * stride + k] *= slopes[j * stride + k];
        }
        c->multiply("N", "T", &c->E, &keys, &r.n, &one, g, &c->E, s, &stride, &one, dv, &c->E);
        c->multiply("N", "T", &c->D, &keys, &r.n, &one, q, &c->D, d, &stride, &one, dk, &c->D);
        c->multiply("N", "N", &c->D, &r.n, &keys, &c->scale, k, &k_step, d, &stride,
                    i ? &one : &none, dq, &c->D);
    }
    if (!i)
        memset(dq, 0, r.n * c->D * sizeof *dq);
    if (hides && !all_finite(dq, r.n * c->D))
        c->harmed = 1;
    return hides;
}

/* The row tiles of a hand, of the heads that share a key head. */
static void pull_hand(backward *w, long b, long g, long hand, float *s)
{
    call *c = &w->of;
    const long together = c->stacked ? c->R : 1, head = b * w->key_heads + g;
    float *dk = w->dk + hand * w->dk_step + head * c->K * c->D;
    float *dv = w->dv + hand * w->dv_step + head * c->K * c->E;
    int hides = 0;
    if (w->fresh) {
        memset(dk, 0, c->K * c->D * sizeof *dk);
        memset(dv, 0, c->K * c->E * sizeof *dv);
    }
    for (long r = 0; r < c->R; r += together)
        for (long t = c->first_tile; t < c->last_tile; t++)
            if (t % w->hands == hand) {
                if (c->k_mixed)
                    pull_packed(w, b, g * c->R + r, t, hand, s);
                else
                    hides |= pull(w, b, g * c->R + r, t, hand, s);
            }
    if (hides && !(all_finite(dk, c->K * c->D) && all_finite(dv, c->K * c->E)))
        c->harmed = 1;
}

static void pull_share(void *what)
{
    backward *shared = what, own = *shared;
    call *c = &own.of;
    float *scratch = c->scratch + thread_number() * c->scratch_step;
    const long n = c->B * c->G * own.hands;
    const uint64_t before = without_tiny();
    long i;
    while ((i = __atomic_fetch_add(&shared->of.next, 1, __ATOMIC_RELAXED)) < n)
        pull_hand(&own, i / own.hands / c->G, i / own.hands % c->G, i % own.hands, scratch);
    if (c->harmed)
        __atomic_store_n(&shared->of.harmed, 1, __ATOMIC_RELAXED);
    as_before(before);
    if (c->multiply_packed)
        c->release(true);
}

void regard_pull(backward *w, int threads)
{
    call *c = &w->of;
    long pieces = c->B * c->G * w->hands;
    pack(c, threads);
    c->next = c->harmed = 0;
    in_parallel(pull_share, w, pieces < threads ? pieces : threads, 0);
}

/* A backward pass of a kind that is known: what all of them share, in which scratch memory is absent,
and where this one's tensors lie. Its numbers are floats, and nothing comes of lse and entropy. */
typedef struct {
    const backward *kind;
    const float *q, *k, *v, *g, *out, *lse, *rest;
    float *dq, *dk, *dv, *memory;
    long g_steps[3], threads;
} known_pull;

/* Whether no number of a masked pair can have done harm. */
int regard_pull_again(const known_pull *known)
{
    backward w = *known->kind;
    w.of.q = known->q, w.of.k = known->k, w.of.v = known->v;
    w.g = known->g, w.out = known->out, w.lse = known->lse, w.rest = known->rest;
    w.dq = known->dq, w.dk = known->dk, w.dv = known->dv;
    w.of.scratch = known->memory;
    memcpy(w.g_steps, known->g_steps, sizeof w.g_steps);
    regard_pull(&w, known->threads);
    return !w.of.harmed;
}
