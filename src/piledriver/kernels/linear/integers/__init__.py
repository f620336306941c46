"""Products with int8 and int4 weights in integers: an input of two bytes an element, exact sums.

- `split`: rows of the input as rows of bytes
- `gemv`: one row, four products an instruction
- `tiles`: any number of rows, through shared memory; the same bits for every number
"""
