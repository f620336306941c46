"""A table of a model: for every module its inputs and outputs, its parameters, bytes and FLOPs.

Nothing is allocated or computed: the model runs on stand-ins and torch's FLOP counter listens. FLOPs count matrix
products and attention, a multiply and an add as two.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.frame import Context, Declaration, Frame, Place
from piledriver.functional.module import Module, bound_at, stand_in
from piledriver.functional.tree import Path


@dataclass(frozen=True)
class Row:
    """One call of one module. `parameters` and `bytes` are the module's own, `flops` include what is inside it."""

    path: Path
    kind: str
    inputs: str
    outputs: str
    own: Mapping[str, str]
    parameters: int
    bytes: int
    flops: int
    depth: int


def rows(module: Module, *args: Any, **kwargs: Any) -> list[Row]:
    """The table as data, in the order of the calls."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    found: list[Row] = []
    counter = FlopCounterMode(display=False)
    declared: dict[Place, Declaration] = {}

    def listen(bound: Module, method: Callable[..., Any], inner: tuple[Any, ...], named: dict[str, Any]) -> Any:
        at = len(found)
        before = counter.get_total_flops()
        frame = bound._bound_frame("tabulate")
        known = frame.context.declared
        found.append(_row(bound, inner, named))
        output = method(bound, *inner, **named)
        mine = {place: one for place, one in (known or {}).items() if place[1][:-1] == frame.path}
        found[at] = _finished(found[at], output, mine, counter.get_total_flops() - before)
        return output

    context = Context({}, {}, None, declared=declared, device=torch.get_default_device(), hook=listen)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), counter:
        fake = functools.partial(stand_in, mode)
        fake_args, fake_kwargs = pytree.tree_map_only(Tensor, fake, (args, kwargs))
        bound_at(module, Frame(context, None, ""))(*fake_args, **fake_kwargs)
    return found


def tabulate(module: Module, *args: Any, depth: int | None = None, width: int = 160, **kwargs: Any) -> str:
    """The table as text for a terminal; `depth` hides what lies deeper."""
    from rich.console import Console
    from rich.table import Table

    listed = rows(module, *args, **kwargs)
    table = Table(title=f"{type(module).__name__}", title_justify="left")
    for name in ("path", "module", "inputs", "outputs", "parameters of its own", "count", "bytes", "FLOPs"):
        table.add_column(name, justify="right" if name in ("count", "bytes", "FLOPs") else "left", overflow="fold")
    seen: set[Path] = set()
    count, size = 0, 0
    for row in listed:
        # A shared module is called more than once; its parameters count once.
        is_new = row.path not in seen
        seen.add(row.path)
        count, size = count + row.parameters * is_new, size + row.bytes * is_new
        if depth is None or row.depth <= depth:
            own = ", ".join(f"{name} {shape}" for name, shape in row.own.items())
            numbers = (
                (f"{row.parameters:,}", _bytes(row.bytes), _flops(row.flops)) if is_new else ("", "", _flops(row.flops))
            )
            table.add_row(".".join(row.path) or "(root)", row.kind, row.inputs, row.outputs, own, *numbers)
    table.add_section()
    table.add_row("total", "", "", "", "", f"{count:,}", _bytes(size), _flops(listed[0].flops))
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def _row(bound: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Row:
    return Row(bound.path, type(bound).__name__, _shapes((args, kwargs)), "", {}, 0, 0, 0, len(bound.path))


def _finished(row: Row, output: Any, mine: Mapping[Place, Declaration], flops: int) -> Row:
    params = [one for (collection, _), one in mine.items() if collection == "params"]
    own = {place[1][-1]: f"{_dtype(one.dtype)}{list(one.shape)}" for place, one in mine.items()}
    count = sum(_numel(one) for one in params)
    size = sum(_numel(one) * one.dtype.itemsize for one in params)
    return Row(row.path, row.kind, row.inputs, _shapes(output), own, count, size, flops, row.depth)


def _numel(one: Declaration) -> int:
    return torch.Size(one.shape).numel()


def _shapes(tree: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return ", ".join(f"{_dtype(leaf.dtype)}{list(leaf.shape)}" for leaf in tensors)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(count: int) -> str:
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _flops(count: int) -> str:
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P"))


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(count) < base:
            return f"{count:,.0f} {unit}".strip() if unit == units[0] else f"{count:,.1f} {unit}"
        count /= base
    return f"{count:,.1f} {units[-1]}"
