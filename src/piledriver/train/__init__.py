"""Floor 6: the pretraining loop, from token shards to a run folder with a model in it.

The package can be called: `from piledriver import train` gives it, and `train(config)` is `train.train(config)`. A name
for both is needed because importing any module of the package binds it as `piledriver.train`.
"""

import sys
from types import ModuleType

from piledriver.train.config import DataConfig, SpikeConfig, TrainConfig
from piledriver.train.loop import RunSummary, Validate, train

__all__ = ["DataConfig", "RunSummary", "SpikeConfig", "TrainConfig", "train"]


class _TrainModule(ModuleType):
    def __call__(self, config: TrainConfig, *, validate: Validate | None = None) -> RunSummary:
        return train(config, validate=validate)


sys.modules[__name__].__class__ = _TrainModule
