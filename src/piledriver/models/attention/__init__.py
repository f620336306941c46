"""Attention: projections, kernels, masks, positions, KV cache."""
