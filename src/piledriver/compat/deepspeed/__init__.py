"""Names of DeepSpeed over our rooms: `init_inference`, `deepspeed.compression`, `autotune` and estimators of states."""

from __future__ import annotations

from piledriver.compat.deepspeed.autotuning import autotune
from piledriver.compat.deepspeed.compression import init_compression, redundancy_clean, student_initialization
from piledriver.compat.deepspeed.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from piledriver.compat.deepspeed.inference import InferenceEngine, init_inference

__all__ = [
    "InferenceEngine",
    "autotune",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "init_compression",
    "init_inference",
    "redundancy_clean",
    "student_initialization",
]
