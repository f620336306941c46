"""Dynamic loss scaling for fp16: keep gradients from underflow, and skip steps whose gradients overflow.

The rule is one pure function, `next_scale`: with a hysteresis of 1 that of `torch.amp.GradScaler`, with more
DeepSpeed's. `LossScaler` has the methods of torch's scaler, and adds: all ranks skip together whatever axis the
overflow was on, skipped steps are counted and logged, and an overflow at the smallest scale is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from piledriver.engine.errors import EngineError, LayoutError
from piledriver.engine.optimizer.nonfinite import describe_non_finite
from piledriver.engine.torch_private import unscale_and_check
from piledriver.optim.shards import local

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the loss is scaled. The defaults are DeepSpeed's; `torch_like` gives torch's."""

    static: float | None = None
    """A scale that never changes; steps that overflow are still skipped."""
    initial: float = 2.0**16
    """The first scale (DeepSpeed's `initial_scale_power` 16)."""
    window: int = 1000
    """Steps in a row without overflow after which the scale grows."""
    growth: float = 2.0
    """Factor of growth."""
    backoff: float = 0.5
    """Factor after an overflow."""
    hysteresis: int = 2
    """Overflows until the scale falls; the ones before only skip their step."""
    consecutive_hysteresis: bool = False
    """Reset the overflow count after every good step, not only when the scale grows."""
    minimum: float = 1.0
    """Lower bound of the scale; an overflow there is an error."""

    def __post_init__(self) -> None:
        if self.growth <= 1.0 or not 0.0 < self.backoff < 1.0:
            raise LayoutError(
                f"the loss scale grows by {self.growth} and falls by {self.backoff}", fix="use growth > 1 > backoff > 0"
            )
        if self.window < 1 or self.hysteresis < 1:
            raise LayoutError(f"window is {self.window}, hysteresis {self.hysteresis}", fix="use 1 or more of both")
        if not 0.0 < self.minimum <= (self.static or self.initial):
            raise LayoutError(
                f"the loss scale starts at {self.static or self.initial}, below its minimum {self.minimum}",
                fix="lower the minimum",
            )


def torch_like(
    init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000
) -> LossScale:
    """Return settings from the arguments of `torch.amp.GradScaler`."""
    return LossScale(
        initial=init_scale,
        growth=growth_factor,
        backoff=backoff_factor,
        window=growth_interval,
        hysteresis=1,
        minimum=min(1.0, init_scale),
    )


def deepspeed_like(
    *,
    loss_scale: float = 0,
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1,
) -> LossScale:
    """Return settings from DeepSpeed's `fp16` section; a `loss_scale` other than 0 is static.

    >>> deepspeed_like(loss_scale=128).static, deepspeed_like(initial_scale_power=8).initial
    (128.0, 256.0)
    """
    return LossScale(
        static=float(loss_scale) or None,
        initial=2.0**initial_scale_power,
        window=loss_scale_window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
        minimum=float(min_loss_scale),
    )


@dataclass(frozen=True)
class ScaleState:
    """The state of a scaler."""

    scale: float
    good_steps: int = 0
    """Steps since the last overflow or growth."""
    hysteresis_left: int = 1


def first_scale(config: LossScale) -> ScaleState:
    """Return the initial state."""
    return ScaleState(config.static or config.initial, 0, config.hysteresis)


def next_scale(config: LossScale, state: ScaleState, overflow: bool) -> ScaleState:
    """Return the state after a step.

    >>> config = LossScale(initial=8.0, window=2, hysteresis=1)
    >>> next_scale(config, first_scale(config), True)
    ScaleState(scale=4.0, good_steps=0, hysteresis_left=1)
    """
    if config.static is not None:
        return state
    if overflow:
        if state.hysteresis_left > 1:
            return replace(state, good_steps=0, hysteresis_left=state.hysteresis_left - 1)
        return replace(state, scale=max(state.scale * config.backoff, config.minimum), good_steps=0)
    left = config.hysteresis if config.consecutive_hysteresis else state.hysteresis_left
    if state.good_steps + 1 < config.window:
        return ScaleState(state.scale, state.good_steps + 1, left)
    grown = state.scale * config.growth
    # As torch: the scale does not grow beyond fp32.
    fits = grown <= torch.finfo(torch.float32).max
    return ScaleState(grown if fits else state.scale, 0, config.hysteresis)


