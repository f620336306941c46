"""Floor 6: the pretraining loop, from token shards to a run folder with a model in it.

The package can be called: `from piledriver import train` gives it, and `train(config)` is `train.train(config)`. A name
for both is needed because importing any module of the package binds it as `piledriver.train`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from piledriver.core.lazy import lazy_names

if TYPE_CHECKING:
    from piledriver.train.config import DataConfig, SpikeConfig, TrainConfig
    from piledriver.train.loop import RunSummary, Validate, train
    from piledriver.train.objective import Objective

__all__ = ["DataConfig", "Objective", "RunSummary", "SpikeConfig", "TrainConfig", "train"]


__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DataConfig": "config",
        "Objective": "objective",
        "RunSummary": "loop",
        "SpikeConfig": "config",
        "TrainConfig": "config",
        "train": "loop",
    },
)


class _TrainModule(ModuleType):
    def __call__(
        self, config: TrainConfig, *, validate: Validate | None = None, objective: Objective | None = None
    ) -> RunSummary:
        from piledriver.train.loop import train

        return train(config, validate=validate, objective=objective)


sys.modules[__name__].__class__ = _TrainModule
