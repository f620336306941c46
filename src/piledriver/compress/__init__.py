"""Floor 7: compress a trained model. Every result is an ordinary model that evaluates, serves and saves.

- `quantise`: 8- and 4-bit weights by rounding to nearest, GPTQ, AWQ or SmoothQuant; `scheme`: their formats by name
- `prune`: zeros by magnitude, Wanda or SparseGPT, unstructured or n of every m; `structured`: remove whole parts
- `distil`: `recover` what was lost, by block-wise reconstruction and distillation; quantisation-aware training
- `forecast`: `plan`, size and speed before anything runs; `comparison`: `report`, one page on several models
- `calibration`: sample text, run block by block; `second_order`: the column loop that GPTQ and SparseGPT share
"""

from __future__ import annotations

from piledriver.compress.calibration import Calibration
from piledriver.compress.comparison import compare_models as report
from piledriver.compress.distil import recover
from piledriver.compress.forecast import CompressionPlan
from piledriver.compress.forecast import plan_compression as plan
from piledriver.compress.prune import prune
from piledriver.compress.quantise import quantise, sensitivity
from piledriver.compress.scheme import Scheme
from piledriver.compress.structured import SmallerShape

__all__ = [
    "Calibration",
    "CompressionPlan",
    "Scheme",
    "SmallerShape",
    "plan",
    "prune",
    "quantise",
    "recover",
    "report",
    "sensitivity",
]
