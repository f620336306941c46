/* A tile of rows and outputs is a block of registers, each a vector of partial sums over the columns. The order of a sum
depends on the number of columns alone. The weight is read once, as it lies: fp32, int8, or 4 bits in groups. */

#include "product.h"

/* Rows of codes are fetched this many bytes before they are read. */
#define AHEAD 512

/* Outputs of a tile at the most. */
#define TOGETHER 3

typedef struct {
    vec of[TILE_ROWS][TOGETHER];
} tile_sums;

INLINE tile_sums no_sums(const int rows, const int outputs) {
    tile_sums sums;
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 3
        for (int output = 0; output < outputs; output++)
            sums.of[row][output] = (vec){};
    return sums;
}

/* Add products of the next vectors of all rows with those of the outputs. */
INLINE void add(const int rows, const int outputs, const float *x, const vec *weights, tile_sums *sums) {
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        const vec values = load(x + row * LANES);
#pragma GCC unroll 3
        for (int output = 0; output < outputs; output++)
            sums->of[row][output] += values * weights[output];
    }
}

INLINE void plain_tile(
    const int rows, const int outputs, const weight *w, const float *x, int64_t columns, int64_t first, float *out) {
    const float *data = (const float *)w->data + first * columns;
    tile_sums sums = no_sums(rows, outputs);
    vec weights[TOGETHER];
    int64_t column = 0;
    for (; column + LANES <= columns; column += LANES, x += rows * LANES) {
#pragma GCC unroll 3
        for (int output = 0; output < outputs; output++) {
            weights[output] = load(data + output * columns + column);
            __builtin_prefetch(data + (output + outputs) * columns + column, 0, 2);
        }
        add(rows, outputs, x, weights, &sums);
    }
    for (int row = 0; row < rows; row++)
        for (int output = 0; output < outputs; output++) {
            float sum = total(sums.of[row][output]);
            for (int64_t rest = column; rest < columns; rest++)
                sum += x[row * LANES + rest - column] * data[output * columns + rest];
            out[row * CHUNK + output] = sum;
        }
}

INLINE void int8_tile(
    const int rows, const int outputs, const weight *w, const float *x, int64_t columns, int64_t first, float *out) {
    const int8_t *data = (const int8_t *)w->data + first * columns;
    tile_sums sums = no_sums(rows, outputs);
    vec weights[TOGETHER];
    for (int64_t column = 0; column < columns; column += LANES, x += rows * LANES) {
#pragma GCC unroll 3
        for (int output = 0; output < outputs; output++) {
            const int8_t *codes = data + output * columns + column;
            weights[output] = __builtin_convertvector(widen(codes), vec);
            __builtin_prefetch(codes + AHEAD);
        }
        add(rows, outputs, x, weights, &sums);
    }
    for (int row = 0; row < rows; row++)
        for (int output = 0; output < outputs; output++)
            out[row * CHUNK + output] = total(sums.of[row][output]) * w->scales[first + output];
}

/* What the 16 codes of a group stand for. */
#if LANES == 16
typedef vec grid;
INLINE grid grid_of(float scale, float zero) {
    const vec codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (codes - zero) * scale;
}
/* Only the lowest four bits of a code count. */
INLINE vec values_of(ivec codes, grid values) { return __builtin_shuffle(values, codes); }
#else
typedef struct {
    float scale, zero;
} grid;
INLINE grid grid_of(float scale, float zero) { return (grid){scale, zero}; }
INLINE vec values_of(ivec codes, grid values) {
    return (__builtin_convertvector(codes & 15, vec) - values.zero) * values.scale;
}
#endif

