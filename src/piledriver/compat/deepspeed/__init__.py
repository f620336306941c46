"""Names of DeepSpeed over our rooms: `init_inference`, compression, `autotune`, estimators of states, profiling."""

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
from piledriver.compat.deepspeed.profiling import (
    ConfiguredProfiling,
    FlopsProfiler,
    configure_comms_logger,
    get_model_profile,
    log_summary,
    see_memory_usage,
)

__all__ = [
    "ConfiguredProfiling",
    "FlopsProfiler",
    "InferenceEngine",
    "autotune",
    "configure_comms_logger",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_model_profile",
    "init_compression",
    "init_inference",
    "log_summary",
    "redundancy_clean",
    "see_memory_usage",
    "student_initialization",
]
