/* The loops of the engine on a CPU, for float32 and one dense matrix.
 * Compiled on first use by native.py; NumPy does the same where there is no compiler. */
#include <float.h>
#include <math.h>
#include <stdint.h>

typedef float vec __attribute__((vector_size(64), aligned(4))); /* one register of AVX-512, two of AVX2 */
#define LANES 16
#define DEPTH 32

/* to[r] = from[r] times matrix, for R rows at once, some rows of the matrix at a time: these are read from their
 * beginnings to their ends, as memory likes it, while the sums stay in registers. A row's sums are the same to the bit
 * whatever R is: their terms are added in the order of i. */
#define PRODUCT(R)                                                                                        \
    static void product_##R(const float *const *from, const float *matrix, float *const *to, int64_t n) { \
        for (int64_t begin = 0; begin < n; begin += DEPTH) {                                              \
            const int64_t end = begin + DEPTH < n ? begin + DEPTH : n;                                    \
            for (int64_t j = 0; j + 2 * LANES <= n; j += 2 * LANES) {                                     \
                vec left[R] = {{0}}, right[R] = {{0}};                                                    \
                _Pragma("GCC unroll 8") for (int r = 0; begin && r < R; r++) {                            \
                    left[r] = *(const vec *)(to[r] + j);                                                  \
                    right[r] = *(const vec *)(to[r] + j + LANES);                                         \
                }                                                                                         \
                for (int64_t i = begin; i < end; i++) {                                                   \
                    const vec a = *(const vec *)(matrix + i * n + j);                                     \
                    const vec b = *(const vec *)(matrix + i * n + j + LANES);                             \
                    _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                 \
                        left[r] += from[r][i] * a;                                                        \
                        right[r] += from[r][i] * b;                                                       \
                    }                                                                                     \
                }                                                                                         \
                _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                     \
                    *(vec *)(to[r] + j) = left[r];                                                        \
                    *(vec *)(to[r] + j + LANES) = right[r];                                               \
                }                                                                                         \
            }                                                                                             \
        }                                                                                                 \
    }
PRODUCT(8)
PRODUCT(4)
PRODUCT(2)
PRODUCT(1)

/* The columns that are left over. Not inlined: one piece of code for every number of rows. */
__attribute__((noinline)) static void rest(const float *from, const float *matrix, float *to, int64_t n) {
    for (int64_t j = n - n % (2 * LANES); j < n; j++) {
        float sum = 0;
        for (int64_t i = 0; i < n; i++) sum += from[i] * matrix[i * n + j];
        to[j] = sum;
    }
}

/* Up to 8 rows; the pointers have room for 8. Reading the matrix is what takes the time, so that it is cheaper to do
 * the last row again than to read it once more. */
static void product(const float **from, const float *matrix, float **to, int rows, int64_t n) {
    for (int r = 0; r < rows; r++) rest(from[r], matrix, to[r], n);
    for (int r = rows; r < 8; r++) from[r] = from[rows - 1], to[r] = to[rows - 1];
    if (rows > 4) product_8(from, matrix, to, n);
    else if (rows > 2) product_4(from, matrix, to, n);
    else if (rows == 2) product_2(from, matrix, to, n);
    else if (rows == 1) product_1(from, matrix, to, n);
}

typedef int32_t lanes __attribute__((vector_size(64)));

/* The largest of n numbers and `least`. */
static float largest(const float *row, int64_t n, float least) {
    vec tops = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vec x = *(const vec *)(row + i);
        const lanes above = x > tops;
        tops = (vec)(((lanes)x & above) | ((lanes)tops & ~above));
    }
    for (int l = 0; l < LANES; l++) least = tops[l] > least ? tops[l] : least;
    for (; i < n; i++) least = row[i] > least ? row[i] : least;
    return least;
}

/* One pass of messages along `batch` chains, forward or in reverse: arrays of (length, batch, n), logarithms of scales of
 * (length, batch). The next message is this one times its leaf times the matrix, which is read once for 8 rows. Every few
 * positions the product with the leaf is divided by its largest entry, which goes into the scale. */
