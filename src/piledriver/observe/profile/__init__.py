"""Profile a few steps of one rank: wall time by cause, the tree of modules, memory, collectives, I/O.

- `collect`, `annotations`, `batches`: torch's profiler with module names and notes
- `wall`, `module_tree`, `collectives`, `input_output`, `facts`, `timeline`: the parts; `rank` puts them together
"""
