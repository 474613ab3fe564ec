/* The two sequential loops of the engine on a CPU, for float32 and one dense matrix.
 * Compiled on first use by native.py; NumPy does the same where there is no compiler. */
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

/* Along one chain or several of equal length: arrays of (length, batch, n), norms of (length, batch). */
typedef struct {
    const float *leaf;
    float *products, *messages, *norms;
    int64_t length, batch, reverse, keep; /* keep: `messages` has a row for each position, else one for all */
} chain_pass;

/* Position t of a pass, its rescaling included: products[t] = message t times leaf t. */
static void advance(const chain_pass *p, int64_t t, int64_t n, int rescale, float tiny) {
    const int64_t size = p->batch * n;
    const float *message = p->messages + (p->keep ? t * size : 0);
    float *row = p->products + t * size;
    for (int64_t i = 0; i < size; i++) row[i] = message[i] * p->leaf[t * size + i];
    for (int64_t b = 0; rescale && b < p->batch; b++, row += n) {
        float top = tiny;
        for (int64_t i = 0; i < n; i++) top = row[i] > top ? row[i] : top;
        for (int64_t i = 0; i < n; i++) row[i] /= top;
        p->norms[t * p->batch + b] = top;
    }
}

/* Passes that have nothing in common but the matrix, which is read once for 8 rows of any of them: the next message is
 * products[t] times matrix. Every few positions a row is divided by its largest entry, which goes into norms. */
void codd_run_passes(const float *matrix, const chain_pass *passes, int64_t count, int64_t n, int64_t every, float tiny) {
    const float *from[8];
    float *to[8];
    int64_t going = 1;
    for (int64_t k = 0; going; k++) {
        int rows = 0;
        going = 0;
        for (const chain_pass *p = passes; p < passes + count; p++) {
            if (k >= p->length) continue;
            const int64_t t = p->reverse ? p->length - 1 - k : k;
            advance(p, t, n, (k + 1) % every == 0, tiny);
            if (k + 1 == p->length) continue;
            going = 1;
            for (int64_t b = 0; b < p->batch; b++) {
                from[rows] = p->products + (t * p->batch + b) * n;
                to[rows] = p->messages + ((p->keep ? (p->reverse ? t - 1 : t + 1) : 0) * p->batch + b) * n;
                if (++rows == 8) product(from, matrix, to, rows, n), rows = 0;
            }
        }
        if (rows) product(from, matrix, to, rows, n);
    }
}

/* One path a sample and sequence by inverse CDF. Returns how many rows summed to less than `faint`: then the caller
 * has to do it in logarithms. */
int64_t codd_path(const float *matrix, const float *first, const float *target, const float *limits, int64_t *path,
                  float *work, int64_t length, int64_t samples, int64_t batch, int64_t n, float faint) {
    int64_t weak = 0;
    for (int64_t s = 0; s < samples; s++)
        for (int64_t b = 0; b < batch; b++) {
            const float *row = first;
            for (int64_t t = 0; t < length; t++) {
                const int64_t at = (t * samples + s) * batch + b;
                const float *weights = target + (t * batch + b) * n;
                float total = 0;
                for (int64_t i = 0; i < n; i++) work[i] = row[i] * weights[i];
                for (int64_t i = 0; i < n; i++) work[i] = total += work[i];
                weak += !(total >= faint);
                const float limit = limits[at] * total;
                int64_t state = 0; /* the first whose cumulative weight passes the limit: they grow, so halve */
                for (int64_t low = 0, high = n - 1; low <= high;) {
                    const int64_t middle = (low + high) / 2;
                    if (work[middle] > limit) { state = middle; high = middle - 1; } else low = middle + 1;
                }
                path[at] = state;
                row = matrix + state * n;
            }
        }
    return weak;
}