void codd_pass(const float *matrix, const float *leaf, const double *leaf_scale, float *messages, double *scale,
               int64_t length, int64_t batch, int64_t n, int64_t reverse, int64_t every, float tiny) {
    float work[8][n];
    for (int64_t k = 0; k + 1 < length; k++) {
        const int64_t t = reverse ? length - 1 - k : k, next = reverse ? t - 1 : t + 1;
        for (int64_t b = 0; b < batch; b += 8) {
            const float *from[8];
            float *to[8];
            const int rows = batch - b < 8 ? batch - b : 8;
            for (int r = 0; r < rows; r++) {
                const int64_t row = t * batch + b + r;
                float top = 1;
                for (int64_t i = 0; i < n; i++) work[r][i] = messages[row * n + i] * leaf[row * n + i];
                if ((k + 1) % every == 0) {
                    top = largest(work[r], n, tiny);
                    for (int64_t i = 0; i < n; i++) work[r][i] /= top;
                }
                from[r] = work[r], to[r] = messages + (next * batch + b + r) * n;
                scale[next * batch + b + r] = scale[row] + leaf_scale[row] + log(top);
            }
            product(from, matrix, to, rows, n);
        }
    }
}

static inline float sum_of(vec x) {
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += x[l];
    return sum;
}

static float sum_of_row(const float *row, int64_t n) {
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sums += *(const vec *)(row + i);
    float sum = sum_of(sums);
    for (; i < n; i++) sum += row[i];
    return sum;
}

/* row = a times b; returns the smallest entry, and puts the largest into `top`. */
static float multiplied(const float *a, const float *b, float *row, int64_t n, float *top) {
    vec lows = {0}, tops = {0};
    float least;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vec x = *(const vec *)(a + i) * *(const vec *)(b + i);
        const lanes above = x > tops, under = i ? x < lows : x == x;
        tops = (vec)(((lanes)x & above) | ((lanes)tops & ~above));
        lows = (vec)(((lanes)x & under) | ((lanes)lows & ~under));
        *(vec *)(row + i) = x;
    }
    *top = i ? tops[0] : 0, least = i ? lows[0] : a[0] * b[0];
    for (int l = 1; l < LANES && i; l++) *top = tops[l] > *top ? tops[l] : *top, least = lows[l] < least ? lows[l] : least;
    for (; i < n; i++) {
        row[i] = a[i] * b[i];
        *top = row[i] > *top ? row[i] : *top, least = row[i] < least ? row[i] : least;
    }
    return least;
}

static void times(float *row, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) row[i] *= factor;
}

/* log Z of `batch` chains and, unless `posterior` is missing, p(state | evidence) of (length, batch, n), without keeping any
 * message; `leaf` points at the leaf values of each position. Returns 1, with nothing of use, where a product is below
 * `flush` or a sum below `faint`: the caller then looks at what may have been lost. */
int64_t codd_smooth(const float *matrix, const float *transposed, const float *first, const float *const *leaf,
                    float *posterior, double *log_z, int64_t length, int64_t batch, int64_t n, float flush, float faint) {
    float message[8][n], scaled[8][n], top;
    for (int64_t begin = 0; begin < batch; begin += 8) {
        const int rows = batch - begin < 8 ? batch - begin : 8;
        const float *from[8];
        float *to[8];
        for (int r = 0; r < rows; r++)
            for (int64_t i = 0; i < n; i++) message[r][i] = first[i];
        for (int64_t t = 0; t < length; t++) {
            for (int r = 0; r < rows; r++) {
                const int64_t at = t * batch + begin + r;
                float *row = posterior ? posterior + at * n : scaled[r];
                if (!(multiplied(message[r], leaf[at], row, n, &top) >= flush)) return 1;
                times(row, 1 / top, n);
                log_z[begin + r] += log(top);
                from[r] = row, to[r] = message[r];
            }
            if (t + 1 < length) product(from, matrix, to, rows, n);
        }
        for (int r = 0; r < rows; r++) log_z[begin + r] += log(sum_of_row(from[r], n));
        for (int r = 0; posterior && r < rows; r++)
            for (int64_t i = 0; i < n; i++) message[r][i] = 1;
        for (int64_t t = length - 1; posterior && t >= 0; t--) {
            for (int r = 0; r < rows; r++) {
                const int64_t at = t * batch + begin + r;
                float *row = posterior + at * n;
                multiplied(message[r], row, row, n, &top);
                const float sum = sum_of_row(row, n);
                if (!(sum >= faint)) return 1;
                times(row, 1 / sum, n);
                if (!t) continue;
                if (!(multiplied(message[r], leaf[at], scaled[r], n, &top) >= flush)) return 1;
                times(scaled[r], 1 / top, n);
                from[r] = scaled[r], to[r] = message[r];
            }
            if (t) product(from, transposed, to, rows, n);
        }
    }
    return 0;
}

