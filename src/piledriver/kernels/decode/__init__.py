"""Fused kernels of a decode step: its inputs; RMS norm; query-key norm, rotary positions, cache write and attention."""

from piledriver.kernels.decode.dispatch import gather_step, rms_norm, rotate_and_attend, rotate_and_store

__all__ = ["gather_step", "rms_norm", "rotate_and_attend", "rotate_and_store"]
