"""Read traces of torch's profiler: events, modules and phases, FLOPs and bytes of operators, sets of time."""