/* One path a sample and sequence by inverse CDF. Returns how many rows summed to less than `faint`: then the caller
 * has to do it in logarithms. */
int64_t codd_path(const float *matrix, const float *first, const float *target, const float *limits, int64_t *path,
                  float *work, int64_t length, int64_t samples, int64_t batch, int64_t n, float faint) {
    const int64_t count = (n + LANES - 1) / LANES;
    float parts[count];
    int64_t weak = 0;
    for (int64_t s = 0; s < samples; s++)
        for (int64_t b = 0; b < batch; b++) {
            const float *row = first;
            for (int64_t t = 0; t < length; t++) {
                const int64_t at = (t * samples + s) * batch + b;
                const float *weights = target + (t * batch + b) * n;
                float total = 0;
                for (int64_t i = 0; i < n; i++) work[i] = row[i] * weights[i];
                for (int64_t i = 0; i < n; i += LANES) parts[i / LANES] = sum_of_row(work + i, n - i < LANES ? n - i : LANES);
                for (int64_t p = 0; p < count; p++) total += parts[p];
                weak += !(total >= faint);
                /* The first state whose cumulative weight passes the limit: first the part that holds it. */
                const float limit = limits[at] * total;
                float below = 0;
                int64_t part = 0;
                while (part + 1 < count && below + parts[part] <= limit) below += parts[part++];
                int64_t state = part * LANES; /* never one without weight, however the sums round */
                for (int64_t i = state; i < n && i < (part + 1) * LANES; i++) {
                    if (work[i] > 0) state = i;
                    if ((below += work[i]) > limit) break;
                }
                path[at] = state;
                row = matrix + state * n;
            }
        }
    return weak;
}

/* Rows times a matrix that lies in panels of 32 columns, (n / 32, depth, 32), each of which is read from its beginning to
 * its end. Some rows and a piece of a panel at a time: the sums stay in registers, the piece in the nearest cache. What
 * a row gets does not depend on the others, to the bit. `out` is all zeros at first. */
#ifdef __AVX512F__
#define ROWS 8
#else
#define ROWS 2 /* of two registers each, of 16 */
#endif
#define PIECE 256
void codd_panels(const float *panels, const float *rows, float *out, int64_t count, int64_t depth, int64_t n) {
    float unused[2 * LANES] = {0};
    for (int64_t j = 0; j < n; j += 2 * LANES)
        for (int64_t begin = 0; begin < depth; begin += PIECE)
            for (int64_t first = 0; first < count; first += ROWS) {
                const float *panel = panels + j * depth, *from[ROWS];
                const int64_t end = begin + PIECE < depth ? begin + PIECE : depth;
                float *to[ROWS];
                for (int r = 0; r < ROWS; r++) {
                    const int64_t row = first + r < count ? first + r : count - 1;
                    from[r] = rows + row * depth, to[r] = first + r < count ? out + row * n + j : unused;
                }
                vec left[ROWS] = {{0}}, right[ROWS] = {{0}};
                for (int64_t i = begin; i < end; i++) {
                    const vec a = *(const vec *)(panel + i * 2 * LANES);
                    const vec b = *(const vec *)(panel + i * 2 * LANES + LANES);
                    _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {
                        left[r] += from[r][i] * a;
                        right[r] += from[r][i] * b;
                    }
                }
                _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {
                    *(vec *)to[r] += left[r];
                    *(vec *)(to[r] + LANES) += right[r];
                }
            }
}

/* Positive numbers in 16 bits: 6 of exponent and 10 of mantissa, from 2^-63 to 2, within one part in 2048. The matrix
 * then fits the cache of a core for more states; `compact` says whether it is kept like that, or as floats. */
typedef uint16_t narrow __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t wide __attribute__((vector_size(4 * LANES)));
#define HIGH_BITS 0x20000000u

