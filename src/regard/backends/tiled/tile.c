/* One tile of logits, absorbed into the running sums of its rows. See forward.py for the formulas.

Vectors are those of gcc and clang, so any instruction set will do. Nothing here may be compiled
with -ffast-math: minus infinity, NaN and the order of rounding are meant. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __aarch64__
#include <arm_neon.h>
#endif

#define LEAST (-FLT_MAX / 4) /* a finite maximum for rows that have seen nothing */

/* As wide as a register: the compiler takes wider vectors apart, and on NEON it does so badly. */
#if defined(__AVX512F__)
#define WIDE 16
#elif defined(__AVX__)
#define WIDE 8
#else
#define WIDE 4
#endif
#define MANY 4 /* vectors in flight, so that none waits for the one before */
typedef float floats __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * WIDE)));

/* The OpenMP runtime that PyTorch runs on, handed over after this is loaded: a second one would
fight the first for the cores, and nothing says that the linker would find the same one. */
static void (*in_parallel)(void (*work)(void *), void *what, unsigned threads, unsigned flags);
static int (*thread_number)(void);
static int (*thread_count)(void);

void regard_use(void *parallel, void *number, void *count)
{
    in_parallel = parallel;
    thread_number = number;
    thread_count = count;
}

static inline floats either(ints which, floats yes, floats no)
{
    return (floats)(((ints)yes & which) | ((ints)no & ~which));
}

/* e^x to about one unit in the last place; 0 below -87 (the normal numbers end there) and inf
above 88; NaN stays NaN. x = n ln 2 + r, and a polynomial (Cephes) gives e^r. */
static inline floats exponential(floats x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    floats t = x * 1.44269504088896341f + shift;
    floats n = t - shift;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats y = 1.9875691500e-4f * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    y *= (floats)(((ints)t << 23) + 0x3f800000);
    return (floats)((ints)y & ~(x < -87.0f));
}

static inline float exponential1(float x)
{
    floats all = {x};
    return exponential(all)[0];
}

static inline float added(floats x)
{
    for (int half = WIDE / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] += x[i + half];
    return x[0];
}

/* The larger one, or NaN where either is NaN. */
static inline floats larger(floats s, floats most)
{
#ifdef __aarch64__
    return vmaxq_f32(s, most);
#else
    return either((s > most) | (s != s), s, most);
#endif
}

static inline floats tail(const float *s, long n)
{
    floats x = (floats){0} - INFINITY;
    memcpy(&x, s, n * sizeof *s);
    return x;
}

typedef struct {
    float *logits;                   /* [rows, keys] */
    float *largest, *total, *energy; /* [rows]; energy may be absent */
    float *mixed;                    /* [rows, width]; absent for the first tile of a row */
    long rows, keys, width;
} tile;

static inline float largest_of(const float *s, long keys, float before)
{
    floats most[MANY];
    for (int i = 0; i < MANY; i++)
        most[i] = (floats){0} + before;
    long k = 0;
    for (; k + MANY * WIDE <= keys; k += MANY * WIDE)
        for (int i = 0; i < MANY; i++)
            most[i] = larger(*(floats *)(s + k + i * WIDE), most[i]);
    for (; k + WIDE <= keys; k += WIDE)
        most[0] = larger(*(floats *)(s + k), most[0]);
    if (k < keys)
        most[1] = larger(tail(s + k, keys - k), most[1]);
    for (int i = 1; i < MANY; i++)
        most[0] = larger(most[i], most[0]);
    float one = before;
    for (int i = 0; i < WIDE; i++)
        if (most[0][i] > one || most[0][i] != most[0][i])
            one = most[0][i];
    return one;
}

