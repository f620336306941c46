"""Floor 2: optimizers and schedules that torch does not have, and the settings of those that it has.

- `groups`: which parameters decay; `build`: an optimizer from a config
- `adamw`: torch's, fused; `muon`: Muon with AdamW for the rest; `lion`; `compact_adamw`: 8-bit and bf16 states;
  `master_adamw`: bf16 weights with exact fp32 updates, clipping included
- `quantise`, `rounding`: the arithmetic of small states; `shards`: what all of them need to run on sharded parameters
- `leaving_out`: steps that the device leaves out by itself; `step_numbers`: what then follows from their number
- `schedule`: the learning rate as a function of progress; `clip`: the global gradient norm
"""

from piledriver.optim.build import OptimizerConfig, build_optimizer
from piledriver.optim.capability import Capabilities, capabilities
from piledriver.optim.clip import clip_gradients, clip_in_step, gradient_norm
from piledriver.optim.compact_adamw import CompactAdamW
from piledriver.optim.conditional_step import can_skip_on_device, step_unless
from piledriver.optim.groups import parameter_groups
from piledriver.optim.lion import Lion
from piledriver.optim.muon import Muon
from piledriver.optim.registry import OPTIMIZERS
from piledriver.optim.schedule import ScheduleConfig, ScheduledLR, scale_at
from piledriver.optim.split_master_adamw import SplitMasterAdamW

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