static inline vec load(const void *matrix, int64_t at, int compact) {
    if (!compact) return *(const vec *)((const float *)matrix + at);
    return (vec)((__builtin_convertvector(*(const narrow *)((const uint16_t *)matrix + at), wide) << 13) | HIGH_BITS);
}

static inline float load_one(const void *matrix, int64_t at, int compact) {
    if (!compact) return ((const float *)matrix)[at];
    union { uint32_t bits; float value; } one = {((uint32_t)((const uint16_t *)matrix)[at] << 13) | HIGH_BITS};
    return one.value;
}

static float dot(const float *a, const float *b, int64_t n) {
    vec even = {0}, odd = {0};
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        even += *(const vec *)(a + j) * *(const vec *)(b + j);
        odd += *(const vec *)(a + j + LANES) * *(const vec *)(b + j + LANES);
    }
    float sum = sum_of(even + odd);
    for (; j < n; j++) sum += a[j] * b[j];
    return sum;
}

/* One step of both directions, for which the matrix is read once: to = from times matrix, before = matrix times after.
 * Either pair may be missing. Four rows of the matrix at a time. */
#define AT_ONCE 4
static inline __attribute__((always_inline)) void both_ways(const void *matrix, const float *from, float *to,
                                                            const float *after, float *before, int64_t n, int compact) {
    if (to) for (int64_t j = 0; j < n; j++) to[j] = 0;
    for (int64_t i = 0; i < n; i += AT_ONCE) {
        const int rows = n - i < AT_ONCE ? (int)(n - i) : AT_ONCE;
        vec sums[AT_ONCE] = {{0}};
        int64_t j = 0;
        if (rows == AT_ONCE) {
            for (; j + LANES <= n; j += LANES) {
                vec row[AT_ONCE];
                _Pragma("GCC unroll 4") for (int r = 0; r < AT_ONCE; r++) row[r] = load(matrix, (i + r) * n + j, compact);
                if (to) {
                    vec sum = *(vec *)(to + j);
                    _Pragma("GCC unroll 4") for (int r = 0; r < AT_ONCE; r++) sum += from[i + r] * row[r];
                    *(vec *)(to + j) = sum;
                }
                if (before) {
                    const vec next = *(const vec *)(after + j);
                    _Pragma("GCC unroll 4") for (int r = 0; r < AT_ONCE; r++) sums[r] += next * row[r];
                }
            }
        }
        for (int r = 0; r < rows; r++) {
            float sum = sum_of(sums[r]);
            for (int64_t k = j; k < n; k++) {
                const float entry = load_one(matrix, (i + r) * n + k, compact);
                if (to) to[k] += from[i + r] * entry;
                if (before) sum += entry * after[k];
            }
            if (before) before[i + r] = sum;
        }
    }
}

static void step(const void *matrix, const float *from, float *to, const float *after, float *before, int64_t n,
                 int compact) {
    if (compact && to && before) both_ways(matrix, from, to, after, before, n, 1);
    else if (compact && to) both_ways(matrix, from, to, 0, 0, n, 1);
    else if (compact) both_ways(matrix, 0, 0, after, before, n, 1);
    else if (to && before) both_ways(matrix, from, to, after, before, n, 0);
    else if (to) both_ways(matrix, from, to, 0, 0, n, 0);
    else both_ways(matrix, 0, 0, after, before, n, 0);
}

/* Divide by the largest entry, and return it. */
static float to_one(float *row, int64_t n) {
    const float top = largest(row, n, 0);
    const float factor = top > 0 ? 1 / top : 0;
    for (int64_t i = 0; i < n; i++) row[i] *= factor;
    return top;
}

