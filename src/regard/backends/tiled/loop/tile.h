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

/* Numbers rounded to bfloat16, which may be written over what was read before. A NaN stays one: those
that come of bfloat16 end in zeros. */
static inline void narrow(const float *from, uint16_t *into, long n)
{
    long k = 0;
    for (; k + WIDE <= n; k += WIDE) {
        bits x = *(const bits *)(from + k);
        *(halves *)(into + k) = __builtin_convertvector((x + 0x7fff + (x >> 16 & 1)) >> 16, halves);
    }
    for (; k < n; k++) {
        uint32_t x;
        memcpy(&x, from + k, sizeof x);
        uint16_t y = (x + 0x7fff + (x >> 16 & 1)) >> 16;
        memcpy(into + k, &y, sizeof y);
    }
}

/* A value where pairs are hidden, in a row of numbers. */
static inline void hide(float *restrict s, const uint8_t *restrict hidden, long n, float value)
{
    for (long k = 0; k < n; k++)
        s[k] = hidden[k] ? value : s[k];
}
