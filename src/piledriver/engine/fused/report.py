"""What fusing did to a model: what was replaced where, what was left, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import nn

from piledriver.engine.layout import Layout

_NAME = "_fuse_report"


@dataclass(frozen=True)
class Entry:
    """One kind of module, and what happened to it."""

    operation: str
    """Such as `rms norm` or `gated MLP`."""
    kind: str
    """The name of its class."""
    modules: tuple[str, ...]
    note: str
    """How it is computed now, or why it was left alone."""

    def __str__(self) -> str:
        return f"{self.operation}: {len(self.modules)} x {self.kind} ({number_ranges(self.modules)}): {self.note}"


@dataclass
class FuseReport:
    """The replaced and the untouched parts of one model."""

    replaced: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What concerns the model as a whole."""
    seconds: float = 0.0
    """How long `prepare` took to compare and replace."""

    def replace(self, operation: str, kind: str, modules: Iterable[str], note: str) -> None:
        """Record modules that were replaced."""
        _add(self.replaced, Entry(operation, kind, tuple(modules), note))

    def leave(self, operation: str, kind: str, modules: Iterable[str], why: str) -> None:
        """Record modules that were left alone."""
        _add(self.left, Entry(operation, kind, tuple(modules), why))

    def __str__(self) -> str:
        lines = ["replaced:" if self.replaced else "replaced: nothing"]
        lines += [f"  {entry}" for entry in self.replaced]
        lines += ["left as it was:"] * bool(self.left)
        lines += [f"  {entry}" for entry in self.left]
        return "\n".join([*lines, *self.notes])


def _add(entries: list[Entry], new: Entry) -> None:
    """Append an entry, or its modules to an entry that says the same: settings that cannot be compared split a kind."""
    for number, known in enumerate(entries):
        if (known.operation, known.kind, known.note) == (new.operation, new.kind, new.note):
            entries[number] = replace(known, modules=(*known.modules, *new.modules))
            return
    entries.append(new)


def number_ranges(names: Iterable[str]) -> str:
    """Return names with the numbers of layers as ranges.

    >>> number_ranges(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "norm"])
    'layers.{0-2}.mlp, norm'
    """
    numbers: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"(?<![^.])\d+(?![^.])", name)
        pattern = name if match is None else f"{name[: match.start()]}{{}}{name[match.end() :]}"
        numbers.setdefault(pattern, []).extend([] if match is None else [int(match.group())])
    return ", ".join(pattern.replace("{}", _range(found)) if found else pattern for pattern, found in numbers.items())


def _range(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    first, last = min(numbers), max(numbers)
    whole = len(numbers) == last - first + 1
    return "{" + (f"{first}-{last}" if whole else ",".join(map(str, sorted(numbers)))) + "}"


def attach_report(model: nn.Module, report: FuseReport) -> None:
    """Keep the report with the model."""
    model.__dict__[_NAME] = report


def report_of(model: nn.Module) -> FuseReport | None:
    """Return what fusing did to a model; None if it was not asked for."""
    found: FuseReport | None = model.__dict__.get(_NAME)
    return found


def pop_report(model: nn.Module) -> FuseReport | None:
    """Remove and return the report of a model."""
    found: FuseReport | None = model.__dict__.pop(_NAME, None)
    return found


def fuse_report(model: nn.Module, layout: Layout | None) -> FuseReport:
    """Return what fusing did to a model, or why nothing was; `layout` is None if it was not prepared."""
    found = report_of(model)
    return FuseReport(notes=[_why_not_fused(layout)]) if found is None else found


def _why_not_fused(layout: Layout | None) -> str:
    if layout is None:
        return "not prepared: describe what accelerator.prepare returned"
    if layout.fuse is False:
        return "not looked at: Layout(fuse=False)"
    if layout.reducer == "ddp":
        return "prepared without a layout: Accelerator(layout=Layout(precision='bf16')) fuses operators on a GPU"
    return "not looked at: operators are fused by default on a GPU, elsewhere with Layout(fuse=True)"