/* A window, of `length` positions, n states and k candidates a position, the heaviest first. */
typedef struct {
    const void *matrix;     /* (n, n), from the state of a row to that of a column */
    const float *columns;   /* (vocabulary, n): the probability of a token in each state */
    const float *latent;    /* (length, n): weights of the states, or nothing */
    float *leaf;            /* (length, n) */
    float *forward;         /* (length, n), of which the first is known */
    float *backward;        /* (length, n), of which the last is known */
    float *work;            /* 2 n */
    const int64_t *candidates; /* (length, k) */
    float *weights;         /* (length, k): p = weight * sum(cavity latent column) / sum(cavity leaf) */
    uint8_t *open;          /* (length,): 1 may be picked, 2 not among the first `least`; 0 closed, as they become */
    const float *given;     /* (length,): for the rule GIVEN, the largest comes first */
    const float *uniforms;  /* (length,): tokens are drawn with these, for the rule LOW_CONFIDENCE; or nothing */
    const int64_t *by_id;   /* (length, k): the candidates' numbers, in the order of the vocabulary, to draw from */
    float *found;           /* (length, k): room for probabilities */
    int64_t length, n, k, compact, rule;
    double power;           /* 1 / temperature, at least 1 */
} window;

#define HEAVIEST 1e20f /* beyond it, what it is multiplied with may have lost digits to the smallest floats */
enum { LOW_CONFIDENCE, MARGIN, GIVEN };
enum { UNSETTLED = -1, FAINT = -2 };

/* Messages forward after position `ahead` up to `high`, and backward before position `behind` down to `low`. */
static int propagate(const window *w, int64_t ahead, int64_t high, int64_t behind, int64_t low) {
    const int64_t n = w->n;
    float *from = w->work, *after = w->work + n;
    while (ahead < high || behind > low) {
        const int on = ahead < high, back = behind > low;
        float *to = on ? w->forward + (ahead + 1) * n : 0, *before = back ? w->backward + (behind - 1) * n : 0;
        for (int64_t i = 0; on && i < n; i++) from[i] = w->forward[ahead * n + i] * w->leaf[ahead * n + i];
        for (int64_t i = 0; back && i < n; i++) after[i] = w->backward[behind * n + i] * w->leaf[behind * n + i];
        step(w->matrix, from, to, after, before, n, (int)w->compact);
        if (on && !(to_one(to, n) > 0)) return FAINT;
        if (back && !(to_one(before, n) > 0)) return FAINT;
        ahead += on;
        behind -= back;
    }
    return 0;
}

/* What is known of a position's distribution from its first candidates; the token that would be taken, -1: unknown. */
typedef struct {
    float best, second, sum;
    int64_t number, seen;
} belief;

/* Look at more candidates of position t, up to `upto`. */
static int look(const window *w, int64_t t, int64_t upto, belief *b, float faint) {
    const int64_t n = w->n;
    const float *f = w->forward + t * n, *g = w->backward + t * n, *leaf = w->leaf + t * n;
    float *cavity = w->work;
    for (int64_t i = 0; i < n; i++) cavity[i] = f[i] * g[i];
    const float total = dot(cavity, leaf, n);
    if (!(total >= faint)) return FAINT;
    for (int64_t i = 0; w->latent && i < n; i++) cavity[i] *= w->latent[t * n + i];
    for (; b->seen < upto; b->seen++) {
        const int64_t at = t * w->k + b->seen;
        const float p = w->weights[at] * dot(cavity, w->columns + w->candidates[at] * n, n) / total;
        w->found[at] = p;
        if (p > b->best) b->second = b->best, b->best = p, b->number = b->seen;
        else if (p > b->second) b->second = p;
        b->sum += p;
    }
    return 0;
}

/* The token that a uniform number draws, by inverse CDF in the order of the vocabulary, if it is the same wherever the
 * probability that was not looked at lies: to a power of one or more, its parts sum to no more than all of it. */
static int64_t drawn(const window *w, int64_t t, const belief *b, float rounding) {
    const float *p = w->found + t * w->k, u = w->uniforms[t], rest = 1 + rounding - b->sum, power = (float)w->power;
    const float tail = rest > 0 ? powf(rest, power) : 0;
    float total = 0, below = 0;
    for (int64_t c = 0; c < b->seen; c++) total += powf(p[c], power);
    for (int64_t r = 0; r < w->k; r++) {
        const int64_t c = w->by_id[t * w->k + r];
        const float more = c < b->seen ? powf(p[c], power) : 0;
        if (below + more > u * (total + tail)) return more > 0 && below <= u * total - (1 - u) * tail ? c : -1;
        below += more;
    }
    return -1;
}

/* Whether a position may be picked: where only those that are due may, `due` is 1. */
static int may(const window *w, int64_t t, int due) { return w->open[t] == 1 || (w->open[t] && !due); }

