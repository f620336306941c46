"""One AdamW step of one parameter, for `optim.SplitMasterAdamW`: `triton` on a GPU, `reference` elsewhere.

Each reads every tensor once and writes it once; clipping, skipping and stochastic rounding happen in the same pass.
"""

from piledriver.kernels.adamw.reference import StepConstants

__all__ = ["StepConstants"]
