/* A linear layer of a few fp32 rows, bound by reading the weight once. */

#include <math.h>
#include <omp.h>

#include "product.h"

typedef struct {
    const float *x;
    int64_t rows, columns, padded, parts;
} input;

INLINE int64_t first_row(const input *in, int64_t part) { return in->rows * part / in->parts; }

/* The product of all rows with at most CHUNK outputs from `first` on, to [rows, CHUNK]. Codes that several parts read
are decoded once, to `decoded`. */
static void product(const input *in, const weight *w, int64_t first, int64_t outputs, float *decoded, float *out) {
    const weight plain = {decoded, 0, 0, 0, FP32};
    if (w->kind != FP32 && in->parts > 1) {
        decode_outputs(w, in->columns, first, outputs, decoded);
        w = &plain;
        first = 0;
    }
    for (int64_t part = 0; part < in->parts; part++) {
        const int64_t row = first_row(in, part), count = first_row(in, part + 1) - row;
        part_product(w, count, in->x + row * in->padded, in->columns, first, outputs, out + row * CHUNK);
    }
}

/* Arrange a row among the `count` rows of its part, normalised if there is a norm. */
static void arrange(const float *x, int64_t columns, const float *norm, float eps, int64_t count, float *out) {
    float scale = 1.0f;
    if (norm) {
        vec squares = {};
        int64_t column = 0;
        for (; column + LANES <= columns; column += LANES)
            squares = add_product(squares, load(x + column), load(x + column));
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
    float *decoded = s->decoded ? s->decoded + omp_get_thread_num() * CHUNK * columns : 0;
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
            product(&in, &s->weight, first, count, decoded, sums);
            if (gate_block)
                product(&in, &s->weight, first + block, count, decoded, ups);
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

/* Write what the codes of a weight stand for, [outputs, columns]. */
void piledriver_dequantise(const weight *w, int64_t outputs, int64_t columns, float *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < outputs; first += CHUNK) {
        const int64_t count = first + CHUNK < outputs ? CHUNK : outputs - first;
        decode_outputs(w, columns, first, count, out + first * columns);
    }
}
