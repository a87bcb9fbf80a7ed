/* The forward pass of plain calls: what forward.py does, with products and sums in a core's cache. */

#include "products.h"

typedef struct {
    call of;
    float *out;                           /* [B, G R, Q, E], with rows side by side */
    uint16_t *out_halves;                 /* the same in the type of values, or absent; else out is */
    float *lse, *rest, *largest, *entropy; /* [B, G R, Q]; each may be absent */
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
    if (f->lse)
        f->lse[row] = lse;
    if (f->rest)
        f->rest[row] = nothing ? 0 : (shift - lse) + log_total;
    if (f->largest)
        f->largest[row] = unseen ? -INFINITY : largest;
    if (f->entropy) {
        float log_keys = unseen ? 0 : sink ? logf(keys) : log_total;
        float entropy = unseen ? 0 : log_keys - energy / keys;
        if (sink) {
            /* Entropy of (keys or sink), then within the keys. */
            float log_share = unseen ? 0 : log_keys + (largest - shift) - log_total;
            float share = unseen ? 0 : expf(log_share), log_rest = (*sink - shift) - log_total;
            float own = log_rest == -INFINITY ? 0 : expf(log_rest) * log_rest;
            entropy = share * (entropy - log_share) - own;
        }
        f->entropy[row] = entropy;
    }
    return nothing ? 0 : (sink ? expf(largest - shift) : 1) / total;
}

/* A value that is not finite spoils the product also of rows that may not see it, so whether all
is finite is told. */
static inline int put_row(const float *o, long width, float factor, int type, void *into)
{
    const long size = type == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    floats sum = {0}, x = {0};
    long i = 0;
    for (; i + WIDE <= width; i += WIDE) {
        x = *(floats *)(o + i) * factor;
        put(x, type, (char *)into + i * size, WIDE);
        sum += x;
    }
    if (i < width) {
        x = (floats){0};
        memcpy(&x, o + i, (width - i) * sizeof *o);
        x *= factor;
        put(x, type, (char *)into + i * size, width - i);
        sum += x;
    }
    float all = added(sum);
    return all - all == 0;
}

/* A query that is not finite has no logits, so it becomes NaN (see tiles.py). */
static void gather_queries(const call *c, const rows_at *r, float *q)
{
    if (c->type != FLOAT32) {
        const uint16_t infinite = c->type == BFLOAT16 ? 0x7f80 : 0x7c00;
        const uint16_t quiet = c->type == BFLOAT16 ? 0x40 : 0x200;
        uint16_t *halves = (uint16_t *)q;
        gather_narrow(c, r, halves);
        const long n = r->n * (c->multiply_packed ? up_to(c->D, 2) : c->D);
        for (long d = 0; d < n; d++)
            halves[d] |= (halves[d] & infinite) == infinite ? quiet : 0;
        return;
    }
    gather(r, c->q, c->q_steps, c->D, c->scale, q);
    /* 0 times infinity is NaN. */
    for (long d = 0; d < r->n * c->D; d++)
        q[d] += q[d] * 0;
}

static void attend(forward *f, long b, long h, long index, float *s)
{
    call *c = &f->of;
    const rows_at r = rows_of(c, b, h, index);
    const long row = place_of(c, &r), room = rows_room(c);
    float *q = s + room * keys_room(c), *sums = q + room * c->D;
    float *mixed = f->out ? f->out + row * c->E : sums + 3 * room;
    gather_queries(c, &r, q);
    tile t = {s, sums, sums + room, f->entropy ? sums + 2 * room : NULL, NULL, r.n, 0, 0, c->E, 1};
    const bool later = scaled_later(c);
    if (later)
        t.factor = c->scale;
    int hides = 0;
    cut x;
    for (long i = 0; find_cut(c, &r, i, &x); i++) {
        t.keys = x.stop - x.start;
        t.stride = stride_of(c, &x);
        logits_of(c, &r, &x, q, s, later);
        if (has_more(c))
            bound_and_bias(c, &r, &x, s, t.stride, NULL);
        hides |= hide_pairs(c, &r, &x, s, t.stride);
        /* What fills up a cut may be values that nobody sees. */
        hides |= t.stride > t.keys && x.stop < c->K;
        if (c->type == FLOAT32)
            absorb_all(&t, 0, r.n, FLOAT32);
        else if (c->type == BFLOAT16)
            absorb_all(&t, 0, r.n, BFLOAT16);
        else
            absorb_all(&t, 0, r.n, FLOAT16);
        mix(c, &r, &x, s, t.mixed, mixed);
        t.mixed = mixed;
    }
    int finite = 1;
    for (long j = 0; j < r.n; j++) {
        float *o = mixed + j * c->E;
        if (!t.mixed) {
            t.largest[j] = LEAST;
            t.total[j] = 0;
            if (t.energy)
                t.energy[j] = 0;
            memset(o, 0, c->E * sizeof *o);
        }
        const float *sink = f->sink ? f->sink + h + j / r.span : NULL;
        float factor = finish_row(f, row + j, t.largest[j], t.total[j], t.energy ? t.energy[j] : 0,
                                  sink);
        uint16_t *narrow = f->out ? NULL : f->out_halves + (row + j) * c->E;
        if (f->out)
            finite &= put_row(o, c->E, factor, FLOAT32, o);
        else if (c->type == BFLOAT16)
            finite &= put_row(o, c->E, factor, BFLOAT16, narrow);
        else
            finite &= put_row(o, c->E, factor, FLOAT16, narrow);
    }
    if (!finite && hides)
        c->harmed = 1;
}

