/* Additive attention: logits Σ w tanh(q + k) of a tile of pairs, and what a gradient of them gives
back. No hidden unit of a pair is ever written down.

How tanh is made depends on how large the largest query or key is:

near   (below 1)   of tangents t and u of queries and keys: (t + u) / (1 + t u)
plain  (up to 40)  of their exponentials a = exp 2q and b = exp 2k: 1 - 2r, r = 1 / (1 + a b)
far    (beyond, or NaN)  the same of exp 2(q + k)

Only the last makes an exponential for each unit of a pair. 1 - 2r errs by roundings of 1, which
tells where all units are near 0: hence the first. Four units share a division. */

#include "tile.h"

enum { NEAR, PLAIN, FAR };
enum { FOUR = 4 };

typedef struct {
    const float *q; /* [B, G, R, Q, D]: tangents, exponentials, or as they are */
    const float *k; /* [B, G, D, K], with strides between heads and units */
    const float *w; /* [heads, D], or one for all */
    float *logits;  /* [B, G, R, Q, K] */
    const float *d; /* gradients of the logits */
    float *dq;      /* [B, G, R, Q, D] */
    float *dk;      /* [B, G, D, K], 0 before */
    float *dw;      /* [B, G, R, D] */
    long B, G, R, Q, K, D, k_head, k_unit, w_head, mode;
} units;

/* The smaller one; NaN where x is NaN. */
static inline floats smaller(floats x, float most)
{
    floats limit = (floats){0} + most;
#ifdef __aarch64__
    return vminq_f32(x, limit);
#elif defined(__AVX512F__)
    /* The instruction gives its second number where either is NaN. */
    return (floats)_mm512_min_ps((__m512)limit, (__m512)x);
#elif defined(__AVX__)
    return (floats)_mm256_min_ps((__m256)limit, (__m256)x);
#else
    return either(x > limit, limit, x);
#endif
}

static inline floats some(const float *s, long n)
{
    if (n >= WIDE)
        return *(const floats *)s;
    floats x = {0};
    memcpy(&x, s, n * sizeof *s);
    return x;
}

/* 1 + exp 2x, or what 1 + t u is. Beyond 1e9 it is as good as infinity beside 1, and four such
numbers multiply without overflow. */
static inline __attribute__((always_inline)) floats below(float a, floats b, int mode)
{
    if (mode == NEAR)
        return 1.0f + a * b;
    if (mode == PLAIN)
        return 1.0f + smaller(a * b, 1e9f);
    return 1.0f + smaller(exponential(smaller(2.0f * (a + b), 60.0f)), 1e9f);
}

/* Four units of one query and some keys: where they lie, and their weights. Beyond the last unit,
weights of 0. */
typedef struct {
    float a[FOUR], w[FOUR];
    const float *b[FOUR];
    long count;
} four;

static inline four four_of(const units *t, const float *q, const float *k, const float *w, long d)
{
    four f = {.count = t->D - d < FOUR ? t->D - d : FOUR};
    for (int i = 0; i < FOUR; i++) {
        long at = i < f.count ? d + i : d;
        f.a[i] = i < f.count ? q[at] : 0;
        f.w[i] = i < f.count ? w[at] : 0;
        f.b[i] = k + at * t->k_unit;
    }
    return f;
}

/* Σ w r, or Σ w tanh, of four units. */
static inline __attribute__((always_inline)) floats mixed(const four *f, long k, long n, int mode)
{
    floats up[FOUR], down[FOUR];
    for (int i = 0; i < FOUR; i++) {
        floats b = some(f->b[i] + k, n);
        up[i] = (floats){0} + f->w[i];
        if (mode == NEAR)
            up[i] *= f->a[i] + b;
        down[i] = below(f->a[i], b, mode);
    }
    floats left = up[0] * down[1] + up[1] * down[0], right = up[2] * down[3] + up[3] * down[2];
    floats first = down[0] * down[1], second = down[2] * down[3];
    return (left * second + right * first) / (first * second);
}

static inline __attribute__((always_inline)) void compare_row(const units *t, long row, int mode)
{
    long head = row / t->Q, bg = head / t->R, h = bg % t->G * t->R + head % t->R;
    const float *q = t->q + row * t->D, *k = t->k + bg * t->k_head, *w = t->w + h * t->w_head;
    float *s = t->logits + row * t->K, whole = 0;
    memset(s, 0, t->K * sizeof *s);
    for (long d = 0; d < t->D; d += FOUR) {
        four f = four_of(t, q, k, w, d);
        for (int i = 0; i < FOUR; i++)
            whole += f.w[i];
        long j = 0;
        for (; j + WIDE <= t->K; j += WIDE)
            *(floats *)(s + j) += mixed(&f, j, WIDE, mode);
        if (j < t->K) {
            floats x = some(s + j, t->K - j) + mixed(&f, j, t->K - j, mode);
            put(x, FLOAT32, s + j, t->K - j);
        }
    }
    if (mode != NEAR)
        for (long j = 0; j < t->K; j++)
            s[j] = whole - 2 * s[j];
}