static inline void absorb_row(const tile *t, long row, int energies)
{
    float *s = t->logits + row * t->keys;
    float before = t->mixed ? t->largest[row] : LEAST;
    const float most = largest_of(s, t->keys, before);
    floats total[MANY] = {{0}}, energy[MANY] = {{0}};
    long k = 0;
    for (; k + MANY * WIDE <= t->keys; k += MANY * WIDE)
        for (int i = 0; i < MANY; i++) {
            floats x = *(floats *)(s + k + i * WIDE) - most, p = exponential(x);
            *(floats *)(s + k + i * WIDE) = p;
            total[i] += p;
            /* A weight of 0 adds 0, also where its logit is minus infinity. */
            if (energies)
                energy[i] += p * either(x < -87.0f, p, x);
        }
    for (; k < t->keys; k += WIDE) {
        long n = t->keys - k < WIDE ? t->keys - k : WIDE;
        floats x = tail(s + k, n) - most, p = exponential(x);
        memcpy(s + k, &p, n * sizeof *s);
        total[0] += p;
        if (energies)
            energy[0] += p * either(x < -87.0f, p, x);
    }
    for (int i = 1; i < MANY; i++) {
        total[0] += total[i];
        energy[0] += energy[i];
    }
    float sum = added(total[0]), heat = energies ? added(energy[0]) : 0;
    if (t->mixed) {
        float moved = before - most, shrink = exponential1(moved);
        if (energies)
            heat += (t->energy[row] + t->total[row] * moved) * shrink;
        sum += t->total[row] * shrink;
        if (shrink != 1) {
            float *o = t->mixed + row * t->width;
            for (long i = 0; i < t->width; i++)
                o[i] *= shrink;
        }
    }
    t->largest[row] = most;
    t->total[row] = sum;
    if (energies)
        t->energy[row] = heat;
}

static void share(long n, long *first, long *last)
{
    long threads = thread_count(), me = thread_number();
    *first = n * me / threads;
    *last = n * (me + 1) / threads;
}

static void absorb_share(void *what)
{
    const tile *t = what;
    long first, last;
    share(t->rows, &first, &last);
    if (t->energy)
        for (long row = first; row < last; row++)
            absorb_row(t, row, 1);
    else
        for (long row = first; row < last; row++)
            absorb_row(t, row, 0);
}

/* Threads that a tile is worth. */
static unsigned worth(long numbers, int threads)
{
    return numbers < 1 << 14 ? 1 : threads;
}

void regard_absorb(float *logits, float *largest, float *total, float *energy, float *mixed,
                   long rows, long keys, long width, int threads)
{
    tile t = {logits, largest, total, energy, mixed, rows, keys, width};
    in_parallel(absorb_share, &t, worth(rows * keys, threads), 0);
}

/* A value where pairs are hidden, in a row of numbers. */
static inline void hide(float *restrict s, const uint8_t *restrict hidden, long n, float value)
{
    for (long k = 0; k < n; k++)
        s[k] = hidden[k] ? value : s[k];
}

typedef struct {
    float *numbers;        /* [B, G, R, Q, keys], from the first key of the part on */
    const uint8_t *hidden; /* [B, G, R, Q, part], with strides */
    long axes[4], strides[4], keys, part;
    float value;
} cover;

static void fill_share(void *what)
{
    const cover *c = what;
    const long *n = c->axes, *step = c->strides;
    long first, last;
    share(n[0] * n[1] * n[2] * n[3], &first, &last);
    for (long row = first; row < last; row++) {
        long q = row % n[3], head = row / n[3], r = head % n[2], g = head / n[2] % n[1];
        long b = head / n[2] / n[1];
        hide(c->numbers + row * c->keys,
             c->hidden + b * step[0] + g * step[1] + r * step[2] + q * step[3], c->part, c->value);
    }
}

void regard_fill(float *numbers, const uint8_t *hidden, long B, long G, long R, long Q, long b,
                 long g, long r, long q, long keys, long part, float value, int threads)
{
    cover c = {numbers, hidden, {B, G, R, Q}, {b, g, r, q}, keys, part, value};
    in_parallel(fill_share, &c, worth(B * G * R * Q * part, threads), 0);
}

/* PyTorch's own matrix product (sgemm), which reads matrices column by column. Whether it counts in
32 or 64 bits: on little-endian machines both read the same from a long. */
typedef void product(const char *, const char *, const long *, const long *, const long *,
                     const float *, const float *, const long *, const float *, const long *,
                     const float *, float *, const long *);

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
    float *largest, *total, *energy, *means; /* [B, G R, Q] and [B, G R, Q, E] */
    long sums_step;                          /* rows from one batch entry to the next */
    long B, G, R, Q, D, E;
    const row_tile *tiles;
    const cut *cuts;
    const part *parts;
    long n_tiles;
    float *scratch; /* for each thread a tile of logits and one of queries */
    long scratch_step;
    float scale;
    long next;   /* the first piece of work that nobody has taken */
    long harmed; /* whether a row that may not see everything holds NaN or infinity */
} wave;

