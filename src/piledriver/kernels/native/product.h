/* The product of a few rows with some outputs of a weight. */

#include "step.h"
#include "vector.h"

/* Rows of a part, which share the registers of a tile. */
#define TILE_ROWS (REGISTERS / 4)

/* `x` has up to TILE_ROWS rows, arranged: the first vectors of all rows, then the second ones, and so on, zeros at the
end. */
void part_product(
    const weight *w, int64_t rows, const float *x, int64_t columns, int64_t first, int64_t outputs, float *out);

/* Write what the codes of some outputs stand for, [outputs, columns]. */
void decode_outputs(const weight *w, int64_t columns, int64_t first, int64_t outputs, float *out);
