"""`Prepared`: the objects that an `Accelerator` has prepared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from piledriver.accelerator.state.accumulation import GradientState
from piledriver.engine.mesh import Mesh
from piledriver.engine.optimizer.parameter_map import ParameterMap
from piledriver.engine.options import EngineOptions
from piledriver.runtime.world import World


@dataclass(kw_only=True)
class Prepared:
    """Models, optimizers, schedulers and loaders in the order of their preparation, and where they run."""

    world: World
    mesh: Mesh
    options: EngineOptions
    gradient_state: GradientState
    scaler: Any
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    parameters: ParameterMap = field(default_factory=ParameterMap)

    def clear(self) -> None:
        """Drop all references."""
        for held in (self.models, self.optimizers, self.schedulers, self.loaders):
            held.clear()