/* The sums of a row tile become means. A value that is not finite spoils the product also of rows
that may not see it, so what is not finite is told. */
static int averaged(const tile *t)
{
    float all = 0;
    for (long j = 0; j < t->rows; j++) {
        float share = t->total[j] == 0 ? 0 : 1 / t->total[j], *o = t->mixed + j * t->width;
        floats sum = {0};
        long i = 0;
        for (; i + WIDE <= t->width; i += WIDE) {
            *(floats *)(o + i) *= share;
            sum += *(floats *)(o + i);
        }
        for (; i < t->width; i++) {
            o[i] *= share;
            all += o[i];
        }
        all += added(sum);
    }
    return all - all == 0;
}

/* One row tile of one head: what forward.py does, with products and sums in the core's cache. */
static void attend(wave *w, long b, long h, const row_tile *rows, float *s)
{
    const float one = 1, none = 0;
    const long n = rows->stop - rows->start, D = w->D, E = w->E;
    const long q_step = w->q_steps[2], k_step = w->k_steps[2], v_step = w->v_steps[2];
    const long g = h / w->R, r = h % w->R, row = b * w->sums_step + h * w->Q + rows->start;
    const float *from = w->q + b * w->q_steps[0] + h * w->q_steps[1] + rows->start * q_step;
    float *mixed = w->means + row * E;
    /* Scaled before the product, as in every other pass: large logits must round alike in all. */
    float *q = s + w->scratch_step - n * D;
    for (long j = 0; j < n; j++)
        for (long d = 0; d < D; d++)
            q[j * D + d] = from[j * q_step + d] * w->scale;
    float *energy = w->energy ? w->energy + row : NULL;
    tile t = {s, w->largest + row, w->total + row, energy, NULL, n, 0, E};
    for (long i = rows->first_cut; i < rows->last_cut; i++) {
        const cut *c = w->cuts + i;
        const long keys = c->stop - c->start;
        const float *k = w->k + b * w->k_steps[0] + g * w->k_steps[1] + c->start * k_step;
        const float *v = w->v + b * w->v_steps[0] + g * w->v_steps[1] + c->start * v_step;
        w->multiply("T", "N", &keys, &n, &D, &one, k, &k_step, q, &D, &none, s, &keys);
        for (const part *p = w->parts + c->first_part; p < w->parts + c->last_part; p++)
            for (long j = 0; j < n; j++)
                hide(s + j * keys + p->start,
                     p->hidden + b * p->strides[0] + g * p->strides[1] + r * p->strides[2] +
                         j * p->strides[3],
                     p->stop - p->start, -INFINITY);
        t.keys = keys;
        for (long j = 0; j < n; j++)
            if (t.energy)
                absorb_row(&t, j, 1);
            else
                absorb_row(&t, j, 0);
        w->multiply("N", "N", &E, &n, &keys, &one, v, &v_step, s, &keys, t.mixed ? &one : &none,
                    mixed, &E);
        t.mixed = mixed;
    }
    if (t.mixed) {
        int hides = w->cuts[rows->first_cut].first_part < w->cuts[rows->last_cut - 1].last_part;
        if (!averaged(&t) && hides)
            __atomic_store_n(&w->harmed, 1, __ATOMIC_RELAXED);
    } else
        for (long j = 0; j < n; j++) {
            t.largest[j] = LEAST;
            t.total[j] = 0;
            if (t.energy)
                t.energy[j] = 0;
            memset(mixed + j * E, 0, E * sizeof *mixed);
        }
}

static void attend_share(void *what)
{
    wave *w = what;
    float *scratch = w->scratch + thread_number() * w->scratch_step;
    const long heads = w->G * w->R, n = w->B * heads * w->n_tiles;
    long i;
    while ((i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < n) {
        long head = i / w->n_tiles;
        /* The last tiles first: under a causal mask they are the longest. */
        attend(w, head / heads, head % heads, w->tiles + w->n_tiles - 1 - i % w->n_tiles, scratch);
    }
}

void regard_attend(wave *w, int threads)
{
    long pieces = w->B * w->G * w->R * w->n_tiles;
    w->next = w->harmed = 0;
    in_parallel(attend_share, w, pieces < threads ? pieces : threads, 0);
}
