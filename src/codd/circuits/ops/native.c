/* The two sequential loops of the engine on a CPU, for float32 and one dense matrix.
 * Compiled on first use by native.py; NumPy does the same where there is no compiler. */
#include <stdint.h>
#include <string.h>

typedef float vec __attribute__((vector_size(64), aligned(4))); /* one register of AVX-512, two of AVX2 */
#define LANES 16

/* out[r][0..n) = rows[r][0..n) times matrix, for R rows at once: their sums stay in registers. */
#define PRODUCT(R)                                                                                  \
    static void product_##R(const float *rows, const float *matrix, float *out, int64_t n) {        \
        int64_t j = 0;                                                                              \
        for (; j + 2 * LANES <= n; j += 2 * LANES) {                                                \
            vec left[R] = {{0}}, right[R] = {{0}};                                                  \
            for (int64_t i = 0; i < n; i++) {                                                       \
                const vec a = *(const vec *)(matrix + i * n + j);                                   \
                const vec b = *(const vec *)(matrix + i * n + j + LANES);                           \
                _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                               \
                    left[r] += rows[r * n + i] * a;                                                 \
                    right[r] += rows[r * n + i] * b;                                                \
                }                                                                                   \
            }                                                                                       \
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                   \
                *(vec *)(out + r * n + j) = left[r];                                                \
                *(vec *)(out + r * n + j + LANES) = right[r];                                       \
            }                                                                                       \
        }                                                                                           \
        for (; j < n; j++)                                                                          \
            for (int r = 0; r < R; r++) {                                                           \
                float sum = 0;                                                                      \
                for (int64_t i = 0; i < n; i++) sum += rows[r * n + i] * matrix[i * n + j];         \
                out[r * n + j] = sum;                                                               \
            }                                                                                       \
    }
PRODUCT(8)
PRODUCT(4)
PRODUCT(1)

static void product(const float *rows, const float *matrix, float *out, int64_t batch, int64_t n) {
    int64_t b = 0;
    for (; b + 8 <= batch; b += 8) product_8(rows + b * n, matrix, out + b * n, n);
    for (; b + 4 <= batch; b += 4) product_4(rows + b * n, matrix, out + b * n, n);
    for (; b < batch; b++) product_1(rows + b * n, matrix, out + b * n, n);
}

/* products[t] = message t times leaf t; the next message is products[t] times matrix. Every few positions a row is
 * divided by its largest entry, which goes into norms. `messages` has a row for each position, or one for all. */
void codd_walk(const float *matrix, const float *leaf, float *products, float *messages, float *norms,
               int64_t length, int64_t batch, int64_t n, int64_t reverse, int64_t keep, int64_t every, float tiny) {
    const int64_t size = batch * n;
    for (int64_t k = 0; k < length; k++) {
        const int64_t t = reverse ? length - 1 - k : k;
        const float *message = messages + (keep ? t * size : 0);
        float *row = products + t * size;
        for (int64_t i = 0; i < size; i++) row[i] = message[i] * leaf[t * size + i];
        if ((k + 1) % every == 0)
            for (int64_t b = 0; b < batch; b++) {
                float top = tiny;
                for (int64_t i = 0; i < n; i++) top = row[b * n + i] > top ? row[b * n + i] : top;
                for (int64_t i = 0; i < n; i++) row[b * n + i] /= top;
                norms[t * batch + b] = top;
            }
        if (k + 1 < length) product(row, matrix, messages + (keep ? (reverse ? t - 1 : t + 1) * size : 0), batch, n);
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
