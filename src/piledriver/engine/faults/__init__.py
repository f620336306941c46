"""Fault handling: recover from a failed step, and identify lost ranks."""
