"""Activation memory: checkpointing, budgets and offload."""
