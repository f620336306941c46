"""`Placed`: one model in one layout on one cluster, all that the seconds of a step depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.parameters import Stage
from piledriver.plan.blocks.setting import BlockSetting
from piledriver.plan.hardware.cluster import Cluster, Device
from piledriver.plan.memory.state_bytes import weight_size_of
from piledriver.plan.time.links import Axis, axes_of_layout, collective_seconds
from piledriver.plan.time.rank_kinds import blocks_key
from piledriver.plan.time.rates import Efficiency, measured_rate

# Of the deviation of a measured launch from the usual one, on a logarithmic scale; best over six sets of H200 rows.
_TRUST_IN_CLOCK = 0.7


@dataclass(kw_only=True)
class Placed:
    """One model in one layout on one cluster."""

    config: ModelConfig
    layout: Layout
    cluster: Cluster
    setting: BlockSetting
    efficiency: Efficiency
    optimizer: str
    memo: dict[Any, Any]
    """Seconds of blocks and optimizer steps, kept between layouts of one model, cluster and efficiency."""
    axes: dict[str, Axis] = field(init=False)
    weight_size: int = field(init=False)
    matrix_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.axes = axes_of_layout(self.layout)
        self.weight_size = 2 if self.setting.traits.master_copy else weight_size_of(self.layout)
        self.matrix_size = self.setting.itemsize if self.setting.half_matrices else self.weight_size

    def collective(self, kind: str, axis: str, size: float) -> float:
        """Return the seconds of a collective; `size` is the bytes of its larger side on one rank."""
        return collective_seconds(kind, size, self.axes[axis], self.cluster, self.efficiency)

    def launch(self, device: Device) -> float:
        """Return the host's seconds for one kernel.

        A short measurement of a shared host is noisy: only a part of its deviation from the usual counts.
        """
        usual = self.efficiency.launch
        deviation = (measured_rate(device, "launch") or usual) / usual
        return float(usual * deviation**_TRUST_IN_CLOCK)

    def key(self, stage: Stage) -> Any:
        """Return what tells stages: those alike cost the same."""
        return blocks_key(self.config, stage), stage.first, stage.last
