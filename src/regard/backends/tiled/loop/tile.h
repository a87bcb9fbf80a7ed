#pragma once

/* Vectors, and what happens to one row of a tile of logits. See forward.py for the formulas.

Vectors are those of gcc and clang, so any instruction set will do. Nothing here may be compiled
with -ffast-math: minus infinity, NaN and the order of rounding are meant. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __aarch64__
#include <arm_neon.h>
#elif defined(__SSE__)
#include <immintrin.h>
#endif

#define LEAST (-FLT_MAX) /* the maximum of rows that have seen nothing: finite, as low as a float mask */
#define FAINT (-1000) /* a weight so far below is 0; 0 can still be multiplied by it */

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
typedef uint32_t bits __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * WIDE), aligned(2), may_alias));

/* The OpenMP runtime that PyTorch runs on, handed over after this is loaded: a second one would
fight the first for the cores, and nothing says that the linker would find the same one. */
#define HIDDEN __attribute__((visibility("hidden")))
extern HIDDEN void (*in_parallel)(void (*work)(void *), void *what, unsigned threads,
                                  unsigned flags);
extern HIDDEN int (*thread_number)(void);
extern HIDDEN int (*thread_count)(void);

static inline floats either(ints which, floats yes, floats no)
{
    return (floats)(((ints)yes & which) | ((ints)no & ~which));
}

/* y times 2^n where x is not below -87 (the normal numbers end there), else 0; NaN where y is.
t is n + 1.5 * 2^23, whose lowest bits are n. */
static inline floats raised(floats y, floats n, floats t, floats x)
{
#ifdef __AVX512F__
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (floats)_mm512_maskz_scalef_ps(normal, (__m512)y, (__m512)n);
#else
    y *= (floats)(((ints)t << 23) + 0x3f800000);
    return (floats)((ints)y & ~(x < -87.0f));
#endif
}

/* e^x to about one unit in the last place; 0 below -87 and inf soon above 88; NaN stays NaN.
x = n ln 2 + r, and e^r is a polynomial that is exact at 0 and errs by 3e-9 of it at most, which is
less than rounding does. */
static inline floats exponential(floats x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    floats t = x * 1.44269504088896341f + shift;
    floats n = t - shift;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats y = 1.381459879e-3f * r + 8.368716575e-3f;
    y = y * r + 4.166838899e-2f;
    y = y * r + 1.666652113e-1f;
    y = y * r + 4.999999404e-1f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return raised(y, n, t, x);
}

static inline float exponential1(float x)
{
    floats all = {x};
    return exponential(all)[0];
}

/* The hyperbolic tangent, to some units in the last place: near 0, where a difference from 1 would
cancel, five terms of its series, which err by 1e-8 of it at most. Beyond 20 it is 1. */
static inline floats tangent(floats x)
{
    const floats size = (floats)((ints)x & 0x7fffffff), y = x * x;
    const floats a = either(size > 20.0f, (floats){0} + 20.0f, size);
    const floats far = 1.0f - 2.0f / (exponential(a + a) + 1.0f);
    floats near = 62.0f / 2835.0f * y - 17.0f / 315.0f;
    near = near * y + 2.0f / 15.0f;
    near = near * y - 1.0f / 3.0f;
    near = (near * y) * a + a;
    const ints sign = (ints)x & (ints){0} + (int32_t)0x80000000;
    return (floats)((ints)either(a < 0.25f, near, far) | sign);
}

static inline float added(floats x)
{
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int half = WIDE / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] += x[i + half];
    return x[0];
#endif
}

/* The larger one, or NaN where either is NaN. */
static inline floats larger(floats s, floats most)
{
#ifdef __aarch64__
    return vmaxq_f32(s, most);
#elif defined(__AVX512F__)
    /* The instruction gives its second number where either is NaN. */
    __m512 m = (__m512)most, both = _mm512_max_ps(m, (__m512)s);
    return (floats)_mm512_mask_mov_ps(both, _mm512_cmp_ps_mask(m, m, _CMP_UNORD_Q), m);
#else
    return either((s > most) | (s != s), s, most);
#endif
}

