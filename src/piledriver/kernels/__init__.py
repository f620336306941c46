"""Floor 1: every Triton or compiled kernel beside its reference implementation."""
