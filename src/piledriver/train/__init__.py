"""Floor 6: the pretraining loop, from token shards to a run folder with a model in it."""

from piledriver.train.config import DataConfig, SpikeConfig, TrainConfig
from piledriver.train.loop import RunSummary, train

__all__ = ["DataConfig", "RunSummary", "SpikeConfig", "TrainConfig", "train"]
