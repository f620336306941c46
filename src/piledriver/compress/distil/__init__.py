"""Recover a compressed model: block-wise reconstruction, then distillation through the train loop.

- `recover`: the entrance; `reconstruct`: block by block against the dense activations
- `loss`: divergences in chunks of tokens; `teacher`: the teacher in its own precision and layout, or its stored outputs
- `objective`: the hook into the train loop; `quantisation_aware`: training with rounded weights
"""

from __future__ import annotations

from piledriver.compress.distil.objective import DistilSettings
from piledriver.compress.distil.quantisation_aware import start_from_codes
from piledriver.compress.distil.reconstruct import reconstruct
from piledriver.compress.distil.recover import DistilConfig, distil, recover
from piledriver.compress.distil.stored_logits import write_teacher_logits

__all__ = [
    "DistilConfig",
    "DistilSettings",
    "distil",
    "reconstruct",
    "recover",
    "start_from_codes",
    "write_teacher_logits",
]