/* All rows of a key head, by the thread that packs its keys. */
static void attend_head(forward *f, long b, long g, long together, float *s)
{
    const call *c = &f->of;
    const long head = (b * c->G + g) * runs_of(c);
    for (long run = 0; run < runs_of(c); run++)
        pack_run(c, head + run);
    for (long h = g * c->R; h < (g + 1) * c->R; h += together)
        for (long index = c->last_tile; index-- > c->first_tile;)
            attend(f, b, h, index, s);
}

static void attend_share(void *what)
{
    forward *shared = what, own = *shared;
    call *c = &own.of;
    const long me = thread_number(), tiles = c->last_tile - c->first_tile;
    const long together = c->stacked ? c->R : 1, heads = c->G * c->R / together;
    const long n = c->whole_heads ? c->B * c->G : c->B * heads * tiles;
    float *scratch = c->scratch + me * c->scratch_step;
    if (c->whole_heads) {
        c->k_packed += me * runs_of(c) * c->keys * up_to(c->D, 2);
        c->v_packed += me * runs_of(c) * c->keys * c->E;
    }
    long i;
    while ((i = __atomic_fetch_add(&shared->of.next, 1, __ATOMIC_RELAXED)) < n)
        if (c->whole_heads)
            attend_head(&own, i / c->G, i % c->G, together, scratch);
        else
            /* The last tiles first: under a causal mask they are the longest. */
            attend(&own, i / tiles / heads, i / tiles % heads * together,
                   c->last_tile - 1 - i % tiles, scratch);
    if (c->harmed)
        __atomic_store_n(&shared->of.harmed, 1, __ATOMIC_RELAXED);
    if (c->multiply_packed)
        c->release(true);
}

void regard_attend(forward *f, int threads)
{
    call *c = &f->of;
    const long tiles = c->last_tile - c->first_tile;
    const long pieces = c->B * c->G * (c->whole_heads ? 1 : c->R * tiles);
    if (!c->whole_heads)
        pack(c, threads);
    c->next = c->harmed = 0;
    in_parallel(attend_share, f, pieces < threads ? pieces : threads, 0);
}

/* A call of a kind that is known: what all of them share, in which places of memory are counted from
the start of this one's, and where its tensors lie. */
typedef struct {
    const forward *kind;
    const void *q, *k, *v;
    void *out;
    float *largest, *entropy, *lse, *rest; /* each may be absent */
    char *memory;
    const part *parts; /* what its mask hides, if that is not the same for all of the kind */
    const float *bias; /* or absent */
    long bias_steps[4], threads;
} known_call;

/* Whether no masked value can have done harm. */
int regard_attend_again(const known_call *known)
{
    forward f = *known->kind;
    call *c = &f.of;
    if (c->type == FLOAT32) {
        c->q = known->q, c->k = known->k, c->v = known->v;
        f.out = known->out;
    } else {
        c->q_halves = known->q, c->k_halves = known->k, c->v_halves = known->v;
        f.out_halves = known->out;
    }
    f.largest = known->largest, f.entropy = known->entropy;
    f.lse = known->lse, f.rest = known->rest;
    c->scratch = (float *)(known->memory + (uintptr_t)c->scratch);
    if (known->parts)
        c->parts = known->parts;
    if (known->bias) {
        c->bias = known->bias;
        memcpy(c->bias_steps, known->bias_steps, sizeof c->bias_steps);
    }
    if (c->multiply_packed) {
        c->k_packed = (uint16_t *)(known->memory + (uintptr_t)c->k_packed);
        c->v_packed = (uint16_t *)(known->memory + (uintptr_t)c->v_packed);
    }
    regard_attend(&f, known->threads);
    return !c->harmed;
}
