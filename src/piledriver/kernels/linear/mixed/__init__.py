"""Products with int8 and int4 weights in bf16: codes become numbers in registers, on their way to matrix instructions.

- `conversions`: two codes at a time
- `rows`, `resident_rows`, `pipelined_rows`, `streamed_rows`: a few rows that stay in registers or shared memory, in
  Gluon; `row_products`: what the second and third do with a tile
- `tiles`: any number of rows; the columns can be divided
- `warp_specialised`: many rows on Hopper, in Gluon; `division`: into tiles and shares of columns; `token_tiles`: the
  input in shared memory; `stage_sums`, `tile_outputs`: what its warps do with a stage, and with the sums of a tile
- `narrow_instructions`: matrix instructions for as many tokens as a tile has
- `hopper`: what kernels in Gluon share
"""
