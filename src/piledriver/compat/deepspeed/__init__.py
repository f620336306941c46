"""Names of DeepSpeed over our rooms. Today: `init_inference`."""

from __future__ import annotations

from piledriver.compat.deepspeed.inference import InferenceEngine, init_inference

__all__ = ["InferenceEngine", "init_inference"]
