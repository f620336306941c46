/* The blocks of a Llama-like model for one new token of a few sequences, in one team of threads. */

#include "step.h"

typedef struct {
    weight qkv, out, gate_up, down;
    const float *attention_norm, *qkv_bias, *out_bias, *mlp_norm, *gate_up_bias, *down_bias;
    float *keys, *values;
    int64_t window, gate_block;
} block;

/* `x` is the residual stream of [rows, dim], changed in place. The others are memory for results on the way. */
typedef struct {
    const block *blocks;
    float *x, *projected, *mixed, *gated, *arranged, *decoded;
    int64_t count, dim, mlp_dim;
    float eps;
    attention_step attention;
} decode_step;

void piledriver_decode(const decode_step *s) {
    attention_step attention = s->attention;
    const int64_t width = attention.kv_heads * attention.dim, rows = attention.rows, group = attention.group;
#pragma omp parallel num_threads(attention.threads) firstprivate(attention)
    for (const block *b = s->blocks; b < s->blocks + s->count; b++) {
        const linear_step project = {
            s->x, b->qkv, b->attention_norm, b->qkv_bias, 0, s->arranged, s->decoded, s->projected, rows, s->dim,
            width * (group + 2), 0, s->eps, 0};
        linear_in_team(&project);
#pragma omp barrier
        attention.keys = b->keys, attention.values = b->values, attention.window = b->window;
        attend_in_team(&attention);
#pragma omp barrier
        const linear_step out = {
            s->mixed, b->out, 0, b->out_bias, s->x, s->arranged, s->decoded, s->x, rows, width * group, s->dim, 0, 0, 0};
        linear_in_team(&out);
#pragma omp barrier
        const linear_step gate_up = {
            s->x, b->gate_up, b->mlp_norm, b->gate_up_bias, 0, s->arranged, s->decoded, s->gated, rows, s->dim, 2 * s->mlp_dim,
            b->gate_block, s->eps, 0};
        linear_in_team(&gate_up);
#pragma omp barrier
        const linear_step down = {
            s->gated, b->down, 0, b->down_bias, s->x, s->arranged, s->decoded, s->x, rows, s->mlp_dim, s->dim, 0, 0, 0};
        linear_in_team(&down);
#pragma omp barrier
    }
}
