/* Attention of one new token a sequence over pages of keys and values, [blocks, kv_heads, size, dim] in fp32. */

#include <omp.h>

#include "step.h"
#include "vector.h"

/* Rotate the halves of the first `rotary` numbers by angles (cosines, then sines); copy the others. */
static void rotate(const float *x, const float *angles, int64_t rotary, int64_t dim, float *out) {
    const int64_t half = rotary / 2;
    int64_t at = 0;
    for (; at + LANES <= half; at += LANES) {
        const vec first = load(x + at), second = load(x + half + at);
        const vec cosines = load(angles + at), sines = load(angles + half + at);
        store(out + at, first * cosines - second * sines);
        store(out + half + at, second * cosines + first * sines);
    }
    for (; at < half; at++) {
        const float first = x[at], second = x[half + at], cosine = angles[at], sine = angles[half + at];
        out[at] = first * cosine - second * sine;
        out[half + at] = second * cosine + first * sine;
    }
    memcpy(out + rotary, x + rotary, (dim - rotary) * sizeof(float));
}

/* Where the row of a token is in pages. */
INLINE int64_t place(int64_t slot, int64_t head, int64_t heads, int64_t size, int64_t dim) {
    return ((slot / size * heads + head) * size + slot % size) * dim;
}

/* Split projections of tokens, grouped by key-value head: `group` queries, the key, the value. Rotate queries and keys;
store keys and values in their pages. */
void piledriver_rotate_and_store(
    const float *projected, const float *angles, const int64_t *positions, float *keys, float *values,
    const int64_t *slots, float *queries, int64_t tokens, int64_t kv_heads, int64_t group, int64_t dim, int64_t rotary,
    int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t token = 0; token < tokens; token++) {
        const float *turns = angles + positions[token] * rotary;
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t item = token * kv_heads + head, to = place(slots[token], head, kv_heads, size, dim);
            const float *from = projected + item * (group + 2) * dim;
            for (int64_t query = 0; query < group; query++)
                rotate(from + query * dim, turns, rotary, dim, queries + (item * group + query) * dim);
            rotate(from + group * dim, turns, rotary, dim, keys + to);
            memcpy(values + to, from + (group + 1) * dim, dim * sizeof(float));
        }
    }
}

/* The rows of one head in a page; those of the next page are fetched meanwhile. */
typedef struct {
    const float *rows, *next;
    int64_t count;
} page;

INLINE page find_page(
    const float *pages, const int32_t *table, int64_t position, int64_t context, int64_t size, int64_t heads,
    int64_t head, int64_t dim) {
    const int64_t inside = position % size, left = context - position, block = position / size;
    const float *rows = pages + ((table[block] * heads + head) * size + inside) * dim;
    const int64_t count = left < size - inside ? left : size - inside;
    const float *next = left > count ? pages + (table[block + 1] * heads + head) * size * dim : rows;
    return (page){rows, next, count};
}

INLINE void fetch(const float *row, const int64_t dim) {
    for (int64_t at = 0; at < dim; at += 16)
        __builtin_prefetch(row + at);
}

INLINE void score(page keys, const float *query, const int64_t dim, float scale, float *scores) {
    for (int64_t row = 0; row < keys.count; row++) {
        fetch(keys.next + row * dim, dim);
        vec sum = {};
        for (int64_t at = 0; at < dim; at += LANES)
            sum = add_product(sum, load(query + at), load(keys.rows + row * dim + at));
        scores[row] = total(sum) * scale;
    }
}

INLINE void mix(page values, const float *weights, const int64_t dim, float *out) {
    /* 64 numbers at a time stay in registers. */
    for (int64_t begin = 0; begin < dim; begin += 64) {
        const int64_t width = dim - begin < 64 ? dim - begin : 64;
        vec sums[64 / LANES];
        for (int64_t at = 0; at < width; at += LANES)
            sums[at / LANES] = load(out + begin + at);
        for (int64_t row = 0; row < values.count; row++) {
            fetch(values.next + row * dim + begin, width);
            for (int64_t at = 0; at < width; at += LANES) {
                const vec value = load(values.rows + row * dim + begin + at);
                sums[at / LANES] = add_product(sums[at / LANES], all(weights[row]), value);
            }
        }
        for (int64_t at = 0; at < width; at += LANES)
            store(out + begin + at, sums[at / LANES]);
    }
}

