/* A linear layer of a few fp32 rows, bound by reading the weight once, as it lies: [outputs, columns].

A tile of rows and outputs is a block of registers, each a vector of partial sums over the columns. The order of a sum
depends on the number of columns alone. The input is arranged in parts of up to TILE_ROWS rows: the first vectors of all
rows, then the second ones, and so on, zeros at the end. */

#include <math.h>

#include "step.h"
#include "vector.h"

#define TILE_ROWS (REGISTERS / 4)
#define OUTPUTS 3
#define CHUNK 48

INLINE void tile(const int rows, const int outputs, const float *x, const float *weight, int64_t columns, float *out) {
    vec sums[TILE_ROWS][OUTPUTS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 3
        for (int output = 0; output < outputs; output++)
            sums[row][output] = (vec){};
    int64_t column = 0;
    for (; column + LANES <= columns; column += LANES) {
        vec weights[OUTPUTS];
#pragma GCC unroll 3
        for (int output = 0; output < outputs; output++) {
            weights[output] = load(weight + output * columns + column);
            __builtin_prefetch(weight + (output + OUTPUTS) * columns + column, 0, 2);
        }
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const vec values = load(x + row * LANES);
#pragma GCC unroll 3
            for (int output = 0; output < outputs; output++)
                sums[row][output] += values * weights[output];
        }
        x += rows * LANES;
    }
    for (int row = 0; row < rows; row++)
        for (int output = 0; output < outputs; output++) {
            float sum = total(sums[row][output]);
            for (int64_t rest = column; rest < columns; rest++)
                sum += x[row * LANES + rest - column] * weight[output * columns + rest];
            out[row * CHUNK + output] = sum;
        }
}

#define CASE(count)                                                                                                    \
    case count:                                                                                                        \
        for (; output + OUTPUTS <= outputs; output += OUTPUTS)                                                         \
            tile(count, OUTPUTS, x, weight + output * columns, columns, out + output);                                 \
        for (; output < outputs; output++)                                                                             \
            tile(count, 1, x, weight + output * columns, columns, out + output);                                       \
        break;

/* The product of a part of the rows with some outputs. */
static void part_product(
    int64_t rows, const float *x, const float *weight, int64_t columns, int64_t outputs, float *out) {
    int64_t output = 0;
    switch (rows) {
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
#if TILE_ROWS == 8
        CASE(5)
        CASE(6)
        CASE(7)
        CASE(8)
#endif
    }
}

typedef struct {
    const float *x;
    int64_t rows, columns, padded, parts;
} input;

INLINE int64_t first_row(const input *in, int64_t part) { return in->rows * part / in->parts; }

/* The product of all rows with at most CHUNK outputs, to [rows, CHUNK]. */
static void product(const input *in, const float *weight, int64_t outputs, float *out) {
    for (int64_t part = 0; part < in->parts; part++) {
        const int64_t first = first_row(in, part), count = first_row(in, part + 1) - first;
        part_product(count, in->x + first * in->padded, weight, in->columns, outputs, out + first * CHUNK);
    }
}

/* Arrange a row among the `count` rows of its part, normalised if there is a norm. */
static void arrange(const float *x, int64_t columns, const float *norm, float eps, int64_t count, float *out) {
    float scale = 1.0f;
    if (norm) {
        vec squares = {};
        int64_t column = 0;
        for (; column + LANES <= columns; column += LANES)
            squares += load(x + column) * load(x + column);
        float sum = total(squares);
        for (; column < columns; column++)
            sum += x[column] * x[column];
        scale = 1.0f / sqrtf(sum / (float)columns + eps);
    }
    for (int64_t column = 0; column < columns; column += LANES, out += count * LANES) {
        if (column + LANES <= columns) {
            const vec values = load(x + column);
            store(out, norm ? values * scale * load(norm + column) : values);
        } else
            for (int64_t at = 0; at < LANES; at++)
                out[at] = column + at >= columns ? 0.0f : norm ? x[column + at] * scale * norm[column + at] : x[column + at];
    }
}

/* silu(gate) * up. */
static void gate(const float *gates, const float *ups, int64_t count, float *out) {
    for (int64_t at = 0; at < count; at += LANES) {
        if (at + LANES <= count) {
            const vec x = load(gates + at);
            store(out + at, x / (1.0f + exponential(-x)) * load(ups + at));
        } else
            for (; at < count; at++)
                out[at] = gates[at] / (1.0f + expf(-gates[at])) * ups[at];
    }
}

/* silu(gate) * up of [rows, 2 * units], whose columns alternate in blocks. */
void piledriver_gate(const float *x, float *out, int64_t rows, int64_t units, int64_t block, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t unit = 0; unit < units; unit += block) {
            const float *gates = x + 2 * (row * units + unit);
            gate(gates, gates + block, block, out + row * units + unit);
        }
}

void linear_in_team(const linear_step *s) {
    const int64_t rows = s->rows, columns = s->columns, gate_block = s->gate_block;
    const int64_t units = gate_block ? s->outputs / 2 : s->outputs;
    const int64_t block = gate_block ? gate_block : s->outputs;
    const int64_t padded = (columns + LANES - 1) / LANES * LANES;
    const input in = {s->arranged, rows, columns, padded, (rows + TILE_ROWS - 1) / TILE_ROWS};
    float sums[rows * CHUNK], ups[rows * CHUNK];
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        int64_t part = 0;
        while (first_row(&in, part + 1) <= row)
            part++;
        const int64_t first = first_row(&in, part), count = first_row(&in, part + 1) - first;
        float *to = s->arranged + first * padded + (row - first) * LANES;
        arrange(s->x + row * columns, columns, s->norm, s->eps, count, to);
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t begin = 0; begin < units; begin += CHUNK) {
        const int64_t end = begin + CHUNK < units ? begin + CHUNK : units;
        for (int64_t unit = begin, count; unit < end; unit += count) {
            const int64_t inside = unit % block;
            count = end - unit < block - inside ? end - unit : block - inside;
            const int64_t first = gate_block ? 2 * unit - inside : unit;
            product(&in, s->weight + first * columns, count, sums);
            if (gate_block)
                product(&in, s->weight + (first + block) * columns, count, ups);
            for (int64_t row = 0; row < rows; row++) {
                float *sum = sums + row * CHUNK, *up = ups + row * CHUNK;
                for (int64_t at = 0; s->bias && at < count; at++) {
                    sum[at] += s->bias[first + at];
                    if (gate_block)
                        up[at] += s->bias[first + block + at];
                }
                if (gate_block)
                    gate(sum, up, count, sum);
                float *to = s->out + row * units + unit;
                const float *from = s->residual ? s->residual + row * units + unit : 0;
                for (int64_t at = 0; at < count; at++)
                    to[at] = from ? sum[at] + from[at] : sum[at];
            }
        }
    }
}

void piledriver_linear(const linear_step *s) {
#pragma omp parallel num_threads(s->threads)
    linear_in_team(s);
}
