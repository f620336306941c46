"""Products with int8 and int4 weights in bf16: codes become numbers in registers, on their way to matrix instructions.

- `conversions`: two codes at a time
- `rows`, `pipelined_rows`, `streamed_rows`: a few rows that stay in registers or shared memory, in Gluon
- `tiles`: any number of rows; the columns can be divided
- `warp_specialised`, `division`: many rows on Hopper, in Gluon, and how the work is divided
- `hopper`: what kernels in Gluon share
"""
