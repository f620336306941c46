"""Names of DeepSpeed over our rooms. Today: `init_inference`, and those of `deepspeed.compression`."""

from __future__ import annotations

from piledriver.compat.deepspeed.compression import init_compression, redundancy_clean, student_initialization
from piledriver.compat.deepspeed.inference import InferenceEngine, init_inference

__all__ = [
    "InferenceEngine",
    "init_compression",
    "init_inference",
    "redundancy_clean",
    "student_initialization",
]
