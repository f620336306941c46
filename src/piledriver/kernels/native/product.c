/* A tile of rows and outputs is a block of registers, each a vector of partial sums over the columns. The order of a sum
depends on the number of columns alone. The weight is read once, as it lies: fp32, or as codes. */

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
            sums->of[row][output] = add_product(sums->of[row][output], values, weights[output]);
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
    if (column < columns) {
        /* A vector filled up with zeros, as the input is. */
        for (int output = 0; output < outputs; output++) {
            weights[output] = (vec){};
            memcpy(weights + output, data + output * columns + column, (columns - column) * sizeof *data);
        }
        add(rows, outputs, x, weights, &sums);
    }
    for (int row = 0; row < rows; row++)
        for (int output = 0; output < outputs; output++)
            out[row * CHUNK + output] = total(sums.of[row][output]);
}

/* The values of e4m3 codes: their exponent and fraction as those of a number that is too small by 2^120. */
INLINE vec fp8_values(ivec codes) {
    return (vec)((codes & 127) << 20 | (codes & 128) << 24) * 0x1p120f;
}

INLINE vec byte_values(const int kind, const void *at) {
    return kind == FP8 ? fp8_values(widen_unsigned(at)) : __builtin_convertvector(widen(at), vec);
}

/* Codes of a byte. If there is one group, the sum is scaled, otherwise the values. */
INLINE void byte_tile(
    const int kind, const int grouped, const int rows, const int outputs, const weight *w, const float *x,
    int64_t columns, int64_t first, float *out) {
    const int8_t *data = (const int8_t *)w->data + first * columns;
    const int64_t group = grouped ? w->group : columns, groups = columns / group;
    tile_sums sums = no_sums(rows, outputs);
    for (int64_t begin = 0; begin < columns; begin += group) {
        const float *scales = w->scales + first * groups + begin / group;
        for (int64_t column = begin; column < begin + group; column += LANES, x += rows * LANES) {
            vec weights[TOGETHER];
#pragma GCC unroll 3
            for (int output = 0; output < outputs; output++) {
                const int8_t *codes = data + output * columns + column;
                weights[output] = byte_values(kind, codes) * (grouped ? scales[output * groups] : 1.0f);
                __builtin_prefetch(codes + AHEAD);
            }
            add(rows, outputs, x, weights, &sums);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int output = 0; output < outputs; output++)
            out[row * CHUNK + output] = total(sums.of[row][output]) * (grouped ? 1.0f : w->scales[first + output]);
}

#define BYTE_TILE(name, kind, grouped)                                                                                 \
    INLINE void name(                                                                                                  \
        const int rows, const int outputs, const weight *w, const float *x, int64_t columns, int64_t first,            \
        float *out) {                                                                                                  \
        byte_tile(kind, grouped, rows, outputs, w, x, columns, first, out);                                            \
    }

BYTE_TILE(int8_tile, INT8, 0)
BYTE_TILE(fp8_tile, FP8, 0)
BYTE_TILE(grouped_fp8_tile, FP8, 1)

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
PRODUCT(fp8_product, fp8_tile, 3)
PRODUCT(grouped_fp8_product, grouped_fp8_tile, 3)
PRODUCT(int4_product, int4_tile, 2)

void part_product(
    const weight *w, int64_t rows, const float *x, int64_t columns, int64_t first, int64_t outputs, float *out) {
    if (w->kind == FP32)
        plain_product(w, rows, x, columns, first, outputs, out);
    else if (w->kind == INT8)
        int8_product(w, rows, x, columns, first, outputs, out);
    else if (w->kind == INT4)
        int4_product(w, rows, x, columns, first, outputs, out);
    else if (w->group == columns)
        fp8_product(w, rows, x, columns, first, outputs, out);
    else
        grouped_fp8_product(w, rows, x, columns, first, outputs, out);
}

void decode_outputs(const weight *w, int64_t columns, int64_t first, int64_t outputs, float *out) {
    const int64_t half = w->group / 2, groups = columns / w->group;
    for (int64_t output = first; output < first + outputs; output++, out += columns) {
        if (w->kind != INT4) {
            const int8_t *data = (const int8_t *)w->data + output * columns;
            for (int64_t column = 0; column < columns; column += LANES) {
                const vec values = w->kind == FP8 ? byte_values(FP8, data + column) : byte_values(INT8, data + column);
                store(out + column, values * w->scales[output * groups + column / w->group]);
            }
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