/* Replace scores by e^(score - largest); return 1 / their sum. */
static float soften(float *scores, int64_t count) {
    float largest = scores[0];
    vec most = all(largest);
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        const vec some = load(scores + at);
        most = choose(some > most, some, most);
    }
    for (int lane = 0; lane < LANES; lane++)
        largest = most[lane] > largest ? most[lane] : largest;
    for (; at < count; at++)
        largest = scores[at] > largest ? scores[at] : largest;
    vec sums = {};
    for (at = 0; at + LANES <= count; at += LANES) {
        const vec weights = exponential(load(scores + at) - largest);
        store(scores + at, weights);
        sums += weights;
    }
    float sum = total(sums), rest[LANES] = {0};
    memcpy(rest, scores + at, (count - at) * sizeof(float));
    store(rest, exponential(load(rest) - largest));
    for (int64_t lane = 0; lane < count - at; lane++)
        sum += scores[at + lane] = rest[lane];
    return 1.0f / sum;
}

INLINE void attend(const attention_step *s, int64_t row, int64_t head, const int64_t dim, float *scores) {
    const float *from = s->projected + (row * s->kv_heads + head) * (s->group + 2) * dim;
    const int32_t *table = s->tables + row * s->table_width;
    float *out = s->out + (row * s->kv_heads + head) * s->group * dim;
    const int64_t context = s->contexts[row], group = s->group;
    const float *angles = s->angles + (context - 1) * s->rotary;
    const int64_t first = s->window && context > s->window ? context - s->window : 0;
    float queries[MOST_QUERY];
    for (int64_t query = 0; query < group; query++)
        rotate(from + query * dim, angles, s->rotary, dim, queries + query * dim);
    for (int64_t at = first; at < context;) {
        const page keys = find_page(s->keys, table, at, context, s->size, s->kv_heads, head, dim);
        for (int64_t query = 0; query < group; query++)
            score(keys, queries + query * dim, dim, s->scale, scores + query * s->scores_width + at - first);
        at += keys.count;
    }
    memset(out, 0, group * dim * sizeof(float));
    float inverse[group];
    for (int64_t query = 0; query < group; query++)
        inverse[query] = soften(scores + query * s->scores_width, context - first);
    for (int64_t at = first; at < context;) {
        const page values = find_page(s->values, table, at, context, s->size, s->kv_heads, head, dim);
        for (int64_t query = 0; query < group; query++)
            mix(values, scores + query * s->scores_width + at - first, dim, out + query * dim);
        at += values.count;
    }
    for (int64_t query = 0; query < group; query++)
        for (int64_t at = 0; at < dim; at++)
            out[query * dim + at] *= inverse[query];
}

void attend_in_team(const attention_step *s) {
#pragma omp for schedule(static)
    for (int64_t item = 0; item < s->rows * s->kv_heads; item++) {
        const int64_t row = item / s->kv_heads, head = item % s->kv_heads;
        const int64_t to = place(s->slots[row], head, s->kv_heads, s->size, s->dim);
        const float *key = s->projected + (item * (s->group + 2) + s->group) * s->dim;
        rotate(key, s->angles + (s->contexts[row] - 1) * s->rotary, s->rotary, s->dim, s->keys + to);
        memcpy(s->values + to, key + s->dim, s->dim * sizeof(float));
    }
    float *scores = s->scores + omp_get_thread_num() * s->group * s->scores_width;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < s->rows * s->kv_heads; item++) {
        const int64_t row = item / s->kv_heads, head = item % s->kv_heads;
        if (s->dim == 64)
            attend(s, row, head, 64, scores);
        else if (s->dim == 128)
            attend(s, row, head, 128, scores);
        else
            attend(s, row, head, s->dim, scores);
    }
}

void piledriver_attend(const attention_step *s) {
#pragma omp parallel num_threads(s->threads)
    attend_in_team(s);
}
