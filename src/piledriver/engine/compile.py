"""Compile a model block by block, in place, and report graph breaks and recompiles.

Only the `forward` of a block is compiled: hooks around it stay outside the graph, names stay, and equal blocks share
one compilation because their parameters are graph inputs.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from piledriver.engine.hf_kv_cache import is_cache, without_empty_caches
from piledriver.engine.layout import SPLIT_BACKWARD
from piledriver.engine.mesh import Mesh
from piledriver.engine.state import state_of
from piledriver.engine.torch_private import raise_recompile_limit

# How many compilations torch keeps metrics of; its default of 64 is too few for a long run with many shapes.
_REMEMBERED = 4096
# torch 2.11 and 2.12 warn of a choice they make within a graph; where warnings are errors, that ends the compilation.
_HINTS = (r"\s*Online softmax is disabled on the fly",)
# Graphs of one function beside two for each kind of block: modes, dtypes and masks that change.
_SPARE_GRAPHS = 6


def is_compiled(mesh: Mesh) -> bool:
    """Whether the layout compiles; unless it says, on GPUs only."""
    layout = mesh.layout
    if layout.compile is not None:
        return bool(layout.compile)
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        return False
    return mesh.device_type == "cuda"


def apply_compile(model: nn.Module, mesh: Mesh, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Compile each block of a model, or all of it if asked or nothing repeats; `options` are `torch.compile`'s."""
    if not is_compiled(mesh):
        return model
    from piledriver.engine.blocks import blocks_of

    layout = mesh.layout
    budget = layout.activation_budget if layout.activations == "budget" else None
    modules = _bodies(model) if layout.compile == "model" else list(blocks_of(model).values())
    compile_modules(modules or [model], activation_budget=budget, **(options or {}))
    return model


def _bodies(model: nn.Module) -> list[nn.Module]:
    """Return what to compile of a model whose loss is computed without logits, outside of any graph."""
    from piledriver.engine.fused.output_layer import bodies_of, is_lazy_output

    layers = [module for module in model.modules() if is_lazy_output(module)]
    return bodies_of(model, layers[0]) if len(layers) == 1 else []


def compile_modules(modules: list[nn.Module], *, activation_budget: float | None = None, **options: Any) -> None:
    """Compile the forward of modules, in place; `activation_budget` is the fraction of activations they may keep."""
    from torch._dynamo import utils

    from piledriver.engine.blocks import block_kind

    utils.set_compilation_metrics_limit(_REMEMBERED)
    for hint in _HINTS:
        warnings.filterwarnings("ignore", hint, UserWarning)
    # Stages of a convolutional network are one function with as many shapes as stages; each may get a symbolic graph.
    raise_recompile_limit(_SPARE_GRAPHS + 2 * len({block_kind(module) for module in modules}))
    for module in modules:
        outer: Any = module
        # Activation offload acts on tensors that leave the graph, so it stays outside.
        while getattr(outer.forward, "stays_outside_compiled", False):
            outer = outer.forward
        if not isinstance(outer.forward, Compiled):
            outer.forward = Compiled(outer.forward, options, activation_budget)


