/* What threads of a team compute together: called by all threads of a parallel region. */

#include <stdint.h>

/* How a weight of [outputs, columns] is stored. */
enum { FP32, INT8, INT4, FP8 };

/* Codes have a scale for each group of columns of an output. Byte j of a group of g int4 codes holds columns j (low bits)
and j + g / 2; `zeros` are the int4 codes that mean 0, or null if all are 8. int8 has one group. */
typedef struct {
    const void *data;
    const float *scales;
    const uint8_t *zeros;
    int64_t group;
    int kind;
} weight;

/* out = x @ weight.T + bias of [rows, outputs]; with `gate_block`, silu(gate) * up of blocks of outputs that alternate;
plus `residual`, which may be `out`. With `norm`, x is normalised first. `arranged` is memory for all rows, each padded
to whole vectors; `decoded`, for codes and more rows than a part has, of [threads, CHUNK, columns]. Pointers may be null
where nothing is to be done. */
typedef struct {
    const float *x;
    weight weight;
    const float *norm, *bias, *residual;
    float *arranged, *decoded, *out;
    int64_t rows, columns, outputs, gate_block;
    float eps;
    int threads;
} linear_step;

/* Rotate and store the new keys and values of sequences, each with one new token, in pages [blocks, kv_heads, size,
dim], then attend. The projection of a token is grouped by key-value head: `group` queries, the key, the value. `angles`
holds cosines, then sines of each position; `scores` is memory of [threads, group, scores_width]. */
typedef struct {
    const float *projected, *angles;
    float *keys, *values, *scores, *out;
    const int64_t *slots;
    const int32_t *tables, *contexts;
    int64_t rows, kv_heads, group, dim, rotary, size, table_width, window, scores_width;
    float scale;
    int threads;
} attention_step;

void linear_in_team(const linear_step *s);
void attend_in_team(const attention_step *s);
