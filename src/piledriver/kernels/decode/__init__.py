"""Fused elementwise kernels of a decode step: RMS norm; query-key norm, rotary positions and the cache write in one."""

from piledriver.kernels.decode.dispatch import rms_norm, rotate_and_store

__all__ = ["rms_norm", "rotate_and_store"]
