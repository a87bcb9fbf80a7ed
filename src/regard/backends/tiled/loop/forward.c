/* The forward pass of plain calls: what forward.py does, with products and sums in a core's cache. */

#include "call.h"

typedef struct {
    call of;
    float *out;                           /* [B, G R, Q, E], with rows side by side */
    float *lse, *rest, *largest, *entropy; /* [B, G R, Q]; the last two may be absent */
    const float *sink;                    /* [G R], or absent */
} forward;

/* What is kept of a row, from its sums; gives the factor that makes a mean of what is mixed. */
static float finish_row(forward *f, long row, float largest, float keys, float energy,
                        const float *sink)
{
    float shift = largest, total = keys;
    if (sink) {
        /* The sink is one more term of the sum. */
        shift = *sink > largest || *sink != *sink ? *sink : largest;
        total = keys * expf(largest - shift) + expf(*sink - shift);
    }
    int nothing = total == 0, unseen = keys == 0;
    float log_total = nothing ? 0 : logf(total), lse = nothing ? -INFINITY : shift + log_total;
    f->lse[row] = lse;
    f->rest[row] = nothing ? 0 : (shift - lse) + log_total;
    if (f->largest)
        f->largest[row] = unseen ? -INFINITY : largest;
    if (f->entropy) {
        float log_keys = unseen ? 0 : logf(keys), entropy = unseen ? 0 : log_keys - energy / keys;
        if (sink) {
            /* Entropy of (keys or sink), then within the keys. */
            float log_share = unseen ? 0 : log_keys + (largest - shift) - log_total;
            float share = unseen ? 0 : expf(log_share), log_rest = (*sink - shift) - log_total;
            float own = log_rest == -INFINITY ? 0 : expf(log_rest) * log_rest;
            entropy = share * (entropy - log_share) - own;
        }
        f->entropy[row] = entropy;
    }
    return nothing ? 0 : expf(largest - shift) / total;
}

/* A value that is not finite spoils the product also of rows that may not see it, so whether all
is finite is told. */
static int scale_rows(float *o, long width, float factor)
{
    float all = 0;
    floats sum = {0};
    long i = 0;
    for (; i + WIDE <= width; i += WIDE) {
        *(floats *)(o + i) *= factor;
        sum += *(floats *)(o + i);
    }
    for (; i < width; i++) {
        o[i] *= factor;
        all += o[i];
    }
    all += added(sum);
    return all - all == 0;
}

/* A query that is not finite has no logits, so it becomes NaN (see walk.py). */
static void gather_queries(const call *c, const rows_at *r, float *q)
{
    const long n = r->n * c->D;
    if (c->multiply_halves) {
        uint16_t *halves = (uint16_t *)q;
        gather_halves(r, c->q_halves, c->q_half_steps, c->D, halves);
        for (long d = 0; d < n; d++)
            halves[d] |= (halves[d] & 0x7f80) == 0x7f80 ? 0x40 : 0;
        return;
    }
    gather(r, c->q, c->q_steps, c->D, c->scale, q);
    /* 0 times infinity is NaN. */
    for (long d = 0; d < n; d++)
        q[d] += q[d] * 0;
}

static void attend(forward *f, long b, long h, long index, float *s)
{
    call *c = &f->of;
    const float one = 1, none = 0;
    const rows_at r = rows_of(c, b, h, index);
    const long row = place_of(c, &r), v_step = c->v_steps[2];
    float *q = s + c->rows * c->keys, *sums = q + c->rows * c->D, *mixed = f->out + row * c->E;
    gather_queries(c, &r, q);
    tile t = {s,    sums, sums + c->rows, f->entropy ? sums + 2 * c->rows : NULL,
              NULL, r.n,  0,              c->E};
    int hides = 0;
    cut x;
    for (long i = 0; find_cut(c, &r, i, &x); i++) {
        t.keys = x.stop - x.start;
        logits_of(c, &r, &x, q, s);
        hides |= hide_pairs(c, &r, &x, s);
        for (long j = 0; j < r.n; j++) {
            if (t.energy)
                absorb_row(&t, j, 1);
            else
                absorb_row(&t, j, 0);
            /* Over rows that are done with: it is half as long as they are. */
            if (c->multiply_halves)
                narrow(s + j * t.keys, (uint16_t *)s + j * t.keys, t.keys);
        }
        const float *before = t.mixed ? &one : &none;
        if (c->multiply_halves)
            c->multiply_halves("N", "N", &c->E, &r.n, &t.keys, &one,
                               c->v_halves + b * c->v_half_steps[0] + r.g * c->v_half_steps[1] +
                                   x.start * c->v_half_steps[2],
                               c->v_half_steps + 2, (uint16_t *)s, &t.keys, before, mixed, &c->E);
        else
            c->multiply("N", "N", &c->E, &r.n, &t.keys, &one,
                        c->v + b * c->v_steps[0] + r.g * c->v_steps[1] + x.start * v_step, &v_step,
                        s, &t.keys, before, mixed, &c->E);
        t.mixed = mixed;
    }
    int finite = 1;
    for (long j = 0; j < r.n; j++) {
        if (!t.mixed) {
            t.largest[j] = LEAST;
            t.total[j] = 0;
            if (t.energy)
                t.energy[j] = 0;
            memset(mixed + j * c->E, 0, c->E * sizeof *mixed);
        }
        const float *sink = f->sink ? f->sink + h + j / r.span : NULL;
        float factor = finish_row(f, row + j, t.largest[j], t.total[j], t.energy ? t.energy[j] : 0,
                                  sink);
        finite &= scale_rows(mixed + j * c->E, c->E, factor);
    }
    if (!finite && hides)
        __atomic_store_n(&c->harmed, 1, __ATOMIC_RELAXED);
}

static void attend_share(void *what)
{
    forward *f = what;
    call *c = &f->of;
    float *scratch = c->scratch + thread_number() * c->scratch_step;
    const long together = c->stacked ? c->R : 1, heads = c->G * c->R / together;
    const long tiles = c->last_tile - c->first_tile, n = c->B * heads * tiles;
    long i;
    while ((i = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < n) {
        long head = i / tiles;
        /* The last tiles first: under a causal mask they are the longest. */
        attend(f, head / heads, head % heads * together, c->last_tile - 1 - i % tiles, scratch);
    }
}

void regard_attend(forward *f, int threads)
{
    call *c = &f->of;
    long pieces = c->B * c->G * c->R * (c->last_tile - c->first_tile);
    c->next = c->harmed = 0;
    in_parallel(attend_share, f, pieces < threads ? pieces : threads, 0);
}
