/* One tile of logits, absorbed into the running sums of its rows, and hidden pairs written over. */

#include "tile.h"

void (*in_parallel)(void (*work)(void *), void *what, unsigned threads, unsigned flags);
int (*thread_number)(void);
int (*thread_count)(void);

void regard_use(void *parallel, void *number, void *count)
{
    in_parallel = parallel;
    thread_number = number;
    thread_count = count;
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
    absorb_all(t, first, last, FLOAT32);
}

/* Threads that a tile is worth. */
static unsigned worth(long numbers, int threads)
{
    return numbers < 1 << 14 ? 1 : threads;
}

void regard_absorb(float *logits, float *largest, float *total, float *energy, float *mixed,
                   long rows, long keys, long width, int threads)
{
    tile t = {logits, largest, total, energy, mixed, rows, keys, keys, width, 1};
    in_parallel(absorb_share, &t, worth(rows * keys, threads), 0);
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
