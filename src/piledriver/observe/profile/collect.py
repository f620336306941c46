"""`StepProfiler`: torch's profiler over a few steps of a loop, with what the trace alone does not tell.

It notes when steps begin and end, which modules there are, where parameters, gradients and optimizer states lie in
memory, what was compiled, and how long the main thread was blocked.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity

from piledriver.observe.communication.recorder import CommunicationRecorder, RecordedCall
from piledriver.observe.memory.census import Releases, Storage, other_storages, owned_storages
from piledriver.observe.profile.annotations import Instrumented, annotatable, annotated
from piledriver.observe.profile.batches import BatchShapes
from piledriver.observe.profile.document_boundaries import BoundarySightings
from piledriver.observe.torch_private import clear_workspaces, recompilations


@dataclass(slots=True)
class Notes:
    """What is known about a profiled window besides its trace. Times are nanoseconds of the Unix clock."""

    begin_ns: int = 0
    end_ns: int = 0
    marks_ns: list[int] = field(default_factory=list)
    """The ends of steps."""
    thread: int = 0
    """The thread that ran the loop, as the operating system numbers it."""
    blocked_us: float | None = None
    modules: list[dict[str, Any]] = field(default_factory=list)
    sightings: list[tuple[int, list[Storage]]] = field(default_factory=list)
    released_ns: dict[int, int] = field(default_factory=dict)
    """When tensors of the host that were there before were released, by address."""
    device: str = "cpu"
    device_name: str = ""
    allocated_before: int = 0
    peak_bytes: int = 0
    """The allocator's own peak in the window."""
    reserved_peak: int = 0
    capacity: int = 0
    compilations: int = 0
    compile_seconds: float = 0.0
    compiled_modules: int = 0
    allocator: dict[str, int] = field(default_factory=dict)
    """Calls of the device's malloc, and retries after a failed one, in the window."""
    batches: dict[str, float] = field(default_factory=dict)
    """Tokens, padding, samples and calls of the outermost modules."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    boundaries: list[tuple[int, list[int]]] = field(default_factory=list)
    """Document boundaries of packed batches, with the time when they were seen."""
    collectives: list[RecordedCall] = field(default_factory=list)
    """Collectives that Python started on the host, with their ends."""
    error: str = ""


class StepProfiler(torch.profiler.profile):
    """torch's profiler, with annotations and notes for a report.

    Call `step()` after each optimizer step; without any call, steps are the optimizers' steps.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Iterable[Any] = (),
        *,
        functions: Iterable[Instrumented] = (),
        **options: Any,
    ) -> None:
        options.setdefault("record_shapes", True)
        options.setdefault("profile_memory", True)
        if not options.get("activities"):
            options["activities"] = [
                ProfilerActivity.CPU,
                *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
            ]
        super().__init__(**options)
        self.models = dict(models)
        self.optimizers = list(optimizers)
        self.notes = Notes()
        self._functions = tuple(functions)
        self._stack = ExitStack()
        self._marks: list[int] = []
        self._saved: Any = None
        self._blocked = 0.0
        self._counters: tuple[Any, ...] = ()

    @property
    def was_recorded(self) -> bool:
        """Whether a window was recorded to its end, so that it can be reported."""
        return self.notes.end_ns > 0

    def prepare_trace(self) -> None:
        """Prepare a cycle of the schedule."""
        with warnings.catch_warnings():
            # Each cycle is reported and exported by itself, so nothing is lost; torch 2.11 warns of the first one too.
            warnings.filterwarnings("ignore", "(Warning: )?Profiler clears events", UserWarning)
            super().prepare_trace()

    def start_trace(self) -> None:
        """Install the annotations and start recording: at once, or where the schedule says."""
        try:
            self._start_trace()
        except BaseException:
            self._stack.close()
            raise

    def _start_trace(self) -> None:
        self._saved = None
        device = model_device(self.models)
        cuda = device.type == "cuda"
        notes = self.notes = Notes(device=device.type, thread=threading.get_native_id())
        notes.device_name = torch.cuda.get_device_name(device) if cuda else "CPU"
        notes.modules = [
            {
                "path": path,
                "class": type(module).__name__,
                "parameters": sum(p.numel() for p in _own_parameters(module)),
            }
            for root, model in self.models.items()
            for path, module in annotatable(root, model)
        ]
        self._stack.enter_context(annotated(self.models, self._functions))
        self._batches = self._stack.enter_context(BatchShapes(self.models.values()))
        modules = (one for root, model in self.models.items() for _, one in annotatable(root, model))
        self._boundaries = self._stack.enter_context(BoundarySightings(modules, time.time_ns))
        self._recorder = self._stack.enter_context(CommunicationRecorder(every_s=0))
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        if cuda:
            torch.cuda.synchronize(device)
            clear_workspaces()
            torch.cuda.reset_peak_memory_stats(device)
            notes.allocated_before = torch.cuda.memory_allocated(device)
            notes.capacity = torch.cuda.get_device_properties(device).total_memory
        self._releases = Releases()
        owned = owned_storages(self.models, self.optimizers, self._releases)
        notes.sightings.append((time.time_ns(), owned + other_storages(owned, self._releases)))
        self._counters = (recompilations(), _allocator_counts(device))
        super().start_trace()
        self.begin_window()

    def begin_window(self) -> None:
        """Begin the window again, now: ranks that have waited for each other start together."""
        self.notes.begin_ns = time.time_ns()
        self._blocked = _blocked_us() or 0.0

    def step(self) -> None:
        """Mark the end of a step."""
        self._marks.append(time.time_ns())
        super().step()

    def stop_trace(self) -> None:
        """Stop recording and take the annotations away."""
        device = model_device(self.models)
        cuda = device.type == "cuda"
        if cuda and not self.notes.error:
            torch.cuda.synchronize(device)
        blocked = _blocked_us()
        notes = self.notes
        notes.end_ns = time.time_ns()
        notes.marks_ns = [mark for mark in self._marks if mark > notes.begin_ns] or notes.marks_ns
        notes.blocked_us = None if blocked is None else blocked - self._blocked
        if cuda:
            notes.peak_bytes = torch.cuda.max_memory_allocated(device)
            notes.reserved_peak = torch.cuda.max_memory_reserved(device)
        super().stop_trace()
        self._stack.close()
        notes.collectives = [one for one in self._recorder.calls if one.end_ns]
        (frames, seconds), before = self._counters[0], self._counters[1]
        compiled = recompilations()
        notes.compilations, notes.compile_seconds = compiled[0] - frames, compiled[1] - seconds
        after = _allocator_counts(device)
        notes.allocator = {name: after[name] - before.get(name, 0) for name in after}
        notes.released_ns = dict(self._releases.times_ns)
        notes.batches = self._batches.totals()
        notes.boundaries = self._boundaries.offsets()
        notes.compiled_modules = sum(
            1 for model in self.models.values() for one in model.modules() if _is_compiled(one)
        )
        notes.optimizer = _optimizer_facts(self.optimizers)

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Write the trace, gzipped if the path ends so. Unlike torch's, this can be called again."""
        if self._saved is None:
            self._saved = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            # Removed with the profiler, or at the end of the process.
            weakref.finalize(self, self._saved.cleanup)
            super().export_chrome_trace(os.path.join(self._saved.name, "trace.json"), *args, **kwargs)
        with (
            open(os.path.join(self._saved.name, "trace.json"), "rb") as plain,
            gzip.open(path, "wb", 3) if path.endswith(".gz") else open(path, "wb") as target,
        ):
            shutil.copyfileobj(plain, target)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            self.notes.error = f"{type(error).__name__}: {error}".splitlines()[0]
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        # Gradients are complete here, and most loops release them afterwards. One step is enough: later ones are
        # recognised by when they were allocated.
        if not self.notes.marks_ns:
            self._look([optimizer])

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not any(one is optimizer for one in self.optimizers):
            self.optimizers.append(optimizer)
        if not self.notes.marks_ns:
            self._look([optimizer])
        if self.optimizers[0] is optimizer:
            self.notes.marks_ns.append(time.time_ns())

    def _look(self, optimizers: list[Any]) -> None:
        self.notes.sightings.append((time.time_ns(), owned_storages(self.models, optimizers)))