/* What some keys add to the sums of four units: of slopes, and of units (or shares r) times
gradients. */
typedef struct {
    floats slopes[FOUR], met[FOUR], all;
} sums;

static inline __attribute__((always_inline)) void pull_some(const four *f, floats d, float *dk,
                                                            long K, long k, long n, sums *to,
                                                            int mode)
{
    floats x[FOUR], slope[FOUR], down[FOUR];
    for (int i = 0; i < FOUR; i++) {
        floats b = some(f->b[i] + k, n);
        down[i] = below(f->a[i], b, mode);
        x[i] = f->a[i] + b;
    }
    floats r[FOUR];
    if (mode == FAR)
        /* Few units are not saturated: their rounding is not lost among others. */
        for (int i = 0; i < FOUR; i++)
            r[i] = 1.0f / down[i];
    else {
        floats left = down[0] * down[1], right = down[2] * down[3], one = 1.0f / (left * right);
        left *= one;
        right *= one;
        r[0] = right * down[1];
        r[1] = right * down[0];
        r[2] = left * down[3];
        r[3] = left * down[2];
    }
    for (int i = 0; i < FOUR; i++) {
        floats unit = r[i];
        if (mode == NEAR) {
            unit *= x[i];
            slope[i] = d * (1.0f - unit * unit);
        } else
            slope[i] = d * (4.0f * (unit - unit * unit));
        to->slopes[i] += slope[i];
        to->met[i] += d * unit;
    }
    to->all += d;
    for (int i = 0; i < f->count; i++) {
        float *at = dk + i * K + k;
        put(some(at, n) + slope[i] * f->w[i], FLOAT32, at, n);
    }
}

/* Four units of one key head: no other thread writes to what is theirs. */
static inline __attribute__((always_inline)) void pull_four(const units *t, long bg, long d,
                                                            int mode)
{
    const float *k = t->k + bg * t->k_head;
    float *dk = t->dk + (bg * t->D + d) * t->K;
    for (long r = 0; r < t->R; r++) {
        const float *w = t->w + (bg % t->G * t->R + r) * t->w_head;
        float learned[FOUR] = {0};
        for (long i = 0; i < t->Q; i++) {
            long row = (bg * t->R + r) * t->Q + i, j = 0;
            four f = four_of(t, t->q + row * t->D, k, w, d);
            const float *given = t->d + row * t->K;
            sums to = {0};
            for (; j + WIDE <= t->K; j += WIDE)
                pull_some(&f, *(const floats *)(given + j), dk, t->K, j, WIDE, &to, mode);
            if (j < t->K)
                pull_some(&f, some(given + j, t->K - j), dk, t->K, j, t->K - j, &to, mode);
            float all = added(to.all);
            for (int u = 0; u < f.count; u++) {
                float met = added(to.met[u]);
                t->dq[row * t->D + d + u] = added(to.slopes[u]) * f.w[u];
                learned[u] += mode == NEAR ? met : all - 2 * met;
            }
        }
        for (int u = 0; u < FOUR && d + u < t->D; u++)
            t->dw[(bg * t->R + r) * t->D + d + u] = learned[u];
    }
}

static void part_of(long n, long *first, long *last)
{
    long threads = thread_count(), me = thread_number();
    *first = n * me / threads;
    *last = n * (me + 1) / threads;
}

static void compare_share(void *what)
{
    const units *t = what;
    long first, last;
    part_of(t->B * t->G * t->R * t->Q, &first, &last);
    for (long row = first; row < last; row++)
        if (t->mode == NEAR)
            compare_row(t, row, NEAR);
        else if (t->mode == PLAIN)
            compare_row(t, row, PLAIN);
        else
            compare_row(t, row, FAR);
}

static void pull_share(void *what)
{
    const units *t = what;
    long blocks = (t->D + FOUR - 1) / FOUR, first, last;
    part_of(t->B * t->G * blocks, &first, &last);
    for (long i = first; i < last; i++)
        if (t->mode == NEAR)
            pull_four(t, i / blocks, i % blocks * FOUR, NEAR);
        else if (t->mode == PLAIN)
            pull_four(t, i / blocks, i % blocks * FOUR, PLAIN);
        else
            pull_four(t, i / blocks, i % blocks * FOUR, FAR);
}

/* Threads that a tile is worth: a unit of a pair takes about a nanosecond. */
static unsigned hands(const units *t, int threads)
{
    return t->B * t->G * t->R * t->Q * t->K * t->D < 1 << 15 ? 1 : threads;
}

void regard_compare_units(units *t, int threads)
{
    in_parallel(compare_share, t, hands(t, threads), 0);
}

void regard_pull_units(units *t, int threads)
{
    in_parallel(pull_share, t, hands(t, threads), 0);
}
