"""The disk tier: tensors in preallocated, unlinked files, read and written past the page cache.

- `direct_io`: aligned reads and writes from a small pool of threads, with counters
- `block_file`: one file of page-aligned regions, and the store that allocates tensors in such files
- `rate`: the raw rate of a folder
"""
