"""The profiling sections of a ds_config: `flops_profiler`, `comms_logger`, `wall_clock_breakdown`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from piledriver.compat.deepspeed.profiling.comms_logger import configure_comms_logger
from piledriver.compat.deepspeed.profiling.flops_profiler import FlopsProfiler
from piledriver.observe.timers import StepTimer

_log = logging.getLogger("piledriver.compat.deepspeed")


class ConfiguredProfiling:
    """Does what the profiling sections of a ds_config ask for, in any training loop: a step is an optimizer step.

    `flops_profiler` profiles the forward of `profile_step` and prints it, `comms_logger` records collectives for
    `log_summary`, `wall_clock_breakdown` logs the time of forward, backward and step every `steps_per_print` steps.

    >>> with ConfiguredProfiling({"wall_clock_breakdown": True}, nn.Linear(2, 2)) as profiling:
    ...     pass
    """

    def __init__(self, ds_config: Mapping[str, Any], model: nn.Module) -> None:
        self.step = 0
        self.times: dict[str, float] = {}
        """Milliseconds of forward, backward and step, under DeepSpeed's names for trackers."""
        self._config, self._model = dict(ds_config), model
        flops = ds_config.get("flops_profiler", {})
        self._flops = dict(flops) if flops.get("enabled") else {}
        self._every = int(ds_config.get("steps_per_print") or 10)
        self._stack = ExitStack()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._timer = StepTimer(device)
        self._open: dict[str, Any] = {}
        self._profiler: FlopsProfiler | None = None

    def __enter__(self) -> ConfiguredProfiling:
        if self._config.get("comms_logger", {}).get("enabled"):
            configure_comms_logger(enabled=True)
            self._stack.callback(configure_comms_logger, enabled=False)
        model = self._model
        self._stack.callback(model.register_forward_pre_hook(self._before_forward, prepend=True).remove)
        self._stack.callback(model.register_forward_hook(self._after_forward).remove)
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _before_forward(self, *_: Any) -> None:
        if self._flops and self.step + 1 == int(self._flops.get("profile_step", 1)) and self._profiler is None:
            self._profiler = FlopsProfiler(self._model, None, float(self._flops.get("recompute_fwd_factor", 0.0)))
            self._profiler.start_profile()
        self._begin("forward")

    def _after_forward(self, *_: Any) -> None:
        self._end("forward")
        if self._profiler is not None and self._profiler.started:
            self._profiler.stop_profile()
            self._profiler.started = False
            self._profiler.print_model_profile(
                self.step + 1,
                int(self._flops.get("module_depth", -1)),
                int(self._flops.get("top_modules", 1)),
                bool(self._flops.get("detailed", True)),
                self._flops.get("output_file"),
            )
        self._begin("backward")

    def _before_step(self, *_: Any) -> None:
        self._end("backward")
        self._begin("step")

    def _after_step(self, *_: Any) -> None:
        self._end("step")
        self.step += 1
        if not self._config.get("wall_clock_breakdown"):
            return
        found = self._timer.timings()
        self.times = {f"Train/Samples/elapsed_time_ms_{name}": timing.mean_s * 1e3 for name, timing in found.items()}
        if self.step % self._every == 0:
            _log.info("time (ms) | %s", " | ".join(f"{name}: {one.mean_s * 1e3:.2f}" for name, one in found.items()))

    def _begin(self, name: str) -> None:
        if self._config.get("wall_clock_breakdown") and name not in self._open:
            self._open[name] = self._timer(name)
            self._open[name].__enter__()

    def _end(self, name: str) -> None:
        part = self._open.pop(name, None)
        if part is not None:
            part.__exit__(None, None, None)
