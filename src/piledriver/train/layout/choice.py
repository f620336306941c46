"""Choose the layout of a run where its config names none, and predict the layout that it has."""

from __future__ import annotations

from dataclasses import replace

from piledriver.accelerator import Accelerator
from piledriver.core.errors import PiledriverError
from piledriver.engine import Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.hardware.here import detect_cluster
from piledriver.plan.learn import learned_efficiency
from piledriver.plan.prediction import Prediction, Workload, predict
from piledriver.plan.training import choose_for_training
from piledriver.runtime.collectives.operations import broadcast_object
from piledriver.train.batching import Batching, cut_batch
from piledriver.train.config import TrainConfig


def choose_layout(config: TrainConfig, shape: ModelConfig, accelerator: Accelerator) -> tuple[TrainConfig, str]:
    """Return the config with the layout and the micro-batch that the planner chooses, and its reason.

    Rank 0 decides; on a CPU replicas are taken. A config that names a layout is returned as it is, with an empty
    reason; so is one whose batch the planner cannot divide, which is reported where the batch is cut.
    """
    if config.layout != Layout(precision="auto"):
        return config, ""
    if accelerator.device.type != "cuda":
        rates = f"on a {accelerator.device.type} always so, as its rates are not steady enough to plan with"
        return config, f"a replica on each of {accelerator.world.size} ranks ({rates})"
    found: tuple[TrainConfig, str] = config, ""
    if accelerator.world.is_main:
        try:
            found = _choose(config, shape, accelerator)
        except PiledriverError:
            found = config, ""
    config, reason = broadcast_object(accelerator.world, found)
    return config, reason


def _choose(config: TrainConfig, shape: ModelConfig, accelerator: Accelerator) -> tuple[TrainConfig, str]:
    length = config.data.seq_len or shape.max_positions
    size = accelerator.world.size
    batching = cut_batch(config.batch_tokens, length, size, config.micro_batch_tokens, "cuda")
    workload = Workload(config=shape, length=length, batch=batching.windows_per_step, optimizer=config.optimizer.kind)
    choice = choose_for_training(
        workload, accelerator.layout, detect_cluster(size), sequences=batching.windows_per_micro_batch
    )
    if choice.layout == accelerator.layout or choice.prediction is None:
        return config, choice.reason
    layout = replace(choice.layout, dp_replicate=None, precision=choice.prediction.layout.precision, compile=None)
    tokens = choice.prediction.micro_batch_tokens
    return replace(config, layout=layout, micro_batch_tokens=config.micro_batch_tokens or tokens), choice.reason


def predict_run(
    config: TrainConfig, shape: ModelConfig, accelerator: Accelerator, batching: Batching
) -> Prediction | None:
    """Return the prediction of a run, to compare with its measurement, or None if it cannot be predicted."""
    layout = accelerator.layout
    calls = layout.microbatches or 1 if layout.pp > 1 else 1
    workload = Workload(
        config=shape, length=batching.seq_len, batch=batching.windows_per_step, optimizer=config.optimizer.kind
    )
    try:
        cluster = detect_cluster(accelerator.world.size)
        efficiency = learned_efficiency(cluster.device.measured)
        sequences = max(1, batching.windows_per_micro_batch // calls)
        return predict(workload, layout, cluster, sequences=sequences, efficiency=efficiency)
    except PiledriverError:
        return None  # an optimizer of another package, whose states are unknown