class LossScaler:
    """Scales losses, unscales gradients, steps or skips, with the methods of `torch.amp.GradScaler`.

    Overflows are reduced over `group` (None: all ranks) on `device`. `models` supply parameter names for messages.
    """

    def __init__(
        self,
        config: LossScale | None = None,
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        models: Iterable[nn.Module] = (),
        enabled: bool = True,
    ) -> None:
        self.config = config or LossScale()
        self.state = first_scale(self.config)
        self.models = list(models)
        self.steps = 0
        """Steps that were taken or skipped."""
        self.skipped = 0
        """Steps that were skipped."""
        self.last_step_skipped = False
        self._device, self._group, self._enabled = torch.device(device), group, enabled
        self._overflow: dict[int, bool] = {}
        self._stepped: set[int] = set()
        self._where: str | None = None

    def scale(self, outputs: Any) -> Any:
        """Return a tensor, or a list or tuple of them, times the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * self.state.scale
        return type(outputs)(self.scale(output) for output in outputs)

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and reduce over ranks whether any is not finite."""
        if not self._enabled:
            return
        if id(optimizer) in self._overflow:
            raise EngineError("gradients were unscaled already since the last update", fix="call unscale_ once a step")
        flag = torch.zeros((), dtype=torch.float32, device=self._device)
        inverse = 1.0 / self.state.scale
        for (device, dtype), parts in _gradients(optimizer).items():
            if dtype == torch.float16:
                raise EngineError("gradients are fp16: unscaled, they would underflow", fix="keep fp32 weights")
            found = torch.zeros((), dtype=torch.float32, device=device)
            scale = torch.full((), inverse, dtype=torch.float32, device=device)
            unscale_and_check(parts, found, scale)
            flag = torch.maximum(flag, found.to(self._device))
        if _world_size(self._group) > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, self._group)
        self._overflow[id(optimizer)] = bool(flag.item())
        if self._overflow[id(optimizer)]:
            self._where = describe_non_finite(self.models, self._group)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether `unscale_` was called since the last update."""
        return id(optimizer) in self._overflow

    def forget(self, optimizer: Optimizer) -> None:
        """Discard what is known of an optimizer's gradients, which were cleared."""
        self._overflow.pop(id(optimizer), None)
        self._stepped.discard(id(optimizer))

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step on unscaled gradients, unless they overflowed on any rank."""
        if not self._enabled:
            return optimizer.step() if closure is None else optimizer.step(closure)
        if closure is not None:
            raise EngineError("a closure cannot be stepped with scaled gradients", fix="leave the closure out")
        if id(optimizer) in self._stepped:
            raise EngineError("step was called already since the last update", fix="call update after each step")
        if not self.is_unscaled(optimizer):
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        return None if self._overflow[id(optimizer)] else optimizer.step()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale. Call it once after the steps of all optimizers."""
        if not self._enabled:
            return
        overflow = any(self._overflow.values())
        self._overflow, self._stepped = {}, set()
        self.steps += 1
        self.skipped += overflow
        self.last_step_skipped = overflow
        before, state = self.state.scale, next_scale(self.config, self.state, overflow)
        if overflow:
            self._show(before, state)
        self.state = state if new_scale is None else replace(state, scale=float(new_scale))

    def _show(self, before: float, state: ScaleState) -> None:
        where, self._where = self._where or "", None
        dead = self.config.static is None and self.state.hysteresis_left == 1 and before <= self.config.minimum
        if dead:
            raise EngineError(
                f"gradients overflow in step {self.steps} although the loss scale is at its minimum {before:g}{where}",
                fix="look at the data and the learning rate of that step, or use bf16",
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            then = f"falls from {before:g} to {state.scale:g}" if state.scale != before else f"stays {before:g}"
            _log.warning(
                "step %d skipped: gradients overflow%s; the loss scale %s (%d of %d steps skipped)",
                self.steps,
                where,
                then,
                self.skipped,
                self.steps,
            )

    def get_scale(self) -> float:
        """Return the scale, 1 if disabled."""
        return self.state.scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether scaling is enabled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Return the state; it includes the five entries that `torch.amp.GradScaler` loads."""
        if not self._enabled:
            return {}
        return {
            "scale": self.state.scale,
            "growth_factor": self.config.growth,
            "backoff_factor": self.config.backoff,
            "growth_interval": self.config.window,
            "_growth_tracker": self.state.good_steps,
            "hysteresis_left": self.state.hysteresis_left,
            "steps": self.steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this scaler or of torch's. Settings are not loaded."""
        if not self._enabled or not state_dict:
            return
        left = int(state_dict.get("hysteresis_left", self.config.hysteresis))
        self.state = ScaleState(
            float(state_dict["scale"]), int(state_dict["_growth_tracker"]), min(left, self.config.hysteresis)
        )
        self.steps, self.skipped = int(state_dict.get("steps", 0)), int(state_dict.get("skipped", 0))

    def __repr__(self) -> str:
        return f"LossScaler({asdict(self.state)}, skipped={self.skipped} of {self.steps})"


def _gradients(optimizer: Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                part = local(parameter.grad)
                part = part.coalesce().values() if part.is_sparse else part
                parts.setdefault((part.device, part.dtype), []).append(part)
    return parts


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
