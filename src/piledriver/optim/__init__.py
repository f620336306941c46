"""Floor 2: optimizers and schedules that torch does not have, and the settings of those that it has.

- `config`: settings of optimizer and schedule, and an optimizer from them; `groups`: which parameters decay
- `adamw/`: torch's, fused; 8-bit and bf16 states; bf16 weights with exact fp32 updates; `muon`; `lion`
- `shards`: local parts of sharded parameters; `conditional_step`: steps skipped on the device
- `schedule`: the learning rate as a function of progress; `clip`: the global gradient norm
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from piledriver.core.lazy import lazy_names

if TYPE_CHECKING:
    from piledriver.optim.adamw.compact import CompactAdamW
    from piledriver.optim.adamw.split_master import SplitMasterAdamW
    from piledriver.optim.capability import Capabilities, capabilities
    from piledriver.optim.clip import clip_gradients, clip_in_step, gradient_norm
    from piledriver.optim.conditional_step import can_skip_on_device, step_unless
    from piledriver.optim.config import OptimizerConfig, ScheduleConfig, build_optimizer
    from piledriver.optim.groups import parameter_groups
    from piledriver.optim.lion import Lion
    from piledriver.optim.muon import Muon
    from piledriver.optim.registry import OPTIMIZERS
    from piledriver.optim.schedule import ScheduledLR, scale_at

__all__ = [
    "OPTIMIZERS",
    "Capabilities",
    "CompactAdamW",
    "Lion",
    "Muon",
    "OptimizerConfig",
    "ScheduleConfig",
    "ScheduledLR",
    "SplitMasterAdamW",
    "build_optimizer",
    "can_skip_on_device",
    "capabilities",
    "clip_gradients",
    "clip_in_step",
    "gradient_norm",
    "parameter_groups",
    "scale_at",
    "step_unless",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "OPTIMIZERS": "registry",
        "Capabilities": "capability",
        "CompactAdamW": "adamw.compact",
        "Lion": "lion",
        "Muon": "muon",
        "OptimizerConfig": "config",
        "ScheduleConfig": "config",
        "ScheduledLR": "schedule",
        "SplitMasterAdamW": "adamw.split_master",
        "build_optimizer": "config",
        "can_skip_on_device": "conditional_step",
        "capabilities": "capability",
        "clip_gradients": "clip",
        "clip_in_step": "clip",
        "gradient_norm": "clip",
        "parameter_groups": "groups",
        "scale_at": "schedule",
        "step_unless": "conditional_step",
    },
)
