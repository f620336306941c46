"""`deepspeed.profiling.flops_profiler`: the profile of a model's forward by module, with their names and strings.

Differences: matrix products, convolutions and attention are counted, as torch counts them, whichever function computes
them; elementwise operators are not. Nothing is patched, so repeated profiles do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from piledriver.core.errors import UsageError
from piledriver.observe.profile.collect import StepProfiler
from piledriver.observe.profile.finish import finish_rank
from piledriver.observe.profile.rank import RankProfile
from piledriver.observe.report.report import Report
from piledriver.observe.report.text import report_text


class FlopsProfiler:
    """Profiles the forwards between `start_profile` and `stop_profile`."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._profiler: StepProfiler | None = None
        self._rank: RankProfile | None = None

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Start. `ignore_list` has no effect: modules are seen, not patched."""
        self._profiler = StepProfiler({"model": self.model})
        self._profiler.start()
        self.started = True

    def stop_profile(self) -> None:
        """Stop; totals and the profile can be read until `end_profile`."""
        if self._profiler is not None:
            self._profiler.stop()
            self._rank = finish_rank(self._profiler)
            self._profiler = None

    def reset_profile(self) -> None:
        """Forget what was measured."""
        self._rank = None

    def end_profile(self) -> None:
        """Stop and forget."""
        self.stop_profile()
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the FLOPs of the forwards, times 1 + `recompute_fwd_factor` for those that will be recomputed."""
        flops = int(self._total("flops") * (1 + self.recompute_fwd_factor))
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-accumulates."""
        macs = int(self._total("flops")) // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the forwards."""
        seconds = self._total("seconds")
        return f"{seconds * 1e3:.2f} ms" if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the parameters."""
        count = sum(p.numel() for p in self.model.parameters())
        return params_to_string(count) if as_string else count

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the tree of modules, or write it to a file."""
        depth = 99 if module_depth < 0 else module_depth
        text = report_text(Report.of([self._measured()], f"flops profiler at step {profile_step}"), depth=depth)
        if output_file is None:
            print(text)
        else:
            with open(output_file, "w", encoding="utf-8") as file:
                file.write(text + "\n")

    def _measured(self) -> RankProfile:
        if self._rank is None:
            raise UsageError("nothing was profiled", fix="call start_profile, run the model, then stop_profile")
        return self._rank

    def _total(self, what: str) -> float:
        root = next((row for row in self._measured().modules if row.path == "model"), None)
        return 0.0 if root is None else float(getattr(root, what)["forward"])


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return FLOPs, multiply-accumulates and parameters of one forward, or of one `generate` with that mode.

    >>> get_model_profile(nn.Linear(10, 20), (4, 10), print_profile=False, as_string=False)
    (1600, 800, 220)
    """
    if input_shape is None and not args and not kwargs:
        raise UsageError("no input is given", fix="give input_shape, args or kwargs")
    parameter = next(model.parameters(), torch.empty(0))
    given = [*args] if input_shape is None else [torch.ones(tuple(input_shape)).to(parameter)]
    run = model.generate if mode == "generate" else model
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            run(*given, **(kwargs or {}))  # type: ignore[operator]
        profiler.start_profile(ignore_modules)
        run(*given, **(kwargs or {}))  # type: ignore[operator]
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def number_to_string(value: float) -> str:
    """Return a number with a unit, as DeepSpeed prints it.

    >>> number_to_string(8_180_000_000)
    '8.18 G'
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:g} "


def macs_to_string(value: float) -> str:
    """Return multiply-accumulates with a unit."""
    return f"{number_to_string(value)}MACs"


def params_to_string(value: float) -> str:
    """Return a number of parameters with a unit; a billion is B.

    >>> params_to_string(7e9)
    '7.00 B'
    """
    return number_to_string(value).replace("G", "B").rstrip()
