"""Choose the layout of a training process where none was given: the plainest one that fits, else the planner's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from piledriver.core.errors import PiledriverError
from piledriver.engine.layout import Layout
from piledriver.plan.entry import plan
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.learn import learned_efficiency
from piledriver.plan.model_config import config_of
from piledriver.plan.prediction import Prediction, Workload, predict
from piledriver.plan.search.candidates import Wishes
from piledriver.plan.search.choose import reason_too_large

# A layout with more parts must be faster than the plainest one by this share.
_WORTH_IT = 0.03
_GIB = 2**30
# Weights, gradients and Adam's moments of a model whose activations are unknown may fill this share of a device.
_STATE_SHARE = 0.45


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """A layout, its prediction if the model can be predicted, and the reason in one line."""

    layout: Layout
    sequences: int
    """Sequences of one micro-batch."""
    prediction: Prediction | None
    reason: str


def choose_for_training(
    workload: Workload, plain: Layout, cluster: Cluster, *, sequences: int, wishes: Wishes | None = None
) -> LayoutChoice:
    """Return the plain layout if it is predicted to fit and to be about as fast as any, else the planner's.

    `sequences` is the micro-batch of the plain layout. Nothing is refused: where nothing is predicted to fit, the
    plain layout is tried, and the reason says so.
    """
    efficiency = learned_efficiency(cluster.device.measured)
    plainly = predict(workload, plain, cluster, sequences=sequences, efficiency=efficiency)
    if plainly.fits and (cluster.count == 1 or cluster.device.kind == "cpu"):
        return LayoutChoice(
            layout=plain, sequences=sequences, prediction=plainly, reason=_line(plainly, "the plainest")
        )
    wishes = replace(wishes or Wishes(precisions=(plainly.layout.precision,)), compile=plain.compile)
    try:
        made = plan(
            workload.config,
            workload.batch,
            cluster,
            length=workload.length,
            optimizer=workload.optimizer,
            wishes=wishes,
            efficiency=efficiency,
        )
    except PlanError as error:
        reason = f"{plain!r}, although nothing is predicted to fit: {error}"
        return LayoutChoice(layout=plain, sequences=sequences, prediction=plainly, reason=reason)
    best = made.best
    if plainly.fits and best.time.total > (1 - _WORTH_IT) * plainly.time.total:
        return LayoutChoice(
            layout=plain, sequences=sequences, prediction=plainly, reason=_line(plainly, "the plainest")
        )
    gain = plainly.time.total / best.time.total - 1
    why = f"{100 * gain:.0f}% faster than replicas" if plainly.fits else f"replicas are {reason_too_large(plainly)}"
    return LayoutChoice(layout=best.layout, sequences=best.sequences, prediction=best, reason=_line(best, why))


def choose_for_model(model: Any, cluster: Cluster, *, precision: str, sequences: int | None) -> LayoutChoice:
    """Return a data-parallel layout for a model of any kind: by its prediction, or by its states if it has no shape."""
    plain = Layout(precision=precision, compile=False)  # type: ignore[arg-type]
    try:
        config, _ = config_of(model)
    except PiledriverError:
        return _by_states(model, plain, cluster)
    size = sequences or 1
    workload = Workload(config=config, length=config.max_positions, batch=size * cluster.count)
    wishes = Wishes(precisions=(precision,), sequences=size, data_parallel_only=True)
    return choose_for_training(workload, plain, cluster, sequences=size, wishes=wishes)


def _by_states(model: Any, plain: Layout, cluster: Cluster) -> LayoutChoice:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size, room = 16.0 * parameters, _STATE_SHARE * cluster.smallest_memory
    about = f"weights, gradients and Adam's moments take {size / _GIB:.1f} GiB of {cluster.smallest_memory / _GIB:.0f}"
    if size <= room or cluster.count == 1:
        return LayoutChoice(layout=plain, sequences=1, prediction=None, reason=f"{plain!r}: {about}")
    sharded = replace(plain, zero=3)
    return LayoutChoice(layout=sharded, sequences=1, prediction=None, reason=f"{sharded!r}: {about} on one device")


def _line(one: Prediction, why: str) -> str:
    return (
        f"{one.layout!r} ({why}), micro-batches of {one.sequences} x {one.workload.length} tokens: predicted "
        f"{one.tokens_per_second:,.0f} tokens/s and {one.worst.allocated / _GIB:.2f} of "
        f"{one.capacity / _GIB:.0f} GiB"
    )
