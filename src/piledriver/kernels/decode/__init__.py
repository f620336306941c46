"""Fused elementwise kernels of a decode step: the step's inputs; RMS norm; query-key norm, rotary positions and
the cache write in one.
"""

from piledriver.kernels.decode.dispatch import gather_step, rms_norm, rotate_and_store

__all__ = ["gather_step", "rms_norm", "rotate_and_store"]
