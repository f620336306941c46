"""Casts to fp8 and fp8 matrix products."""
