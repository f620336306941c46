"""Round or remove the columns of a weight one after another, each error corrected by the columns after it.

It is the inner loop of GPTQ and SparseGPT over a part of the columns. Rows are independent, so that a GPU keeps some
rows in registers and runs the whole loop in one kernel (`triton`); `reference` runs everywhere, column by column.
"""

from piledriver.kernels.column_loop.reference import ColumnStep

__all__ = ["ColumnStep"]
