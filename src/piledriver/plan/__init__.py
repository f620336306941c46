"""Floor 4: predict memory and time of a layout without hardware; choose one; print the arithmetic.

- `hardware/`: accelerators, links, hosts as data; the machine at hand; measured rates
- `blocks/`: operators, bytes and kept activations of a block and of the ends of a model
- `memory/`, `time/`: a timeline of one step by category, and its seconds by cause
- `search/`: candidates, ranking, reasons; `entry.plan` is the entrance, `result.Plan` what it returns
- `exact`: a layout through the real engine on a fake process group; `report/`: table and picture
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from piledriver.core.lazy import lazy_names

if TYPE_CHECKING:
    from piledriver.plan.entry import explain, plan
    from piledriver.plan.errors import PlanError
    from piledriver.plan.hardware.parse import parse_hardware
    from piledriver.plan.prediction import Prediction, Workload, predict
    from piledriver.plan.result import Plan
    from piledriver.plan.search.candidates import Wishes

__all__ = [
    "Plan",
    "PlanError",
    "Prediction",
    "Wishes",
    "Workload",
    "explain",
    "parse_hardware",
    "plan",
    "predict",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Plan": "result",
        "PlanError": "errors",
        "Prediction": "prediction",
        "Wishes": "search.candidates",
        "Workload": "prediction",
        "explain": "entry",
        "parse_hardware": "hardware.parse",
        "plan": "entry",
        "predict": "prediction",
    },
)
