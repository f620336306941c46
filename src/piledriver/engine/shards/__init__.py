"""Sharded tensors: local parts, collectives that gradients flow through, and full state dicts."""