/* The position that comes first of those that may, with as few candidates as settle it: no token that was not looked at
 * may be better than what comes first. UNSETTLED if all candidates do not suffice. */
static int64_t surest(const window *w, belief *beliefs, int due, int64_t few, float rounding, float faint) {
    for (int64_t t = 0; t < w->length; t++) beliefs[t] = (belief){0};
    for (int64_t t = 0; t < w->length; t++)
        if (may(w, t, due) && look(w, t, few < w->k ? few : w->k, beliefs + t, faint)) return FAINT;
    for (;;) {
        int64_t first = -1;
        float most = 0;
        for (int64_t t = 0; t < w->length; t++) {
            if (!may(w, t, due)) continue;
            belief *b = beliefs + t;
            float order = w->rule == GIVEN ? w->given[t] : w->rule == MARGIN ? b->best - b->second : b->best;
            if (w->uniforms) {
                b->number = drawn(w, t, b, rounding);
                order = b->number < 0 ? -1 : w->found[t * w->k + b->number];
            }
            if (first < 0 || order > most) first = t, most = order;
        }
        int more = 0;
        for (int64_t t = 0; first >= 0 && t < w->length; t++) {
            if (!may(w, t, due) || (w->rule == GIVEN && t != first)) continue;
            belief *b = beliefs + t;
            float rest = 1 - rounding - b->sum;
            rest = rest > 0 ? rest : 0;
            const int lead = w->rule == MARGIN && rest > b->second; /* the lead itself is not certain */
            const float possible = w->rule == MARGIN ? (lead ? (rest > b->best ? rest : b->best) : most) : rest;
            int settled = t == first ? rest <= (w->rule == MARGIN ? b->second : b->best) : possible <= most;
            if (w->uniforms) settled = b->number >= 0 || (rest < most && b->best < most);
            if (settled) continue;
            if (b->seen == w->k) return UNSETTLED;
            if (look(w, t, 2 * b->seen < w->k ? 2 * b->seen : w->k, b, faint)) return FAINT;
            more = 1;
        }
        if (!more) return first;
    }
}

/* Pick positions and their tokens (the most probable ones, or drawn) one after the other, each given those before it:
 * `count` of them, or `least` of those that are due and then while a probability reaches the threshold. Returns how
 * many; `complete` is left at 0 where floats do not suffice for the next (a sum below `faint`), or the candidates. */
int64_t codd_pick(window *w, belief *beliefs, int64_t count, int64_t least, float threshold, int64_t few, float rounding,
                  float faint, int64_t *positions, int64_t *tokens, float *probabilities, int64_t *complete) {
    const int64_t n = w->n, last = w->length - 1;
    int64_t low = last + 1, high = -1, picked = 0, left = 0;
    *complete = 0;
    for (int64_t t = 0; t <= last; t++) {
        if (w->open[t]) low = low > last ? t : low, high = t;
        left += w->open[t] == 1;
        const float top = to_one(w->leaf + t * n, n);
        if (!(top >= faint)) return 0;
        for (int64_t c = 0; c < w->k; c++) {
            w->weights[t * w->k + c] /= top;
            if (w->open[t] && !(w->weights[t * w->k + c] <= HEAVIEST)) return 0;
        }
    }
    if (propagate(w, 0, high, last, low)) return 0;
    while (picked < count && high >= low) {
        const int due = picked < least && left;
        const int64_t t = surest(w, beliefs, due, few, rounding, faint);
        if (t < 0) return picked;
        const int64_t at = t * w->k + beliefs[t].number;
        if (!due && w->found[at] < threshold) break;
        left -= w->open[t] == 1;
        positions[picked] = t;
        tokens[picked] = w->candidates[at];
        probabilities[picked++] = w->found[at];
        const float *column = w->columns + tokens[picked - 1] * n;
        for (int64_t i = 0; i < n; i++) w->leaf[t * n + i] = w->latent ? column[i] * w->latent[t * n + i] : column[i];
        if (!(to_one(w->leaf + t * n, n) > 0)) return picked;
        w->open[t] = 0;
        while (low <= high && !w->open[low]) low++;
        while (high >= low && !w->open[high]) high--;
        if (picked < count && high >= low && propagate(w, t, high, t, low)) return picked;
    }
    *complete = 1;
    return picked;
}

