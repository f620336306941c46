"""Tensor-parallel serving: rank 0 schedules and samples; every rank computes its shard of each forward pass."""
