"""Profile a block of a loop on every rank: traces, and one report of all ranks with advice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from piledriver.accelerator.options.handlers import ProfileKwargs
from piledriver.observe.profile.annotations import Instrumented
from piledriver.observe.profile.collect import StepProfiler, model_device
from piledriver.observe.profile.discover import find_models
from piledriver.observe.profile.finish import finish_rank
from piledriver.observe.report.report import Report
from piledriver.observe.report.run import write_failure
from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.collectives.operations import gather_object
from piledriver.runtime.world import World, current_world

FULL = ProfileKwargs(record_shapes=True, profile_memory=True, report=True)
"""What `Accelerator.profile()` records if nothing else is asked for."""


class AcceleratorProfiler(StepProfiler):
    """torch's profiler; after the block, `report` has the report of all ranks if one was asked for."""

    report: Report | None = None
    """The report of the last cycle."""
    reports: Sequence[Report] = ()
    """Reports of all cycles of a schedule."""


@contextmanager
def profiled(
    world: World,
    options: ProfileKwargs,
    models: Sequence[nn.Module] = (),
    optimizers: Sequence[Any] = (),
    *,
    folder: str | None = None,
    functions: Iterable[Instrumented] = (),
) -> Iterator[AcceleratorProfiler]:
    """Run torch's profiler with the given options.

    With `output_trace_dir` each rank writes `profile_RANK.json` there, as Accelerate does; with a schedule also each
    cycle, into `cycle_N`. With `report`, the ranks' profiles are gathered into one report after each cycle. An error
    in the block, such as one for lack of memory, writes this rank's report and continues.
    """
    arguments = options.build_arguments()
    own_ready = arguments.pop("on_trace_ready", None)
    cycles: list[Report] = []
    written = 0

    def ready(profiler: Any) -> None:
        nonlocal written
        written += 1
        if own_ready is not None:
            own_ready(profiler)
        elif options.schedule_option and options.output_trace_dir is not None:
            target = Path(options.output_trace_dir) / f"cycle_{written}"
            target.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(target / f"profile_{world.rank}.json"))
        if options.report and not profiler.notes.error:
            name = folder and (os.path.join(folder, f"cycle_{written}") if options.schedule_option else folder)
            cycles.append(gathered_report(world, profiler, folder=name))
            profiler.report, profiler.reports = cycles[-1], tuple(cycles)

    named = {"model" if not index else f"model_{index + 1}": one for index, one in enumerate(models)}
    inner = [getattr(one, "optimizer", one) for one in optimizers]
    profiler = AcceleratorProfiler(named, inner, functions=functions, on_trace_ready=ready, **arguments)
    try:
        with profiler:
            if options.report and not options.schedule_option:
                _begin_together(world, profiler)
            yield profiler
    except BaseException:
        if options.report and profiler.notes.error:
            write_failure(profiler, folder)
        raise
    if options.output_trace_dir is None:
        return
    target = Path(options.output_trace_dir)
    target.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(target / f"profile_{world.rank}.json"))
    barrier(world, name="profile")


def gathered_report(
    world: World,
    profiler: StepProfiler,
    *,
    folder: str | None = None,
    title: str = "profile",
    plain_step_seconds: float | None = None,
) -> Report:
    """Return the report of all ranks, with advice; the main process saves it. All ranks call this together."""
    mine = finish_rank(profiler, folder)
    report = Report.of(gather_object(world, mine), title, plain_step_seconds)
    _advise(report)
    if folder is not None and world.is_main:
        report.save(folder)
    report.folder = folder
    return report


class LoopProfiled(BaseException):
    """Ends a loop whose steps were profiled. Not an `Exception`, so that a script's own handlers let it pass."""


class LoopProfiler:
    """Profiles a loop that knows nothing of it: a step is a step of the optimizer that steps first.

    After `warm_up` steps, `steps` steps are profiled; then the report is made and `LoopProfiled` ends the loop.
    """

    def __init__(
        self,
        *,
        steps: int = 3,
        warm_up: int = 5,
        folder: str | None = None,
        title: str = "profile",
        functions: Iterable[Instrumented] = (),
    ) -> None:
        self.report: Report | None = None
        self._steps, self._warm_up, self._folder, self._title = steps, warm_up, folder, title
        self._functions = tuple(functions)
        self._first: Any = None
        self._count = 0
        self._profiler: StepProfiler | None = None
        self._timed_from = 0.0
        self._plain: float | None = None
        self._remove: Callable[[], None] = lambda: None

    def __enter__(self) -> LoopProfiler:
        self._remove = register_optimizer_step_post_hook(self._after_step).remove
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._remove()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(kind, error, trace)
            if isinstance(error, Exception):
                self.report = write_failure(profiler, self._folder)
            elif error is None:
                self._finish(profiler)  # the loop ended before all steps were profiled
        return isinstance(error, LoopProfiled)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._first is None:
            self._first = optimizer
        if optimizer is not self._first:
            return
        self._count += 1
        if self._profiler is not None:
            self._profiler.step()
        if self._count == 1:
            _synchronise()
            self._timed_from = time.perf_counter()
        if self._count == max(self._warm_up, 1):
            self._start(optimizer)
        elif self._count == max(self._warm_up, 1) + self._steps and self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            self._remove()
            self._finish(profiler)
            raise LoopProfiled

    def _start(self, optimizer: Any) -> None:
        _synchronise()
        if self._count > 1:
            self._plain = (time.perf_counter() - self._timed_from) / (self._count - 1)
        models = find_models([optimizer])
        self._profiler = StepProfiler(models, [optimizer], functions=self._functions)
        self._profiler.start()
        _begin_together(current_world(device=model_device(models).type), self._profiler)

    def _finish(self, profiler: StepProfiler) -> None:
        world = current_world(device=model_device(profiler.models).type)
        self.report = gathered_report(
            world, profiler, folder=self._folder, title=self._title, plain_step_seconds=self._plain
        )


def _begin_together(world: World, profiler: StepProfiler) -> None:
    """Begin the windows of all ranks at once: the first to start its profiler would seem to wait for the others."""
    if world.size > 1:
        barrier(world, name="profile start")
        profiler.begin_window()


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def accelerator_regions(kind: type) -> list[Instrumented]:
    """Return the verbs of an Accelerator class that a profile shows as regions."""
    names = {"save_state": "checkpoint", "save_model": "checkpoint", "save": "checkpoint", "log": "tracker"}
    return [Instrumented(kind, verb, region) for verb, region in names.items()]


def _advise(report: Report) -> None:
    from piledriver.plan.advice.advise import advise

    report.advice = advise(report)
