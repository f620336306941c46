"""Optimizers and schedules as pure functions."""