class Compiled:
    """A compiled forward. A deep copy compiles its own forward; a compiled function would keep the original's."""

    def __init__(
        self, forward: Callable[..., Any], options: dict[str, Any], activation_budget: float | None = None
    ) -> None:
        self.forward, self.options, self.activation_budget = forward, options, activation_budget
        self.enabled = True
        plain: Any = forward if inspect.ismethod(forward) or inspect.isfunction(forward) else type(forward).__call__
        self.compiled = torch.compile(plain if plain is forward else plain.__get__(forward), **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled:
            return self.forward(*args, **kwargs)
        if torch.is_grad_enabled():
            args, kwargs = without_empty_caches(args, kwargs)
        elif any(is_cache(one) for one in (*args, *kwargs.values())):
            # Generation: each layer reads another entry of the cache, which would be a graph for each.
            return self.forward(*args, **kwargs)
        if args and _is_transposed(args[0]):
            # The patches of an image, in the first block only: their strides would need a graph of their own.
            args = (args[0].contiguous(), *args[1:])
        if self.activation_budget is None:
            return self.compiled(*args, **kwargs)
        import torch._functorch.config as config

        # A global setting: patched around this call only, since other models have other budgets.
        with config.patch(activation_memory_budget=self.activation_budget):
            return self.compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        return Compiled(copy.deepcopy(self.forward, memo), dict(self.options), self.activation_budget)

    def __reduce__(self) -> tuple[Any, ...]:
        return Compiled, (self.forward, self.options, self.activation_budget)


def _is_transposed(given: Any) -> bool:
    """Return whether this is [batch, time, dim] of which the time is contiguous, not the dim."""
    return isinstance(given, torch.Tensor) and given.ndim == 3 and given.stride(1) == 1 != given.stride(2)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run a model uncompiled within the block: evaluation batches have too many shapes to compile each."""
    known = state_of(model)
    roots = [model] if known is None else known.roots
    compiled = [one for root in roots for module in root.modules() for one in _compiled_around(module)]
    for one in compiled:
        one.enabled = False
    try:
        yield
    finally:
        for one in compiled:
            one.enabled = True


def _compiled_around(module: nn.Module) -> Iterator[Compiled]:
    outer: Any = module.__dict__.get("forward")
    while outer is not None and not inspect.isroutine(outer):
        if isinstance(outer, Compiled):
            yield outer
        outer = getattr(outer, "forward", None)


@dataclass(frozen=True)
class CompileReport:
    """Graphs, graph breaks and recompiles of torch.compile in this process."""

    graphs: int = 0
    """Distinct graphs captured."""
    breaks: dict[str, int] = field(default_factory=dict)
    """Why and where a graph ended before its function did: reason to count."""
    recompiles: dict[str, int] = field(default_factory=dict)
    """Which function was compiled again and why: reason to count."""

    def __str__(self) -> str:
        return (
            f"{self.graphs} graphs, {sum(self.breaks.values())} breaks{_reasons(self.breaks)}, "
            f"{sum(self.recompiles.values())} recompiles{_reasons(self.recompiles)}"
        )


def compile_report() -> CompileReport:
    """Return the graphs, breaks and recompiles of this process so far.

    >>> print(CompileReport(2, {"print": 1}, {}))
    2 graphs, 1 breaks (print), 0 recompiles
    """
    from torch._dynamo import utils

    recompiles: Counter[str] = Counter()
    for metrics in utils.get_compilation_metrics():
        if metrics.recompile_reason:
            where = f"{metrics.co_name} ({_place(metrics.co_filename, metrics.co_firstlineno)})"
            # torch puts the numbers of the function and its graph before a reason, and the guarded line after it.
            reason = re.sub(r"^[0-9/]+: |\s+# .*", "", _first_line(metrics.recompile_reason))
            recompiles[f"{where}: {reason}"] += 1
    places: dict[str, str] = {}
    for one in utils.graph_break_reasons:
        if one.user_stack:
            frame = one.user_stack[-1]
            places[_first_line(one.reason)] = f" in {frame.name} ({_place(frame.filename, frame.lineno)})"
    breaks: Counter[str] = Counter()
    for reason, count in utils.counters["graph_break"].items():
        breaks[_first_line(reason) + places.get(_first_line(reason), "")] += count
    return CompileReport(utils.counters["stats"]["unique_graphs"], dict(breaks), dict(recompiles))


def reset_compiler() -> None:
    """Forget all graphs and counters of this process."""
    from torch._dynamo import reset, utils

    reset()
    utils.counters.clear()
    utils.graph_break_reasons.clear()
    utils.clear_compilation_metrics()


def _first_line(reason: str) -> str:
    return next((line.strip() for line in reason.splitlines() if line.strip()), "unknown")


def _place(filename: str | None, line: int | None) -> str:
    return f"{os.path.basename(filename or 'unknown')}:{line}"


def _reasons(reasons: dict[str, int]) -> str:
    if not reasons:
        return ""
    named = [reason if count == 1 else f"{count} x {reason}" for reason, count in reasons.items()]
    return f" ({'; '.join(named)})"