INLINE void int4_tile(
    const int rows, const int outputs, const weight *w, const float *x, int64_t columns, int64_t first, float *out) {
    const int64_t half = w->group / 2, groups = columns / w->group, bytes = columns / 2;
    const uint8_t *data = (const uint8_t *)w->data + first * bytes;
    tile_sums sums = no_sums(rows, outputs);
    for (int64_t group = 0; group < groups; group++, x += half * rows) {
        grid grids[TOGETHER];
#pragma GCC unroll 3
        for (int output = 0; output < outputs; output++) {
            const int64_t place = (first + output) * groups + group;
            grids[output] = grid_of(w->scales[place], w->zeros ? w->zeros[place] : 8);
        }
        for (int64_t at = group * half; at < (group + 1) * half; at += LANES, x += rows * LANES) {
            vec low[TOGETHER], high[TOGETHER];
#pragma GCC unroll 3
            for (int output = 0; output < outputs; output++) {
                const uint8_t *both = data + output * bytes + at;
                const ivec codes = widen_unsigned(both);
                low[output] = values_of(codes, grids[output]);
                high[output] = values_of(codes >> 4, grids[output]);
                __builtin_prefetch(both + AHEAD);
            }
            add(rows, outputs, x, low, &sums);
            add(rows, outputs, x + half * rows, high, &sums);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int output = 0; output < outputs; output++)
            out[row * CHUNK + output] = total(sums.of[row][output]);
}

#define CASE(tile, count, together)                                                                                    \
    case count:                                                                                                        \
        for (; output + together <= outputs; output += together)                                                       \
            tile(count, together, w, x, columns, first + output, out + output);                                        \
        for (; output < outputs; output++)                                                                             \
            tile(count, 1, w, x, columns, first + output, out + output);                                               \
        break;

#if TILE_ROWS == 8
#define MORE_CASES(tile, together)                                                                                     \
    CASE(tile, 5, together) CASE(tile, 6, together) CASE(tile, 7, together) CASE(tile, 8, together)
#else
#define MORE_CASES(tile, together)
#endif

/* `together` outputs at a time: their sums and weights have to fit the registers. */
#define PRODUCT(name, tile, together)                                                                                  \
    static void name(                                                                                                  \
        const weight *w, int64_t rows, const float *x, int64_t columns, int64_t first, int64_t outputs, float *out) {  \
        int64_t output = 0;                                                                                            \
        switch (rows) {                                                                                                \
            CASE(tile, 1, together) CASE(tile, 2, together) CASE(tile, 3, together) CASE(tile, 4, together)            \
            MORE_CASES(tile, together)                                                                                 \
        }                                                                                                              \
    }

PRODUCT(plain_product, plain_tile, 3)
PRODUCT(int8_product, int8_tile, 3)
PRODUCT(int4_product, int4_tile, 2)

void part_product(
    const weight *w, int64_t rows, const float *x, int64_t columns, int64_t first, int64_t outputs, float *out) {
    if (!w->scales)
        plain_product(w, rows, x, columns, first, outputs, out);
    else if (w->bits == 8)
        int8_product(w, rows, x, columns, first, outputs, out);
    else
        int4_product(w, rows, x, columns, first, outputs, out);
}

void decode_outputs(const weight *w, int64_t columns, int64_t first, int64_t outputs, float *out) {
    const int64_t half = w->group / 2, groups = columns / w->group;
    for (int64_t output = first; output < first + outputs; output++, out += columns) {
        if (w->bits == 8) {
            const int8_t *data = (const int8_t *)w->data + output * columns;
            for (int64_t column = 0; column < columns; column += LANES)
                store(out + column, __builtin_convertvector(widen(data + column), vec) * w->scales[output]);
            continue;
        }
        const uint8_t *data = (const uint8_t *)w->data + output * columns / 2;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t place = output * groups + group;
            const grid values = grid_of(w->scales[place], w->zeros ? w->zeros[place] : 8);
            for (int64_t at = 0; at < half; at += LANES) {
                const ivec codes = widen_unsigned(data + group * half + at);
                store(out + group * w->group + at, values_of(codes, values));
                store(out + group * w->group + half + at, values_of(codes >> 4, values));
            }
        }
    }
}
