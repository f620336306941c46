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
    from piledriver.plan.any_module import plan_module
    from piledriver.plan.blocks.trace import trace_module
    from piledriver.plan.collectives import step_collectives
    from piledriver.plan.entry import explain, longest_fitting_length, plan
    from piledriver.plan.errors import PlanError
    from piledriver.plan.hardware.parse import parse_hardware
    from piledriver.plan.inference import plan_inference
    from piledriver.plan.placement import device_map
    from piledriver.plan.prediction import Prediction, Workload, predict
    from piledriver.plan.result import Plan
    from piledriver.plan.search.candidates import Wishes
    from piledriver.plan.worlds import elastic_batch

__all__ = [
    "Plan",
    "PlanError",
    "Prediction",
    "Wishes",
    "Workload",
    "device_map",
    "elastic_batch",
    "explain",
    "longest_fitting_length",
    "parse_hardware",
    "plan",
    "plan_inference",
    "plan_module",
    "predict",
    "step_collectives",
    "trace_module",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Plan": "result",
        "PlanError": "errors",
        "Prediction": "prediction",
        "Wishes": "search.candidates",
        "Workload": "prediction",
        "device_map": "placement",
        "elastic_batch": "worlds",
        "explain": "entry",
        "longest_fitting_length": "entry",
        "parse_hardware": "hardware.parse",
        "plan": "entry",
        "plan_inference": "inference",
        "plan_module": "any_module",
        "predict": "prediction",
        "step_collectives": "collectives",
        "trace_module": "blocks.trace",
    },
)
