"""`accelerate.utils.deepspeed`: names that scripts import; `Layout(zero=...)` replaces the engine behind them."""

from __future__ import annotations

from typing import Any

from piledriver.accelerator.errors import OptionError


class DummyOptim:
    """An optimizer that DeepSpeed's config would define."""

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs


class DummyScheduler:
    """A scheduler that DeepSpeed's config would define."""

    def __init__(self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **_: Any) -> None:
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps


class MegatronLMDummyScheduler(DummyScheduler):
    """A scheduler that Megatron-LM's config would define."""


class DeepSpeedSchedulerWrapper:
    """A scheduler of a DeepSpeed engine; none is ever made."""


class HfDeepSpeedConfig:
    """Raises `OptionError`: DeepSpeed's config is not read."""

    def __init__(self, config_file_or_dict: Any) -> None:
        raise OptionError("DeepSpeed's engine is not supported", fix="use layout=Layout(zero=..., offload=...)")


def get_active_deepspeed_plugin(state: Any) -> None:
    """Raise ValueError: there is no DeepSpeed plugin."""
    raise ValueError("Couldn't retrieve the active `DeepSpeedPlugin`: use Layout(zero=...)")
