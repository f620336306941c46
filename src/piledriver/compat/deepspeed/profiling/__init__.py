"""DeepSpeed's names for profiling over `piledriver.observe`: FLOPs, collectives, wall clock, memory."""

from __future__ import annotations

from piledriver.compat.deepspeed.profiling.comms_logger import configure_comms_logger, log_summary
from piledriver.compat.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from piledriver.compat.deepspeed.profiling.memory import see_memory_usage
from piledriver.compat.deepspeed.profiling.sections import ConfiguredProfiling

__all__ = [
    "ConfiguredProfiling",
    "FlopsProfiler",
    "configure_comms_logger",
    "get_model_profile",
    "log_summary",
    "see_memory_usage",
]
