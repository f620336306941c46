"""A table of a model: for every module its inputs and outputs, its parameters, bytes and FLOPs.

Nothing is allocated or computed: the model runs on stand-ins and torch's FLOP counter listens. FLOPs count matrix
products, convolutions and attention, a multiply and an add as two. Layers that are stacked (`Scanned`, `Vmapped`) run
once for the table and count as often as they are there.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.call_args import stand_in
from piledriver.functional.frame import Context, Declaration, Frame, Place
from piledriver.functional.module import Module, bound_at
from piledriver.functional.torch_private import fake_tensor_mode
from piledriver.functional.transforms.lift import Scanned, Vmapped
from piledriver.functional.tree import Path

# Narrower tables leave the inputs and the shapes of parameters out.
_WIDE = 140
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


@dataclass(frozen=True)
class Row:
    """One call of one module. `parameters` and `bytes` are the module's own, `flops` include its children.

    In another call of the same module (`is_again`) the parameters are the same ones: add them up once.
    """

    path: Path
    kind: str
    inputs: str
    outputs: str = ""
    own: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0
    bytes: int = 0
    flops: int = 0
    depth: int = 0
    is_again: bool = False


def rows(module: Module, *args: Any, **kwargs: Any) -> list[Row]:
    """Return the table as data, in the order of the calls."""
    from torch.utils.flop_counter import FlopCounterMode

    found: list[Row] = []
    # Torch has no formula for the kernel that it uses on a CPU.
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={attention: _attention_flops})
    declared: dict[Place, Declaration] = {}
    of_copies = 0

    def listen(bound: Module, method: Callable[..., Any], inner: tuple[Any, ...], named: dict[str, Any]) -> Any:
        nonlocal of_copies
        at, before = len(found), counter.get_total_flops() + of_copies
        found.append(Row(bound.path, type(bound).__name__, _shapes((inner, named)), depth=len(bound.path)))
        output = method(bound, *inner, **named)
        flops = counter.get_total_flops() + of_copies - before
        copies = bound.length if isinstance(bound, Scanned) else bound.size if isinstance(bound, Vmapped) else 1
        of_copies += flops * (copies - 1)
        found[at] = dataclasses.replace(found[at], outputs=_shapes(output), flops=flops)
        found[at:] = [dataclasses.replace(row, flops=row.flops * copies) for row in found[at:]]
        return output

    context = Context({}, {}, None, declared=declared, device=torch.get_default_device(), hook=listen)
    with fake_tensor_mode() as mode, torch.no_grad(), counter:
        fake = functools.partial(stand_in, mode)
        fake_args, fake_kwargs = pytree.tree_map_only(Tensor, fake, (args, kwargs))
        bound_at(module, Frame(context, None, ""))(*fake_args, **fake_kwargs)
    return _with_parameters(found, declared)


def tabulate(module: Module, *args: Any, depth: int | None = None, width: int = _WIDE, **kwargs: Any) -> str:
    """Return the table as text for a terminal of this many columns, down to `depth`.

    Modules are indented under the one that they lie in. Counts and bytes are of a module's own parameters.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    listed = rows(module, *args, **kwargs)
    table = Table(
        title=type(module).__name__,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_footer=True,
    )
    counted = [row for row in listed if not row.is_again]
    count, size = sum(row.parameters for row in counted), sum(row.bytes for row in counted)
    is_wide = width >= _WIDE
    table.add_column("module", "total", overflow="fold")
    table.add_column("kind", overflow="fold")
    for name in ("inputs",) * is_wide + ("outputs",) + ("parameters",) * is_wide:
        table.add_column(name, overflow="fold")
    for name, total in (("count", f"{count:,}"), ("bytes", _bytes(size)), ("FLOPs", _flops(listed[0].flops))):
        table.add_column(name, total, justify="right", no_wrap=True)
    for row in listed:
        if depth is not None and row.depth > depth:
            continue
        own = ", ".join(f"{name} {_short(shape)}" for name, shape in row.own.items())
        has_own = row.parameters and not row.is_again
        table.add_row(
            "  " * (row.depth - 1) + (row.path[-1] if row.path else "(root)"),
            row.kind,
            *(_short(row.inputs),) * is_wide,
            _short(row.outputs),
            *("the same" if row.is_again and row.parameters else own,) * is_wide,
            f"{row.parameters:,}" if has_own else "",
            _bytes(row.bytes) if has_own else "",
            _flops(row.flops) if row.flops else "",
        )
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip() + "\n"


def _with_parameters(found: list[Row], declared: Mapping[Place, Declaration]) -> list[Row]:
    """Return rows with what was declared at their paths, or below one if no module has a row (torch's modules)."""
    paths = {row.path for row in found}
    mine: dict[Path, dict[str, Declaration]] = {path: {} for path in paths}
    sizes: dict[Path, list[Declaration]] = {path: [] for path in paths}
    for (collection, path), one in declared.items():
        above = next(path[:cut] for cut in range(len(path) - 1, -1, -1) if path[:cut] in paths)
        mine[above][".".join(path[len(above) :])] = one
        if collection == "params":
            sizes[above].append(one)
    finished: list[Row] = []
    seen: set[Path] = set()
    for row in found:
        own = {name: f"{_dtype(one.dtype)}{list(one.shape)}" for name, one in mine[row.path].items()}
        count = sum(_numel(one) for one in sizes[row.path])
        size = sum(_numel(one) * one.dtype.itemsize for one in sizes[row.path])
        is_again = row.path in seen
        finished.append(dataclasses.replace(row, own=own, parameters=count, bytes=size, is_again=is_again))
        seen.add(row.path)
    return finished


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[2] * (width + value[-1]))


def _numel(one: Declaration) -> int:
    return torch.Size(one.shape).numel()


def _shapes(tree: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return ", ".join(f"{_dtype(leaf.dtype)}{list(leaf.shape)}" for leaf in tensors)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(shapes: str) -> str:
    """Abbreviate shapes: `float32[2, 3]` as `f32[2,3]`."""
    for long, short in _SHORT.items():
        shapes = re.sub(rf"\b{long}(?=\d)", short, shapes)
    return re.sub(r"(?<=\d), (?=\d)", ",", shapes)


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(count) < base:
            return f"{count:,.0f} {unit}".strip() if unit == units[0] else f"{count:,.1f} {unit}"
        count /= base
    return f"{count:,.1f} {units[-1]}"


_bytes = functools.partial(_scaled, base=1024, units=("B", "KiB", "MiB", "GiB", "TiB"))
_flops = functools.partial(_scaled, base=1000, units=("", "k", "M", "G", "T", "P"))