/* Rows of n numbers, each times the exponential of a logarithm. Divide one by its largest entry; whether that is so small
 * that something may have been lost. */
static int scaled(float *row, double *log_of, int64_t n, float small) {
    float top = 0;
    for (int64_t i = 0; i < n; i++) top = row[i] > top ? row[i] : top;
    const int lost = top < small && *log_of > -INFINITY;
    const float factor = 1 / (top > FLT_MIN ? top : FLT_MIN);
    for (int64_t i = 0; i < n; i++) row[i] *= factor;
    *log_of = top > 0 ? *log_of + log(top) : -INFINITY;
    return lost;
}

/* The sum of rows x[xi] times y[yi] over some pairs, or of x[xi] alone where there is no y. */
static int sum_of_pairs(const float *x, const double *x_log, const int64_t *xi, const float *y, const double *y_log,
                        const int64_t *yi, int64_t pairs, int64_t n, float *to, double *to_log, float small) {
    double top = -INFINITY;
    for (int64_t p = 0; p < pairs; p++) {
        const double sum = x_log[xi[p]] + (y ? y_log[yi[p]] : 0);
        top = sum > top ? sum : top;
    }
    for (int64_t i = 0; i < n; i++) to[i] = 0;
    for (int64_t p = 0; top > -INFINITY && p < pairs; p++) {
        const float weight = exp(x_log[xi[p]] + (y ? y_log[yi[p]] : 0) - top), *a = x + xi[p] * n;
        const float *b = y ? y + yi[p] * n : 0;
        if (y) for (int64_t i = 0; i < n; i++) to[i] += weight * a[i] * b[i];
        else for (int64_t i = 0; i < n; i++) to[i] += weight * a[i];
    }
    *to_log = top;
    return scaled(to, to_log, n, small);
}

/* `count` such sums: pairs first[r] to first[r + 1] make row r. Whether something was lost. */
int64_t codd_pair_sums(const float *x, const double *x_log, const int64_t *xi, const float *y, const double *y_log,
                       const int64_t *yi, const int64_t *first, int64_t count, int64_t n, float *to, double *to_log,
                       float small) {
    int64_t lost = 0;
    for (int64_t r = 0; r < count; r++)
        lost |= sum_of_pairs(x, x_log, xi + first[r], y, y_log, yi + first[r], first[r + 1] - first[r], n, to + r * n,
                             to_log + r, small);
    return lost;
}

/* Messages of several positions, one after the other: their sums over pairs of a row of the messages before and one of
 * the leaf values, and these times the matrix. Rows bounds[k] to bounds[k + 1] are those after k positions; the first
 * ones are given and have no sums. lost[k] is given for the leaf values, and returned for all up to there. */
void codd_product_pass(const float *matrix, const float *const *leaf, const double *const *leaf_log, float *sums,
                       double *sums_log, float *rows, double *rows_log, const int64_t *bounds, const int64_t *first,
                       const int64_t *xi, const int64_t *yi, int64_t positions, int64_t n, float small, uint8_t *lost) {
    for (int64_t k = 0; k < positions; k++) {
        const int64_t given = bounds[k], end = bounds[k + 2];
        lost[k] |= k ? lost[k - 1] : 0;
        for (int64_t r = bounds[k + 1]; r < end; r++) {
            const int64_t s = r - bounds[1], begin = first[s];
            lost[k] |= sum_of_pairs(rows + given * n, rows_log + given, xi + begin, leaf[k], leaf_log[k], yi + begin,
                                    first[s + 1] - begin, n, sums + s * n, sums_log + s, small);
            rows_log[r] = sums_log[s];
        }
        for (int64_t r = bounds[k + 1]; r < end; r += 8) {
            const float *from[8];
            float *to[8];
            const int some = end - r < 8 ? end - r : 8;
            for (int i = 0; i < some; i++) from[i] = sums + (r + i - bounds[1]) * n, to[i] = rows + (r + i) * n;
            product(from, matrix, to, some, n);
            for (int i = 0; i < some; i++) lost[k] |= scaled(rows + (r + i) * n, rows_log + r + i, n, small);
        }
    }
}