/* The largest of all, or NaN. Without branches: which one it is cannot be foretold. */
static inline float largest_in(floats x)
{
#ifdef __aarch64__
    return vmaxvq_f32(x);
#elif defined(__AVX512F__)
    const __m512 all = (__m512)x;
    return _mm512_cmp_ps_mask(all, all, _CMP_UNORD_Q) ? NAN : _mm512_reduce_max_ps(all);
#else
    float one = x[0];
    for (int i = 1; i < WIDE; i++)
        one = x[i] > one || x[i] != x[i] ? x[i] : one;
    return one;
#endif
}

static inline floats tail(const float *s, long n)
{
    floats x = (floats){0} - INFINITY;
    memcpy(&x, s, n * sizeof *s);
    return x;
}

/* How numbers are held. */
enum { FLOAT32, BFLOAT16, FLOAT16 };

/* A vector, rounded to one of the narrow types. A NaN stays one: those that come of bfloat16 end in
zeros. */
static inline halves narrowed(floats x, int type)
{
    if (type == BFLOAT16) {
#ifdef __AVX512BF16__
        return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
        bits y = (bits)x;
        return __builtin_convertvector((y + 0x7fff + (y >> 16 & 1)) >> 16, halves);
#endif
    }
#ifdef __aarch64__
    return (halves)vcvt_f16_f32(x);
#elif defined(__AVX512F__)
    return (halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    /* There are no instructions, so no products either, and nobody asks for this: NaN. */
    return (halves){0} + 0x7e00;
#endif
}

/* The first n numbers of a vector, written as one of the types. */
static inline void put(floats x, int type, void *into, long n)
{
    if (type == FLOAT32)
        memcpy(into, &x, n * sizeof(float));
    else {
        halves y = narrowed(x, type);
        memcpy(into, &y, n * sizeof(uint16_t));
    }
}

typedef struct {
    float *logits;                   /* [rows, stride], of which the first keys count */
    float *largest, *total, *energy; /* [rows]; energy may be absent */
    float *mixed;                    /* [rows, width]; absent for the first tile of a row */
    long rows, keys, stride, width;
    float factor; /* of logits that become narrow weights; not below 0 */
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
    return largest_in(most[0]);
}

/* Rounded before anything is added, as the largest one is: a compiler would do both in one. */
static inline floats scaled(floats s, float factor)
{
    s *= factor;
#ifdef __aarch64__
    __asm__("" : "+w"(s));
#elif defined(__AVX512F__)
    __asm__("" : "+v"(s));
#elif defined(__SSE__)
    __asm__("" : "+x"(s));
#endif
    return s;
}

/* The largest logit of a row so far. */
static inline __attribute__((always_inline)) float largest_so_far(const tile *t, long row, int type)
{
    const float *s = t->logits + row * t->stride;
    const float before = t->mixed ? t->largest[row] : LEAST;
    if (type == FLOAT32)
        return largest_of(s, t->keys, before);
    /* Rounding keeps the order. */
    const float most = largest_of(s, t->keys, -INFINITY) * t->factor;
    return before > most || before != before ? before : most;
}

/* Logits become weights of a type in the same memory. Narrow ones lie side by side, row after row,
over numbers that were read before: they are half as long. */
static inline __attribute__((always_inline)) void absorb_row(const tile *t, long row, float most,
                                                             int energies, int type)
{
    const float *s = t->logits + row * t->stride;
    char *into = type == FLOAT32 ? (char *)s : (char *)((uint16_t *)t->logits + row * t->stride);
    const long size = type == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    floats total[MANY] = {{0}}, energy[MANY] = {{0}};
    long k = 0;
    for (; k + MANY * WIDE <= t->keys; k += MANY * WIDE) {
        floats x[MANY];
        for (int i = 0; i < MANY; i++)
            x[i] = *(floats *)(s + k + i * WIDE);
        for (int i = 0; i < MANY; i++) {
            x[i] = (type == FLOAT32 ? x[i] : scaled(x[i], t->factor)) - most;
            floats p = exponential(x[i]);
            put(p, type, into + (k + i * WIDE) * size, WIDE);
            total[i] += p;
            /* A weight of 0 adds 0, also where its logit is minus infinity. */
            if (energies)
                energy[i] += p * either(x[i] < -87.0f, p, x[i]);
        }
    }
    for (; k < t->keys; k += WIDE) {
        long n = t->keys - k < WIDE ? t->keys - k : WIDE;
        floats x = tail(s + k, n);
        x = (type == FLOAT32 ? x : scaled(x, t->factor)) - most;
        floats p = exponential(x);
        put(p, type, into + k * size, n);
        total[0] += p;
        if (energies)
            energy[0] += p * either(x < -87.0f, p, x);
    }
    /* What fills up a row of narrow weights counts in a product. */
    if (type != FLOAT32 && t->keys < t->stride)
        memset(into + t->keys * size, 0, (t->stride - t->keys) * size);
    for (int i = 1; i < MANY; i++) {
        total[0] += total[i];
        energy[0] += energy[i];
    }
    float sum = added(total[0]), heat = energies ? added(energy[0]) : 0;
    if (t->mixed) {
        float moved = t->largest[row] - most;
        moved = moved < FAINT ? FAINT : moved;
        float shrink = exponential1(moved);
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

/* Some rows of a tile. Of several rows the largest logits are found first: no exponential waits for
the one before it. */
static inline __attribute__((always_inline)) void absorb_rows(const tile *t, long first, long last,
                                                              int energies, int type)
{
    for (long row = first; row < last; row += MANY) {
        const long n = last - row < MANY ? last - row : MANY;
        float most[MANY];
        for (long i = 0; i < n; i++)
            most[i] = largest_so_far(t, row + i, type);
        for (long i = 0; i < n; i++)
            absorb_row(t, row + i, most[i], energies, type);
    }
}

static inline __attribute__((always_inline)) void absorb_all(const tile *t, long first, long last,
                                                             int type)
{
    if (t->energy)
        absorb_rows(t, first, last, 1, type);
    else
        absorb_rows(t, first, last, 0, type);
}

static inline floats bounded(floats x, float cap, float inverse, floats *slope)
{
    const floats t = tangent(x * inverse);
    *slope = 1.0f - t * t;
    return t * cap;
}

/* A row of logits, bounded softly by a cap; and, unless absent, the slopes of what bounds them. */
static inline void bound(float *s, float *slopes, long n, float cap)
{
    const float inverse = 1 / cap;
    floats slope;
    long k = 0;
    for (; k + WIDE <= n; k += WIDE) {
        *(floats *)(s + k) = bounded(*(floats *)(s + k), cap, inverse, &slope);
        if (slopes)
            *(floats *)(slopes + k) = slope;
    }
    if (k < n) {
        const floats x = bounded(tail(s + k, n - k), cap, inverse, &slope);
        memcpy(s + k, &x, (n - k) * sizeof *s);
        if (slopes)
            memcpy(slopes + k, &slope, (n - k) * sizeof *s);
    }
}

/* Numbers too small for all their digits become 0, in this thread: products of them take a hundred
times as long. Gives what `as_before` takes. */
static inline uint64_t without_tiny(void)
{
    uint64_t before = 0;
#ifdef __aarch64__
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1 << 24));
#elif defined(__SSE__)
    before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
#endif
    return before;
}

static inline void as_before(uint64_t before)
{
#ifdef __aarch64__
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#elif defined(__SSE__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* A value where pairs are hidden, in a row of numbers. */
static inline void hide(float *restrict s, const uint8_t *restrict hidden, long n, float value)
{
    for (long k = 0; k < n; k++)
        s[k] = hidden[k] ? value : s[k];
}
