"""Attention over a paged KV cache: new keys and values are written to their slots, queries read through block tables.

One call serves prefill, decode and anything between: each row of a `PagedBatch` is a sequence with one or more new
tokens at the end of its context. `triton` runs on a GPU, `native` (in C) and `cpu` on a CPU, `reference`
everywhere.
"""

from piledriver.kernels.paged_attention.batch import PagedBatch, Rotation
from piledriver.kernels.paged_attention.dispatch import paged_attention, write_pages
from piledriver.kernels.paged_attention.pages import allocate_pages, page_bytes

__all__ = ["PagedBatch", "Rotation", "allocate_pages", "page_bytes", "paged_attention", "write_pages"]
