"""The units of a model that pipeline stages are made of.

A rank drops the modules that it does not hold, so parameter names stay. A stage is a shallow copy of the model with
fewer modules and a `forward` for its part of the chain.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from piledriver.engine.errors import LayoutError
from piledriver.engine.pipeline_parallel.costs import Cost, cost_of, output_cost
from piledriver.engine.pipeline_parallel.stages.huggingface import (
    changes_between_layers,
    inner_model,
    make_huggingface_stage,
)
from piledriver.engine.pipeline_parallel.stages.transformer import make_transformer_stage
from piledriver.engine.pipeline_parallel.traced import EXAMPLE, example_of, traced_units
from piledriver.models import Transformer

LONGEST = 4096


@dataclass(frozen=True)
class Unit:
    """Modules that stay in one stage, and their cost."""

    names: tuple[str, ...]
    cost: Cost


@dataclass(frozen=True)
class PipelineUnits:
    """How to split one kind of model."""

    kind: str
    units: list[Unit]
    borrows: dict[str, str]
    """Modules of the last unit whose weight is that of a module of the first: {borrower: owner}."""
    make_stage: Callable[[nn.Module], nn.Module]
    """Turn a shallow copy that holds the modules of a stage into one whose `forward` runs them."""
    has_output: bool = False
    """Whether the last unit is the output layer, after the blocks."""


def units_of(model: nn.Module, sequence_length: int | None = None) -> PipelineUnits:
    """Return how to split a model; raise `LayoutError` if it cannot be split."""
    length = sequence_length or min(_longest(model), LONGEST)
    if isinstance(model, Transformer):
        return _transformer(model, length)
    if type(model) is nn.Sequential:
        return _sequential(model, length)
    if inner_model(model) is not None:
        return _huggingface(model, length)
    if example_of(model) is not None:
        units = [Unit(names, cost) for names, cost in traced_units(model, length)]
        return PipelineUnits("traced", units, {}, lambda made: made)
    raise LayoutError(
        f"cannot tell in which order {type(model).__name__} runs its modules, so it cannot be split into stages",
        fix=f"make it an nn.Sequential, or give it {EXAMPLE}: inputs of a micro-batch, with which it is traced",
    )


def drop_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Remove modules from a model; the remaining members of lists keep their names."""
    for name in names:
        parent_name, _, key = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            del parent._modules[key]
        else:
            parent._modules[key] = None


def shell(model: nn.Module, dropped: Iterable[str]) -> nn.Module:
    """Return a copy of a model without some modules; the others, and all parameters, are the same objects."""
    made = _shallow(model)
    copied: dict[str, nn.Module] = {"": made}
    for name in dropped:
        parts = name.split(".")[:-1]
        for depth in range(len(parts)):
            path = ".".join(parts[: depth + 1])
            if path not in copied:
                parent = copied[".".join(parts[:depth])]
                copied[path] = parent._modules[parts[depth]] = _shallow(model.get_submodule(path))
        drop_modules(made, [name])
    return made


def _shallow(module: nn.Module) -> nn.Module:
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


def _transformer(model: Transformer, length: int) -> PipelineUnits:
    blocks = [f"blocks.{key}" for key in model.blocks]
    units = [Unit((name,), cost_of(model.get_submodule(name), length)) for name in blocks]
    names = ("embedding", "position_embedding", "embedding_norm")
    ends = [name for name in names if getattr(model, name) is not None]
    first = sum((cost_of(model.get_submodule(name), length) for name in ends), Cost(0.0, 0))
    units[0] = Unit((*ends, *units[0].names), units[0].cost + first)
    units.append(Unit(("norm", "head"), output_cost(model)))
    borrows = {"head": "embedding"} if model.config.tied else {}
    return PipelineUnits("transformer", units, borrows, make_transformer_stage, has_output=True)


def _sequential(model: nn.Sequential, length: int) -> PipelineUnits:
    units = [Unit((name,), cost_of(module, length)) for name, module in model._modules.items() if module is not None]
    owner: dict[int, str] = {}
    for unit in units:
        for name, parameter in model.get_submodule(unit.names[0]).named_parameters():
            first = owner.setdefault(id(parameter), unit.names[0])
            if first != unit.names[0]:
                raise LayoutError(
                    f"modules {first} and {unit.names[0]} of the nn.Sequential share the parameter {name}",
                    fix="give each its own, or put them into one module",
                )
    return PipelineUnits("sequential", units, {}, lambda made: made)


def _huggingface(model: nn.Module, length: int) -> PipelineUnits:
    inner_name = inner_model(model)
    assert inner_name is not None
    inner = model.get_submodule(inner_name)
    if changes_between_layers(inner):
        raise LayoutError(
            f"{type(inner).__name__} changes hidden states outside its layers, which every stage would repeat",
            fix="use pp=1",
        )
    blocks = [f"{inner_name}.layers.{key}" for key in inner.layers._modules]  # type: ignore[union-attr]
    units = [Unit((name,), cost_of(model.get_submodule(name), length)) for name in blocks]
    embedding: Any = inner.embed_tokens
    units[0] = Unit((f"{inner_name}.embed_tokens", *units[0].names), units[0].cost + cost_of(embedding, length))
    head: Any = model.lm_head
    units.append(Unit((f"{inner_name}.norm", "lm_head"), cost_of(head, length)))
    tied = head.weight is embedding.weight
    borrows = {"lm_head": f"{inner_name}.embed_tokens"} if tied else {}
    return PipelineUnits("huggingface", units, borrows, make_huggingface_stage, has_output=True)


def _longest(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    for name in ("max_positions", "max_position_embeddings"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return LONGEST