def model_device(models: Mapping[str, nn.Module]) -> torch.device:
    """Return the device of the first parameter; without one, the accelerator if there is one."""
    for model in models.values():
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _own_parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    """Return a module's own parameters; of a compiled module, which is one row, also those inside."""
    return module.parameters() if _is_compiled(module) else module.parameters(recurse=False)


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _blocked_us() -> float | None:
    """Return how long this thread was neither running nor waiting for a processor since it began; None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat", encoding="ascii") as file:
            running, waiting, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return time.monotonic_ns() / 1000 - (running + waiting) / 1000


def _allocator_counts(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "retries": int(stats.get("num_alloc_retries", 0)),
        "device_mallocs": int(stats.get("num_device_alloc", 0)),
        "device_frees": int(stats.get("num_device_free", 0)),
    }


def _optimizer_facts(optimizers: list[Any]) -> dict[str, Any]:
    if not optimizers:
        return {}
    inner = getattr(optimizers[0], "optimizer", optimizers[0])
    defaults = getattr(inner, "defaults", {})
    return {
        "class": type(inner).__name__,
        "fused": bool(defaults.get("fused")),
        "can_be_fused": "fused" in defaults,
        "foreach": defaults.get("foreach"),
        "parameters": sum(len(group["params"]) for group in inner.param_groups),
    }


def process_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def trace_path(folder: str, rank: int) -> str:
    """Return where a rank's trace goes."""
    return os.path.join(folder, "traces", f"rank_{rank}.json.gz")
